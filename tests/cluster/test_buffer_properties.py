"""Whatever happens to the pipe of samples: nothing is lost or doubled, and staleness is bound by arithmetic."""

import asyncio
import itertools

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.buffer import Buffer, GroupSlot
from tests.cluster.buffers import group, position, settle, taking


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
