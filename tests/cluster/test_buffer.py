"""The pipe of samples: nothing is lost or doubled, slots and bytes are bounded, staleness is bound by arithmetic."""

import asyncio
import itertools

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.buffer import MAX_REFILLS, Buffer
from cluster.ticket import Ticket


def group(position: int, version: int = 0) -> pa.Table:
    """A group as the buffer sees it: 16 bytes."""
    return pa.table({"position": [position], "policy_version_min": [version]})


def position(table: pa.Table) -> int:
    return int(table.column("position")[0].as_py())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def taking(buffer: Buffer, count: int, oldest_version: int) -> list[pa.Table]:
    return (await buffer.take(count, oldest_version)).groups


async def working(ticket: Ticket) -> None:
    """Until the group is not wanted any more."""
    async with ticket.while_wanted():
        await asyncio.Event().wait()


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
            await buffer.put(await buffer.admit("a"), group(number, version))

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
            elif what == "release":
                count = min(number, held)
                buffer.release(count)
                held -= count
            elif what == "cancelled admit":
                admission = asyncio.create_task(buffer.admit("b"))
                await settle()
                if admission.done():
                    assert buffer.give_up(admission.result(), "b")
                count = min(number, held)
                buffer.release(count)
                held -= count
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
                await buffer.put(await buffer.admit("a"), group(number, released))
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


OUTCOMES = st.lists(st.tuples(st.sampled_from(["done", "lost", "hangs"]), st.integers(0, 5)), min_size=1, max_size=20)


@given(producers=st.integers(1, 3), oversample=st.integers(0, 2), max_staleness=st.integers(0, 1), outcomes=OUTCOMES)
@settings(max_examples=60)
def test_a_group_with_two_producers_enters_once(
    producers: int, oversample: int, max_staleness: int, outcomes: list[tuple[str, int]]
) -> None:
    """Of several producers the first may hang; any may lose its group, which is then made by the other or again."""

    async def scenario() -> None:
        buffer = Buffer(2, max_staleness, 40, print, oversample, backup_after=0.0)
        first = await buffer.admit("last")  # so that it knows what a group usually takes
        fates, numbers, again, entered = itertools.cycle(outcomes), itertools.count(), [], []

        async def lane(name: str) -> None:
            while True:
                ticket = await buffer.admit(name)
                ticket.work = ticket.work or (again.pop() if again else (next(numbers), 0))
                assert name in ticket.holders
                assert len(ticket.holders) <= min(producers, 2)
                fate, pace = next(fates)
                made = False
                async with ticket.while_wanted():
                    for _ in range(1 + pace):
                        await asyncio.sleep(0)
                    if fate == "hangs" and name == "0" and producers > 1:
                        await asyncio.Event().wait()
                    made = fate != "lost" or name != "0" or producers == 1
                if made and await buffer.put(ticket, group(ticket.work[0])):
                    entered.append(ticket.work[0])
                elif buffer.give_up(ticket, name):
                    again.append(ticket.work)

        lanes = [
            asyncio.create_task(lane(str(rank)))
            for rank in range(producers)
            for _ in range(-(-buffer.slots // producers))
        ]
        await buffer.put(first, group(-1))
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
        assert set(taken) <= {-1, *entered}

    asyncio.run(scenario())


async def test_a_group_that_takes_long_goes_to_an_idle_producer_but_never_to_its_own() -> None:
    buffer = Buffer(2, 0, 2**20, print, backup_after=0.0)
    mine, quick = await buffer.admit("a"), await buffer.admit("a")
    own, other = (asyncio.create_task(buffer.admit(name)) for name in "ab")
    take = asyncio.create_task(taking(buffer, 2, 0))
    await settle()
    assert not other.done()  # what a group usually takes is not known yet
    assert await buffer.put(quick, group(0))
    assert await other is mine
    assert not own.done()
    loser = asyncio.create_task(working(mine))
    await settle()
    assert await buffer.put(mine, group(1))  # b's
    await asyncio.wait_for(loser, 1)
    assert not await buffer.put(mine, group(1))  # a's comes too late
    assert not buffer.give_up(mine, "a")
    assert list(map(position, await take)) == [0, 1]
    assert (buffer.in_use, len(buffer)) == (2, 0)
    own.cancel()


async def test_a_straggler_goes_to_nobody_else() -> None:
    """Its holder is being restarted, so its slot is not given up yet."""
    buffer = Buffer(1, 0, 2**20, print, oversample=1, backup_after=0.0)
    slow, quick = await buffer.admit("a"), await buffer.admit("a")
    assert await buffer.put(quick, group(0))
    await taking(buffer, 1, 0)
    assert not slow.wanted
    buffer.release(1)
    fresh = await buffer.admit("b")
    idle = asyncio.create_task(buffer.admit("b"))
    take = asyncio.create_task(taking(buffer, 1, 0))
    await settle()
    assert not idle.done()
    assert await buffer.put(fresh, group(1))
    assert list(map(position, await take)) == [1]
    idle.cancel()


async def test_put_waits_for_the_bytes_bound_and_a_giant_still_passes_alone() -> None:
    buffer = Buffer(3, 0, max_bytes=20, on_drop=print)
    tickets = [await buffer.admit("a") for _ in range(3)]
    await buffer.put(tickets[0], group(0))
    second = asyncio.create_task(buffer.put(tickets[1], group(1)))
    await settle()
    assert not second.done()  # 16 + 16 > 20
    assert list(map(position, await taking(buffer, 1, 0))) == [0]
    await second
    giant = asyncio.create_task(buffer.put(tickets[2], pa.concat_tables([group(2)] * 5)))
    await settle()
    assert not giant.done()
    assert list(map(position, await taking(buffer, 2, 0))) == [1, 2]
    await giant


async def test_a_cancelled_take_gives_back_what_it_held() -> None:
    buffer = Buffer(3, 0, max_bytes=2**20, on_drop=print)
    for number in range(2):
        await buffer.put(await buffer.admit("a"), group(number))
    waiting = asyncio.create_task(taking(buffer, 3, 0))
    await settle()
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (len(buffer), buffer.bytes, buffer.in_use) == (2, 32, 2)
    assert list(map(position, await taking(buffer, 2, 0))) == [0, 1]


async def test_a_stale_group_frees_its_slot_for_its_second_attempt() -> None:
    dropped: list[pa.Table] = []
    buffer = Buffer(1, 0, max_bytes=2**20, on_drop=dropped.append)
    await buffer.put(await buffer.admit("a"), group(7, version=3))
    take = asyncio.create_task(taking(buffer, 1, oldest_version=4))
    ticket = await buffer.admit("a")  # would wait for ever if the slot of the dropped group were kept
    await buffer.put(ticket, group(7, version=4))
    assert list(map(position, await take)) == [7]
    assert (list(map(position, dropped)), buffer.dropped_stale) == ([7], 1)


async def test_a_slow_group_is_waited_for_when_it_is_due_and_overtaken_before() -> None:
    """Two groups a step, staleness 1. The very first group takes as long as three steps would."""
    buffer = Buffer(2, 1, max_bytes=33, on_drop=print)
    slow, *quick = [await buffer.admit("a") for _ in range(4)]
    for number, ticket in enumerate(quick[:2], start=1):
        await buffer.put(ticket, group(number))
    assert list(map(position, await taking(buffer, 2, oldest_version=-1))) == [1, 2]  # it is overtaken
    buffer.release(2)
    await buffer.put(quick[2], group(3))
    for number in (4, 5):
        late = asyncio.create_task(buffer.put(await buffer.admit("a"), group(number, version=1)))
    take = asyncio.create_task(taking(buffer, 2, oldest_version=0))
    await settle()
    assert not take.done()  # three others are there, but at the next step the slow one would be too old
    assert late.done()  # and the bytes bound does not stand between the consumer and what it waits for
    await buffer.put(slow, group(0))
    assert sorted(map(position, await take)) == [0, 3]
    assert buffer.dropped_stale == 0


async def test_what_can_never_be_satisfied_is_refused() -> None:
    buffer = Buffer(2, 0, max_bytes=1, on_drop=print)
    with pytest.raises(ValueError, match="1 to 2 groups"):
        await buffer.take(3, 0)
    with pytest.raises(ValueError, match="cannot release 1 slots, 0 taken ones are in use"):
        buffer.release(1)


async def test_useless_groups_are_replaced_and_a_stream_of_nothing_else_still_ends() -> None:
    buffer = Buffer(2, 0, 2**20, on_drop=print)

    async def produce() -> None:
        number = 0
        while True:
            await buffer.put(await buffer.admit("a"), group(number))
            number += 1

    producer = asyncio.create_task(produce())
    odd = await buffer.take(2, 0, lambda g: position(g) % 2 == 1)
    assert (list(map(position, odd.groups)), list(map(position, odd.useless))) == ([1, 3], [0, 2])
    assert buffer.in_use == 2  # only what was taken holds a slot
    buffer.release(2)
    none = await buffer.take(2, 0, lambda g: False)
    assert (len(none.groups), len(none.useless)) == (2, 2 * MAX_REFILLS)
    producer.cancel()


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_over_sampling_takes_the_first_and_names_the_stragglers(max_staleness: int) -> None:
    """Two groups a step and one more; the very first group never ends."""
    buffer = Buffer(2, max_staleness, 2**20, on_drop=print, oversample=1)
    slow, *quick = [await buffer.admit("a") for _ in range(buffer.slots)]
    straggling = asyncio.create_task(working(slow))
    for step in range(max_staleness + 1):
        await settle()
        assert not straggling.done()  # it may still be trained on
        for number, ticket in enumerate(quick[:2], start=2 * step):
            await buffer.put(ticket, group(number, version=step))
        assert list(map(position, await taking(buffer, 2, step - max_staleness))) == [2 * step, 2 * step + 1]
        if step < max_staleness:
            buffer.release(2)
            quick = [*quick[2:], await buffer.admit("a"), await buffer.admit("a")]
    await asyncio.wait_for(straggling, 1)
    assert buffer.give_up(slow, "a")
    again = asyncio.create_task(buffer.admit("a"))
    await settle()
    assert again.done() == (max_staleness > 0)  # else it would be sampled from a policy that is too old already
    buffer.release(2)
    on_time = asyncio.create_task(working(await again))
    await settle()
    assert not on_time.done()
    on_time.cancel()
