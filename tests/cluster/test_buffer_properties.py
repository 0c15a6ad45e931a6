"""Whatever happens to the pipe of samples: nothing is lost or doubled, and staleness is bound by arithmetic."""

import asyncio
import itertools

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.buffer import Buffer
from cluster.group_slot import Ticket
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


async def begun_admission(buffer: Buffer) -> asyncio.Task[Ticket]:
    """One that waits, or has given up what it got."""
    admission = asyncio.create_task(buffer.admit("b"))
    await settle()
    if admission.done():
        assert buffer.give_up(admission.result(), "b")
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
            await buffer.put(await buffer.admit("a"), group(number, version), "a")

        async def consume(count: int) -> None:
            nonlocal held
            got = await taking(buffer, count, oldest)
            assert len(got) == count
            assert all(t.column("policy_version_max")[0].as_py() >= oldest for t in got)
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
                await buffer.put(await buffer.admit("a"), group(number, released), "a")
                number += 1

        producer = asyncio.create_task(produce())
        seen: list[int] = []
        ages: list[int] = []
        for step, pace in enumerate(paces):
            groups = await taking(buffer, per_step, step - max_staleness)
            seen += map(position, groups)
            ages += [step - g.column("policy_version_max")[0].as_py() for g in groups]
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
    oversample=st.integers(0, 15),
    picks=st.lists(st.integers(0, 99), min_size=1, max_size=40),
)
@settings(max_examples=60)
def test_nothing_grows_too_old_in_whatever_order_groups_are_done(
    max_staleness: int, per_step: int, oversample: int, picks: list[int]
) -> None:
    """Each group that the learner waits for is any of those under way. Over-sampled ones that it leaves are stopped,
    and go on under the next policy; no token of theirs grows too old either, however often that happens to one."""

    async def scenario() -> None:
        dropped: list[pa.Table] = []
        buffer = Buffer(per_step, max_staleness, 2**20, dropped.append, oversample)
        under_way: dict[Ticket, int] = {}
        stragglers: list[tuple[int, int]] = []  # number of the group, version of its oldest token
        numbers, choice = itertools.count(), itertools.cycle(picks)

        async def admit(version: int) -> None:
            while buffer.in_use < buffer.slots:
                ticket = await buffer.admit("a")
                under_way[ticket], ticket.oldest = stragglers.pop(0) if stragglers else (next(numbers), version)

        taken: list[int] = []
        ages: dict[int, int] = {}  # number of the group -> version of its oldest token
        for step in range(12):
            await admit(step)
            take = asyncio.create_task(taking(buffer, per_step, step - buffer.staleness))
            await settle()
            while not take.done():
                ticket = list(under_way)[next(choice) % len(under_way)]
                ages[under_way[ticket]] = ticket.oldest
                assert await buffer.put(ticket, group(under_way.pop(ticket), step), "a")
                await settle()
            taken += map(position, take.result())
            assert all(step - ages[number] <= buffer.staleness for number in map(position, take.result()))
            buffer.release(per_step)
            for ticket in [ticket for ticket in under_way if not ticket.wanted]:
                assert buffer.give_up(ticket, "a")
                stragglers.append((under_way.pop(ticket), ticket.oldest))
        assert not dropped
        assert len(set(taken)) == len(taken) == 12 * per_step

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
                if made and await buffer.put(ticket, group(ticket.work[0]), name):
                    entered.append(ticket.work[0])
                elif buffer.give_up(ticket, name):
                    again.append(ticket.work)

        lanes = [
            asyncio.create_task(lane(str(rank)))
            for rank in range(producers)
            for _ in range(-(-buffer.slots // producers))
        ]
        await buffer.put(first, group(-1), "last")
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
