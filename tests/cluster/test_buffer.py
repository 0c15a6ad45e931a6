"""The pipe of samples, case by case: slots and bytes, overtaking, useless groups, stragglers. Whatever happens to
the pipe of samples: nothing is lost or doubled, and staleness is bound by arithmetic. The pipe of policies: newest
wins, and who is late has a name.
"""

import asyncio
import itertools

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.buffer import MAX_REFILLS, Buffer, GroupSlot, PolicySlot
from tests.cluster.buffers import group, position, settle, taking

# Whatever happens to the pipe of samples: nothing is lost or doubled, and staleness is bound by arithmetic.


async def drained(buffer: Buffer, oldest: int) -> list[int]:
    """Positions of what is left, taken one at a time."""
    left: list[int] = []
    while True:
        task = asyncio.create_task(taking(buffer, 1, oldest))
        await settle()
        if not task.done():
            task.cancel()
            return left
        left.append(position(task.result()[0]))
        buffer.release(1)


async def begun_admission(buffer: Buffer) -> asyncio.Task[GroupSlot]:
    """One that waits, or has given up what it got."""
    admission = asyncio.create_task(buffer.admit())
    await settle()
    if admission.done():
        buffer.give_up(admission.result())
    return admission


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 4)),  # policy version of the group
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.just("cancelled take"), st.integers(1, 3)),
        st.tuples(st.just("cancelled admit"), st.integers(0, 1)),  # slots that are released in the same moment
        st.tuples(st.just("release"), st.integers(1, 3)),
        st.tuples(st.just("step"), st.just(0)),  # the learner's version grows
    ),
    max_size=40,
)


@given(slots=st.integers(3, 6), max_groups=st.integers(1, 4), moves=MOVES)
@settings(max_examples=60)
def test_every_group_is_taken_once_or_dropped_once(slots: int, max_groups: int, moves: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        taken: list[int] = []
        dropped: list[int] = []
        buffer = Buffer(slots, 0, 16 * max_groups, on_drop=lambda t: dropped.append(position(t)))
        produced, held, oldest = 0, 0, 0

        async def produce(number: int, version: int) -> None:
            await buffer.put(await buffer.admit(), group(number, version))

        async def consume(count: int) -> None:
            nonlocal held
            got = await taking(buffer, count, oldest)
            assert len(got) == count
            assert all(t.column("policy_version_min")[0].as_py() >= oldest for t in got)
            taken.extend(map(position, got))
            held += count

        producers: list[asyncio.Task[None]] = []
        for what, number in moves:
            if what == "put":
                producers.append(asyncio.create_task(produce(produced, number)))
                produced += 1
            elif what == "step":
                oldest += 1
            elif what in ("release", "cancelled admit"):
                admission = await begun_admission(buffer) if what == "cancelled admit" else None
                count = min(number, held)
                buffer.release(count)
                held -= count
                if admission is not None:
                    admission.cancel()
            else:
                task = asyncio.create_task(consume(number))
                await settle()
                task.cancel()  # a take that found enough is done by now
                await asyncio.gather(task, return_exceptions=True)
            await settle()
            assert 0 <= buffer.in_use <= slots
            assert buffer.bytes == 16 * len(buffer)
        buffer.release(held)
        taken += await drained(buffer, oldest)
        await asyncio.gather(*producers)
        assert sorted(taken + dropped) == list(range(produced))
        assert buffer.dropped_stale == len(dropped)
        assert (buffer.in_use, buffer.bytes, len(buffer)) == (0, 0, 0)

    asyncio.run(scenario())


@given(
    max_staleness=st.sampled_from([0, 1, 3]),
    per_step=st.integers(1, 3),
    paces=st.lists(st.integers(0, 4), min_size=12, max_size=12),
)
@settings(max_examples=40)
def test_the_staleness_bound_is_arithmetic(max_staleness: int, per_step: int, paces: list[int]) -> None:
    """Groups enter in the order of their admission; whatever the learner's pace, none is dropped or trained too old."""

    async def scenario() -> None:
        dropped: list[pa.Table] = []
        buffer = Buffer(per_step, max_staleness, 2**20, dropped.append)
        released = 0  # the version that every generator holds

        async def produce() -> None:
            number = 0
            while True:
                await buffer.put(await buffer.admit(), group(number, released))
                number += 1

        producer = asyncio.create_task(produce())
        seen: list[int] = []
        ages: list[int] = []
        for step, pace in enumerate(paces):
            groups = await taking(buffer, per_step, step - max_staleness)
            seen += map(position, groups)
            ages += [step - g.column("policy_version_min")[0].as_py() for g in groups]
            for _ in range(pace):  # the learner works; in sync mode nobody else does
                await asyncio.sleep(0)
            if max_staleness == 0:
                assert (len(buffer), buffer.in_use) == (0, per_step)
            released = step + 1
            buffer.release(per_step)
        producer.cancel()
        assert seen == list(range(per_step * len(paces)))
        assert not dropped
        assert max(ages) == max_staleness  # reached (12 steps are enough), never passed
        assert min(ages) >= 0

    asyncio.run(scenario())


@given(
    max_staleness=st.sampled_from([0, 1, 3]),
    per_step=st.integers(1, 3),
    picks=st.lists(st.integers(0, 99), min_size=1, max_size=40),
)
@settings(max_examples=60)
def test_nothing_grows_too_old_in_whatever_order_groups_are_done(
    max_staleness: int, per_step: int, picks: list[int]
) -> None:
    """Each group that the learner waits for is any of those under way."""

    async def scenario() -> None:
        dropped: list[pa.Table] = []
        buffer = Buffer(per_step, max_staleness, 2**20, dropped.append)
        under_way: dict[GroupSlot, int] = {}
        numbers, choice = itertools.count(), itertools.cycle(picks)

        async def admit() -> None:
            while buffer.in_use < buffer.slots:
                under_way[await buffer.admit()] = next(numbers)

        taken: list[int] = []
        begun: dict[int, int] = {}  # number of the group -> the policy version that it was begun under
        for step in range(12):
            await admit()
            take = asyncio.create_task(taking(buffer, per_step, step - max_staleness))
            await settle()
            while not take.done():
                slot = list(under_way)[next(choice) % len(under_way)]
                begun[under_way[slot]] = slot.version
                await buffer.put(slot, group(under_way.pop(slot), slot.version))
                await settle()
            taken += map(position, take.result())
            assert all(step - begun[number] <= max_staleness for number in map(position, take.result()))
            buffer.release(per_step)
        assert not dropped
        assert len(set(taken)) == len(taken) == 12 * per_step

    asyncio.run(scenario())


FATES = st.lists(st.tuples(st.sampled_from(["done", "lost", "hangs"]), st.integers(0, 5)), min_size=1, max_size=20)
DEADLINE = 50  # turns of the event loop after which a call that hangs is lost


@given(producers=st.integers(1, 3), max_staleness=st.integers(0, 2), fates=FATES)
@settings(max_examples=60)
def test_no_batch_waits_for_ever_and_each_group_enters_once_whatever_a_worker_loses(
    producers: int, max_staleness: int, fates: list[tuple[str, int]]
) -> None:
    """The first of several workers may lose any of its groups, at once or after a deadline; then it is made again."""

    async def scenario() -> None:
        buffer = Buffer(2, max_staleness, 40, print)
        coming, numbers, again, entered = itertools.cycle(fates), itertools.count(), list[int](), list[int]()

        async def generate(may_fail: bool) -> bool:
            fate, pace = next(coming)
            fails = may_fail and fate != "done"
            for _ in range(DEADLINE if fails and fate == "hangs" else 1 + pace):
                await asyncio.sleep(0)
            return not fails

        async def lane(may_fail: bool) -> None:
            while True:
                slot = await buffer.admit()
                number = again.pop() if again else next(numbers)
                if await generate(may_fail):
                    await buffer.put(slot, group(number))
                    entered.append(number)
                else:
                    buffer.give_up(slot)
                    again.append(number)

        lanes = [
            asyncio.create_task(lane(may_fail=rank == 0 and producers > 1))
            for rank in range(producers)
            for _ in range(-(-buffer.slots // producers))
        ]
        taken: list[int] = []
        for _ in range(6):
            taken += map(position, await asyncio.wait_for(taking(buffer, 2, 0), 10))
            buffer.release(2)
            assert 0 <= buffer.in_use <= buffer.slots
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        assert len(set(entered)) == len(entered)
        assert len(set(taken)) == len(taken) == 12
        assert set(taken) <= set(entered)

    asyncio.run(scenario())


# The pipe of policies: newest wins, and who is late has a name.


@pytest.fixture
async def policy_slot() -> PolicySlot[str]:
    """Two generators hold v0, the newest."""
    made: PolicySlot[str] = PolicySlot()
    await made.publish(0, "v0")
    for name in ("generator-0", "generator-1"):
        await made.acknowledge(name, 0)
    return made


async def test_newest_wins_and_versions_in_between_are_skipped() -> None:
    policy_slot: PolicySlot[str] = PolicySlot()
    reader = asyncio.create_task(policy_slot.wait_newer(-1))
    await asyncio.sleep(0)
    assert not reader.done()
    await policy_slot.publish(0, "v0")
    assert await reader == "v0"
    await policy_slot.publish(1, "v1")
    await policy_slot.publish(5, "v5")
    assert await policy_slot.wait_newer(0) == "v5"
    with pytest.raises(ValueError, match="must grow, got 5 after 5"):
        await policy_slot.publish(5, "again")
    assert policy_slot.get() == "v5"


async def test_acknowledged_waits_for_all_and_takes_newer_for_granted() -> None:
    policy_slot: PolicySlot[str] = PolicySlot()
    waiting = asyncio.create_task(policy_slot.acknowledged(3, ["generator-0", "generator-1"], deadline_s=30))
    await policy_slot.acknowledge("generator-0", 3)
    await asyncio.sleep(0)
    await policy_slot.acknowledge("generator-1", 2)
    await asyncio.sleep(0)
    assert not waiting.done()
    await policy_slot.acknowledge("generator-1", 4)
    await waiting


async def test_who_is_late_is_named_with_what_it_holds() -> None:
    policy_slot: PolicySlot[str] = PolicySlot()
    await policy_slot.acknowledge("generator-0", 7)
    await policy_slot.acknowledge("generator-1", 6)
    late = r"v7 not acknowledged .* by generator-1 \(holds v6\), generator-2 \(holds v-1\);"
    with pytest.raises(TimeoutError, match=late):
        await policy_slot.acknowledged(7, ["generator-0", "generator-1", "generator-2"], deadline_s=0.01)


async def test_who_leaves_is_no_longer_waited_for(policy_slot: PolicySlot[str]) -> None:
    waiting = asyncio.create_task(policy_slot.acknowledged(1, ["generator-0", "generator-1"], deadline_s=30))
    await policy_slot.acknowledge("generator-0", 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    await policy_slot.leave("generator-1")
    async with asyncio.timeout(1):
        await waiting
    assert not policy_slot.others("generator-0")


async def test_who_comes_back_is_waited_for_again(policy_slot: PolicySlot[str]) -> None:
    await policy_slot.leave("generator-1")
    policy_slot.back("generator-1")
    assert policy_slot.others("generator-0")
    await policy_slot.publish(1, "v1")
    await policy_slot.acknowledge("generator-0", 1)
    with pytest.raises(TimeoutError, match=r"by generator-1 \(holds v0\);"):
        await policy_slot.acknowledged(1, ["generator-0", "generator-1"], deadline_s=0.01)


pytestmark = pytest.mark.timeout(20)  # seconds; what waits for ever shall be seen soon (make mutants)


async def test_an_admission_that_is_given_up_takes_no_slot() -> None:
    """Neither while it waits nor in the moment in which its turn comes; the next in line gets what it leaves."""
    buffer = Buffer(1, 0, 2**20, print)
    held = await buffer.admit()
    for when in ("waiting", "just before", "just after"):
        waiting = asyncio.create_task(buffer.admit())
        await settle()
        if when == "just after":
            buffer.give_up(held)
        waiting.cancel()
        if when == "just before":
            buffer.give_up(held)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert buffer.in_use == (when == "waiting")
        held = held if when == "waiting" else await asyncio.wait_for(buffer.admit(), 10)
        assert buffer.in_use == 1


async def test_a_group_that_is_put_cannot_be_given_up() -> None:
    buffer = Buffer(2, 0, 2**20, print)
    slots = [await buffer.admit() for _ in range(2)]
    for number, slot in enumerate(slots):
        await buffer.put(slot, group(number))
    buffer.give_up(slots[0])
    assert list(map(position, await taking(buffer, 2, 0))) == [0, 1]
    buffer.give_up(slots[1])
    assert buffer.in_use == 2


async def test_the_bytes_bound_may_be_reached() -> None:
    buffer = Buffer(3, 0, max_bytes=32, on_drop=print)
    for number in range(2):
        await asyncio.wait_for(buffer.put(await buffer.admit(), group(number)), 10)
    third = asyncio.create_task(buffer.put(await buffer.admit(), group(2)))
    await settle()
    assert (third.done(), buffer.bytes) == (False, 32)
    third.cancel()


async def test_a_slot_names_the_policy_that_every_producer_holds() -> None:
    buffer = Buffer(2, 1, 2**20, print)
    versions = []
    for number in range(6):
        slot = await asyncio.wait_for(buffer.admit(), 10)
        versions.append(slot.version)
        await buffer.put(slot, group(number))
        await taking(buffer, 1, 0)
        buffer.release(1)
    assert versions == [0, 0, 1, 1, 2, 2]


async def test_put_waits_for_the_bytes_bound_and_a_giant_still_passes_alone() -> None:
    buffer = Buffer(3, 0, max_bytes=20, on_drop=print)
    slots = [await buffer.admit() for _ in range(3)]
    await buffer.put(slots[0], group(0))
    second = asyncio.create_task(buffer.put(slots[1], group(1)))
    await settle()
    assert not second.done()  # 16 + 16 > 20
    assert list(map(position, await taking(buffer, 1, 0))) == [0]
    await second
    giant = asyncio.create_task(buffer.put(slots[2], pa.concat_tables([group(2)] * 5)))
    await settle()
    assert not giant.done()
    assert list(map(position, await taking(buffer, 2, 0))) == [1, 2]
    await giant


async def test_a_cancelled_take_gives_back_what_it_held() -> None:
    buffer = Buffer(3, 0, max_bytes=2**20, on_drop=print)
    for number in range(2):
        await buffer.put(await buffer.admit(), group(number))
    waiting = asyncio.create_task(taking(buffer, 3, 0))
    await settle()
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (len(buffer), buffer.bytes, buffer.in_use) == (2, 32, 2)
    assert list(map(position, await taking(buffer, 2, 0))) == [0, 1]


async def test_what_a_cancelled_take_gives_back_is_younger_than_a_slow_group_still() -> None:
    buffer = Buffer(2, 2, max_bytes=2**20, on_drop=print)
    slow, *quick = [await buffer.admit() for _ in range(3)]
    for number, slot in enumerate(quick, start=1):
        await buffer.put(slot, group(number))
    await taking(buffer, 2, oldest_version=-1)
    buffer.release(2)
    for _ in range(3):
        younger = await buffer.admit()
    assert (slow.version, younger.version) == (0, 1)
    await buffer.put(younger, group(3, version=1))
    waiting = asyncio.create_task(taking(buffer, 2, oldest_version=-1))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await buffer.put(slow, group(0))
    assert list(map(position, await taking(buffer, 2, oldest_version=-1))) == [0, 3]


async def test_a_stale_group_frees_its_slot_for_its_second_attempt() -> None:
    dropped: list[pa.Table] = []
    buffer = Buffer(1, 0, max_bytes=2**20, on_drop=dropped.append)
    await buffer.put(await buffer.admit(), group(7, version=3))
    take = asyncio.create_task(taking(buffer, 1, oldest_version=4))
    slot = await buffer.admit()  # would wait for ever if the slot of the dropped group were kept
    await buffer.put(slot, group(7, version=4))
    assert list(map(position, await take)) == [7]
    assert (list(map(position, dropped)), buffer.dropped_stale) == ([7], 1)


async def test_a_slow_group_is_waited_for_when_it_is_due_and_overtaken_before() -> None:
    """Two groups a step, staleness 1. The very first group takes as long as three steps would."""
    buffer = Buffer(2, 1, max_bytes=33, on_drop=print)
    slow, *quick = [await buffer.admit() for _ in range(4)]
    for number, slot in enumerate(quick[:2], start=1):
        await buffer.put(slot, group(number))
    assert list(map(position, await taking(buffer, 2, oldest_version=-1))) == [1, 2]  # it is overtaken
    buffer.release(2)
    await buffer.put(quick[2], group(3))
    for number in (4, 5):
        late = asyncio.create_task(buffer.put(await buffer.admit(), group(number, version=1)))
    take = asyncio.create_task(taking(buffer, 2, oldest_version=0))
    await settle()
    assert not take.done()  # three others are there, but at the next step the slow one would be too old
    assert late.done()  # and the bytes bound does not stand between the consumer and what it waits for
    await buffer.put(slow, group(0))
    assert sorted(map(position, await take)) == [0, 3]
    assert buffer.dropped_stale == 0


async def started(buffer: Buffer) -> list[GroupSlot]:
    """Six groups of version 0, of which two were taken: in its order, one under way, three that may end, two new."""
    first, *quick = [await buffer.admit() for _ in range(6)]
    for number, slot in enumerate(quick[:2]):
        await buffer.put(slot, group(number))
    await taking(buffer, 2, 0)
    buffer.release(2)
    return [first, *quick[2:], await buffer.admit(), await buffer.admit()]


async def test_a_batch_that_is_partly_taken_is_the_one_that_waiting_groups_can_be_in() -> None:
    """Two groups a step, staleness 2. Two of version 0 are waited for; this batch lacks one, and the next is theirs."""
    buffer = Buffer(2, 2, 2**20, print)
    _, _, gone, quick, young, _ = await started(buffer)
    await buffer.put(quick, group(2))
    assert list(map(position, await taking(buffer, 1, 0))) == [2]
    buffer.give_up(gone)
    await buffer.put(young, group(3, version=1))
    assert list(map(position, await asyncio.wait_for(taking(buffer, 1, 0), 10))) == [3]


async def test_a_resumed_run_counts_policy_versions_on_from_its_checkpoint() -> None:
    """A step after version 7, staleness 1: of three groups of version 7 one is left, and batch 8 waits for it."""
    buffer = Buffer(2, 1, 2**20, print)
    buffer.resume(7)
    slow, *quick = [await asyncio.wait_for(buffer.admit(), 10) for _ in range(4)]
    assert {slot.version for slot in (slow, *quick)} == {7}
    for number, slot in enumerate(quick[:2]):
        await buffer.put(slot, group(number, version=7))
    await taking(buffer, 2, 0)
    buffer.release(2)
    await buffer.put(quick[2], group(2, version=7))
    young = await buffer.admit()
    assert young.version == 8
    await buffer.put(young, group(3, version=8))
    batch = asyncio.create_task(taking(buffer, 2, 0))
    await settle()
    assert not batch.done()
    await buffer.put(slow, group(4, version=7))
    assert sorted(map(position, await asyncio.wait_for(batch, 10))) == [2, 4]


async def test_groups_of_several_ages_that_wait_count_together() -> None:
    """Two groups a step, staleness 2. One of version 0 and three of version 1 fill this batch and the next one."""
    buffer = Buffer(2, 2, 2**20, print)
    oldest, gone, *quick, older, _ = await started(buffer)
    buffer.give_up(gone)
    assert (await buffer.admit()).version == 1
    for number, slot in enumerate(quick, start=2):
        await buffer.put(slot, group(number))
    assert list(map(position, await taking(buffer, 2, 0))) == [2, 3]
    buffer.release(2)
    await buffer.put(await buffer.admit(), group(4, version=2))
    take = asyncio.create_task(taking(buffer, 2, 0))
    await settle()
    assert len(buffer) == 1
    await buffer.put(oldest, group(5))
    await settle()
    assert not take.done()  # the three could not all be in the next batch
    take.cancel()
    await settle()
    assert (len(buffer), buffer.bytes) == (2, 32)  # what it had taken is back
    take = asyncio.create_task(taking(buffer, 2, 0))
    await settle()
    await buffer.put(older, group(6, version=1))
    assert list(map(position, await take)) == [5, 6]


@pytest.mark.parametrize("wrong", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_sizes_that_hold_nothing_are_refused(wrong: tuple[int, int, int]) -> None:
    per_step, max_staleness, max_bytes = wrong
    with pytest.raises(ValueError, match="buffer: groups_per_step and max_bytes must be >= 1"):
        Buffer(per_step, max_staleness, max_bytes, print)
    Buffer(max(per_step, 1), max(max_staleness, 0), max(max_bytes, 1), print)


async def test_what_can_never_be_satisfied_is_refused() -> None:
    buffer = Buffer(2, 0, max_bytes=1, on_drop=print)
    with pytest.raises(ValueError, match="1 to 2 groups"):
        await buffer.take(3, 0)
    with pytest.raises(ValueError, match="1 to 2 groups"):
        await buffer.take(0, 0)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot release 1 slots, 0 taken ones are in use"):
            buffer.release(1)
        await buffer.put(await buffer.admit(), group(0))
        await taking(buffer, 1, 0)
        buffer.release(1)


async def test_a_group_goes_as_too_old_for_its_oldest_token() -> None:
    dropped: list[pa.Table] = []
    buffer = Buffer(4, 0, 2**20, dropped.append)
    for number, oldest in enumerate([(2, 2), (1, 2), (3, 2), (2, 3)]):
        rows = pa.table({"position": [number] * 2, "policy_version_min": oldest})
        await buffer.put(await buffer.admit(), rows)
    assert list(map(position, await taking(buffer, 3, 2))) == [0, 2, 3]
    assert (list(map(position, dropped)), buffer.dropped_stale) == ([1], 1)


async def test_useless_groups_are_replaced_and_a_stream_of_nothing_else_still_ends() -> None:
    buffer = Buffer(2, 0, 2**20, on_drop=print)

    async def produce() -> None:
        number = 0
        while True:
            await buffer.put(await buffer.admit(), group(number))
            number += 1

    producer = asyncio.create_task(produce())
    odd = await buffer.take(2, 0, lambda g: position(g) % 2 == 1)
    assert (list(map(position, odd.groups)), list(map(position, odd.useless))) == ([1, 3], [0, 2])
    assert buffer.in_use == 2  # only what was taken holds a slot
    buffer.release(2)
    none = await buffer.take(2, 0, lambda g: False)
    assert (len(none.groups), len(none.useless)) == (2, 2 * MAX_REFILLS)
    producer.cancel()
