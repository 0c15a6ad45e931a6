"""A lost worker costs what it had in flight, and no worker generates without the newest policy. Several workers on
one Buffer: what a slow or lost one costs the others, and what a late one gets.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, cast

import pyarrow as pa
import pytest

from cluster.actor import ActorDied, DeadlineExceeded, Local, StartFailed
from cluster.buffer import Buffer, PolicySlot
from cluster.config import Deadlines
from cluster.telemetry import Timeline
from rollout.delivery import Answer, Push, Receipt
from rollout.fakes import make_group, make_problem
from rollout.producer import Cursor, Pipes, PolicyFeed, Producer, SupervisedWorker, until_started
from rollout.schema import Problem, group_position
from rollout.types import Adapter, Held, Sampling
from tests.pushes import pushed, said

DEADLINES = Deadlines(group=0.2, push=5, start=5)


def no_fault(a: int, b: int) -> str | None:
    return None


class Story:
    """What happened, in order, over all lives of a worker; and what is to go wrong."""

    def __init__(self, **faults: Callable[[int, int], str | None]) -> None:
        self.events: list[Any] = []
        self.faults = faults
        self.lives = 0
        self.refuses = False  # later lives do not begin
        self.gate = asyncio.Event()  # opens what is to be `slow`

    async def happen(self, method: str, a: int, b: int) -> None:
        fault = self.faults.get(method, no_fault)(a, b)
        if fault == "die":
            raise ActorDied(f"{method} {a} {b}")
        if fault == "break":
            raise ActorDied(f"generator-0: it broke in life {a}", reason="it broke")
        if fault in ("hang", "slow"):
            await self.gate.wait()


class Worker:
    """Stands for a RolloutWorker; one object is one life."""

    def __init__(self, story: Story) -> None:
        self.story, self.version = story, -1
        story.lives += 1
        self.life = story.lives
        if story.refuses and self.life > 1:
            raise StartFailed("generator-0: no such model", "no such model", wrong_input=True)

    async def take_policy(self, adapter: Adapter) -> Receipt:
        await self.story.happen("take_policy", self.life, adapter.version)
        self.version = adapter.version
        self.story.events.append(f"life {self.life}: v{adapter.version}")
        return Receipt(adapter.digest, 0.0, 100.0 * self.life)

    async def probe(self, token_ids: tuple[int, ...]) -> Answer:
        await self.story.happen("probe", self.life, self.version)
        return said([-1.0 - self.version])

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        if self.version < 0:
            return None
        await self.story.happen("rollout", problem.position, attempt)
        self.story.events.append((problem.position, attempt))
        return make_group(problem.position, attempt=attempt)


class Process(Local[Any]):
    """Local, with its revivals on record."""

    async def revive(self, deadline_s: float) -> None:
        self._object.story.events.append("fresh")
        await super().revive(deadline_s)


class Stream:
    """Problems without a source."""

    def __len__(self) -> int:
        return 1000

    def at(self, position: int) -> Problem:
        return make_problem(position)


def push(version: int) -> Push:
    return pushed(Adapter.build(version, b"weights", {}), (1, 2), said([-1.0 - version]))


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_policy_and_its_probe_may_wait_for_the_groups_under_way(tmp_path: Path, max_staleness: int) -> None:
    buffer, timeline = Buffer(2, max_staleness, 2**20, print), Timeline(tmp_path / "timeline.json")
    pipes = Pipes(Stream(), Cursor(), buffer, PolicySlot(), timeline)
    producer = Producer(Process("generator-0", Worker, [Story()]), pipes, lambda *_: Sampling(2, 8), DEADLINES)
    assert producer.worker.deadlines.push == DEADLINES.push + max_staleness * DEADLINES.group
    timeline.close()


@asynccontextmanager
async def producing(story: Story, slots: int, folder: Path) -> AsyncIterator[Producer]:
    """A producer at work under policy v3; an exception of it ends the body and comes out as it is."""
    pipes = Pipes(Stream(), Cursor(), Buffer(slots, 0, 2**20, print), PolicySlot(), Timeline(folder / "timeline.json"))
    producer = Producer(
        Process("generator-0", Worker, [story]), pipes, lambda position, attempt: Sampling(2, 8), DEADLINES
    )
    await pipes.policy_slot.publish(3, push(3))
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(producer.run(1))
            yield producer
            running.cancel()
    except ExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    finally:
        pipes.timeline.close()


async def consume(producer: Producer, count: int) -> list[tuple[int, int]]:
    """(position, attempt) of the next groups."""
    groups: list[tuple[int, int]] = []
    for _ in range(count):
        groups += map(group_position, (await producer.pipes.buffer.take(1, 0)).groups)
        producer.pipes.buffer.release(1)
    return groups


@pytest.mark.parametrize("fault", ["die", "hang"])
async def test_what_was_in_flight_is_issued_again_under_the_newest_policy(tmp_path: Path, fault: str) -> None:
    story = Story(rollout=lambda position, attempt: fault if (position, attempt) == (1, 0) else None)
    async with producing(story, 2, tmp_path) as producer:
        groups = await consume(producer, 6)
        while (1, 1) not in groups:
            groups += await consume(producer, 1)  # the other lane goes on meanwhile
    assert len({position for position, _ in groups}) == len(groups)
    assert [group for group in groups if group[1] > 0] == [(1, 1)]
    assert story.events[0] == "life 1: v3"
    start = story.events.index("fresh")
    assert story.events[start : start + 2] == ["fresh", "life 2: v3"]
    assert producer.worker.restarts == 1
    assert producer.feed.receipt is not None
    assert producer.feed.receipt.peak_memory == 200.0  # of life 2


async def test_nobody_asks_a_fresh_process_before_it_has_its_policy(tmp_path: Path) -> None:
    """While life 2 waits for its policy, other lanes want groups and a newer policy arrives."""
    story = Story(
        rollout=lambda position, attempt: "die" if (position, attempt) == (0, 0) else None,
        take_policy=lambda life, version: "slow" if (life, version) == (2, 3) else None,
    )
    async with producing(story, 3, tmp_path) as producer:
        while story.lives < 2:
            await asyncio.sleep(0)
        taken = asyncio.create_task(consume(producer, 6))  # frees slots, so that lanes ask for more
        await producer.pipes.policy_slot.publish(4, push(4))
        for _ in range(50):
            await asyncio.sleep(0)
        assert story.events[-1] == "fresh"  # a group from life 2 would be None; v4 would be overtaken by v3
        story.gate.set()
        assert sorted(p for p, _ in await taken) == list(range(6))
        await producer.pipes.policy_slot.acknowledged(4, ["generator-0"], 5)
    assert [event for event in story.events if isinstance(event, str)] == [
        "life 1: v3", "fresh", "life 2: v3", "life 2: v4"
    ]  # fmt: skip


async def test_a_process_that_was_replaced_while_idle_gets_its_policy(tmp_path: Path) -> None:
    story = Story()
    async with producing(story, 1, tmp_path) as producer:
        assert await consume(producer, 1) == [(0, 0)]
        await producer.worker.actor.revive(1)  # and the next call comes before the policy does
        groups = await consume(producer, 3)
    assert sorted(position for position, _ in groups) == [1, 2, 3]
    assert producer.worker.restarts == 1


async def test_no_group_is_handed_over_before_its_policy_is_proven(tmp_path: Path) -> None:
    story = Story(probe=lambda life, version: "slow")
    async with producing(story, 2, tmp_path) as producer:
        while len(story.events) < 3:
            await asyncio.sleep(0)
        assert story.events == ["life 1: v3", (0, 0), (1, 0)]  # generation does not wait for the proof
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(producer.pipes.buffer) == 0
        story.gate.set()
        assert await consume(producer, 2) == [(0, 0), (1, 0)]


async def test_a_process_that_is_lost_between_load_and_proof_gets_both_again(tmp_path: Path) -> None:
    story = Story(probe=lambda life, version: "die" if life == 1 else None)
    async with producing(story, 1, tmp_path) as producer:
        assert len(await consume(producer, 2)) == 2
    assert [event for event in story.events if isinstance(event, str)] == ["life 1: v3", "fresh", "life 2: v3"]
    assert producer.worker.restarts == 1


async def test_losses_with_groups_in_between_are_no_pattern(tmp_path: Path) -> None:
    story = Story(rollout=lambda position, attempt: "die" if attempt == 0 else None)
    async with producing(story, 1, tmp_path) as producer:
        assert await consume(producer, 6) == [(position, 1) for position in range(6)]
    assert producer.worker.restarts >= 6


async def test_a_process_that_is_lost_with_its_first_policy_gets_it_again(tmp_path: Path) -> None:
    story = Story(take_policy=lambda life, version: "die" if life < 3 else None)
    async with producing(story, 1, tmp_path) as producer:
        assert await consume(producer, 1) == [(0, 0)]
    assert [event for event in story.events if isinstance(event, str)] == ["fresh", "fresh", "life 3: v3"]


async def test_the_end_of_a_run_ends_the_replacement_of_a_process_lost_with_its_first_policy(tmp_path: Path) -> None:
    story = Story(take_policy=lambda life, version: "die" if life == 1 else "slow")
    async with producing(story, 1, tmp_path) as producer:
        while story.lives < 2:
            await asyncio.sleep(0)
        assert producer.worker.away
    assert not producer.worker.away
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize("where", ["take_policy", "probe"])
async def test_what_ends_a_process_twice_in_the_same_words_is_not_tried_a_third_time(
    tmp_path: Path, where: str
) -> None:
    story = Story(**{where: lambda life, version: "break"})
    with pytest.raises(RuntimeError, match=r"^generator-0: it broke in life 2 \(twice in a row, so it is not"):
        async with producing(story, 1, tmp_path) as producer:
            await consume(producer, 1)
    assert story.lives == 2


async def test_a_constructor_that_refuses_what_it_is_given_is_not_asked_again(tmp_path: Path) -> None:
    story = Story(rollout=lambda position, attempt: "die")
    story.refuses = True
    with pytest.raises(StartFailed, match="^generator-0: no such model$"):
        async with producing(story, 1, tmp_path) as producer:
            await consume(producer, 1)
    assert story.lives == 2


@pytest.mark.parametrize(
    ("ends", "tries", "said"),
    [
        ([ActorDied("g: killed")] * 9, 4, "^g: lost 4 times in a row without finishing a group; last: g: killed$"),
        ([ActorDied("g: killed"), None], 2, None),
        ([StartFailed("g: no card", "no card", wrong_input=False)] * 9, 2, r"^g: no card \(twice in a row"),
        ([StartFailed("g: no model", "no model", wrong_input=True)] * 9, 1, "^g: no model$"),
        ([DeadlineExceeded("g: start")] * 9, 1, "^g: start$"),
    ],
)
async def test_a_worker_that_is_lost_as_it_starts_is_counted(
    ends: list[Exception | None], tries: int, said: str | None
) -> None:
    tried = iter(ends)
    count = 0

    async def start() -> None:
        nonlocal count
        count += 1
        if error := next(tried):
            raise error

    with pytest.raises(RuntimeError, match=said) if said else nullcontext():
        await until_started("g", start, start)
    assert count == tries


@pytest.mark.parametrize("where", ["rollout", "take_policy"])
async def test_the_fourth_loss_in_a_row_is_an_error(tmp_path: Path, where: str) -> None:
    """Also when the process is lost while it is being brought back."""
    broken = {
        "rollout": lambda position, attempt: "die",
        "take_policy": lambda life, version: "die" if life > 1 else None,
    }
    first = Story(rollout=broken["rollout"])
    story = first if where == "rollout" else Story(**broken)
    with pytest.raises(RuntimeError, match=f"generator-0: lost 4 times in a row .* last: {where} "):
        async with producing(story, 1, tmp_path) as producer:
            await consume(producer, 1)
    assert story.lives == 4


# What a feed says of a policy that it brought.


class Blind:
    """A worker whose engine reads back one of two tensors."""

    held = Held({"lora_A": "a"}, unread=("lora_B",))

    async def probe(self, token_ids: tuple[int, ...]) -> Answer:
        return said([-1.0])._replace(held=self.held)


async def test_what_cannot_be_read_back_is_said_once_and_what_is_read_must_be_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    worker = SupervisedWorker(Local[Any]("generator-0", Blind, []), Deadlines())
    feed = PolicyFeed(worker, PolicySlot(), timeline)
    for version in (3, 4):
        await feed.prove(pushed(Adapter.build(version, b"", {}), (1, 2), said([-1.0])))
        assert await feed.proof_of(version, 0)
    sentence = (
        "generator-0: 1 tensors cannot be read back from its engine, first lora_B: only logprobs prove that they arrive"
    )
    assert [record.getMessage() for record in caplog.records] == [sentence]
    Blind.held = Held({"lora_A": "another"}, unread=("lora_B",))
    with pytest.raises(RuntimeError, match="acknowledged v5, but .* 1 of 2 differ, first lora_A"):
        await feed.prove(pushed(Adapter.build(5, b"", {}), (1, 2), said([-1.0])))
    assert feed._proven == 4
    timeline.close()


class TooLate:
    """A worker that is brought version 3, which the learner has overwritten by then."""

    async def take_policy(self, policy: Adapter) -> Receipt | None:
        if policy.version == 3:
            return None
        self.version = policy.version
        return Receipt(policy.digest, 0.0, 0.0)

    async def probe(self, token_ids: tuple[int, ...]) -> Answer:
        return said([-self.version])


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_policy_that_was_overwritten_is_skipped_and_the_next_one_brought(tmp_path: Path, fresh: bool) -> None:
    timeline, slot = Timeline(tmp_path / "timeline.json"), PolicySlot[Push]()
    feed = PolicyFeed(SupervisedWorker(Local[Any]("generator-0", TooLate, []), Deadlines()), slot, timeline)
    pushes = {version: pushed(Adapter.build(version, b"", {}), (1, 2), said([-version])) for version in (2, 3, 4)}
    await slot.publish(2, pushes[2])
    following = asyncio.create_task(feed.follow(await feed.first()))
    await slot.publish(3, pushes[3])
    if fresh:
        await feed._leave()
        bringing = asyncio.create_task(feed._bring_newest())
    await asyncio.sleep(0.01)
    assert slot.acknowledgements == {"generator-0": 2}
    await slot.publish(4, pushes[4])
    if fresh:
        await bringing
    assert await feed.proof_of(4, feed.losses)
    assert slot.acknowledgements == {"generator-0": 4}
    following.cancel()
    timeline.close()


# Several workers on one Buffer: what a slow or lost one costs the others, and what a late one gets.

PROBE = said([-1.0])
PER_STEP, STALENESS = 2, 2


class SeveralWorkersWorker:
    """Stands for a RolloutWorker: it answers soon, or not before its gate opens. `learning`: the same of a policy."""

    def __init__(self, rank: int, gate: asyncio.Event, learning: asyncio.Event, asked: Counter[int]) -> None:
        self.rank, self.gate, self.learning, self.asked = rank, gate, learning, asked

    async def take_policy(self, adapter: Adapter) -> Receipt:
        await self.learning.wait()
        return Receipt(adapter.digest, 0.0, 0.0)

    async def probe(self, token_ids: tuple[int, ...]) -> Answer:
        return PROBE

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        self.asked[problem.position] += 1
        await self.gate.wait()
        await asyncio.sleep(0)  # as any real one, it lets the others work meanwhile
        return make_group(problem.position, attempt=attempt, worker=[self.rank] * 2)


class SeveralWorkersProcess(Local[SeveralWorkersWorker]):
    """Local, whose later lives answer soon."""

    room: ClassVar = asyncio.Event()  # for fresh processes

    async def revive(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self.room.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name}: start gave no answer within {deadline_s:g} s") from None
        await super().revive(deadline_s)
        self._object.gate = opened()


class Team:
    """Producers over one Buffer, and a consumer that learns in no time."""

    def __init__(self, folder: Path) -> None:
        self.buffer = Buffer(PER_STEP, STALENESS, 2**20, print)
        self.pipes = Pipes(Stream(), Cursor(), self.buffer, PolicySlot(), Timeline(folder / "timeline.json"))
        self.learned: list[tuple[int, int]] = []  # (position, attempt)
        self.asked: Counter[int] = Counter()  # position -> requests
        self._tasks: list[asyncio.Task[None]] = []

    def hire(
        self, gate: asyncio.Event, workers: int, learning: asyncio.Event | None = None, deadline_s: float = 60.0
    ) -> None:
        rank = len(self._tasks)
        actor = SeveralWorkersProcess(
            f"generator-{rank}", SeveralWorkersWorker, [rank, gate, learning or opened(), self.asked]
        )
        deadlines = Deadlines(group=deadline_s, start=0.01)
        producer = Producer(cast(Local[Any], actor), self.pipes, lambda position, attempt: Sampling(2, 8), deadlines)
        self._tasks.append(asyncio.create_task(producer.run(workers)))

    async def publish(self, version: int) -> None:
        push = pushed(Adapter.build(version, b"weights", {}), (1, 2), PROBE)
        await self.pipes.policy_slot.publish(version, push)

    async def learn(self) -> Counter[int]:
        """One step; groups by worker."""
        batch = await self.buffer.take(PER_STEP, 0)
        self.learned += map(group_position, batch.groups)
        self.buffer.release(PER_STEP)
        await idle()
        return Counter(group.column("worker")[0].as_py() for group in batch.groups)

    async def dismiss(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.pipes.timeline.close()


@asynccontextmanager
async def team(folder: Path) -> AsyncIterator[Team]:
    """A team under policy v0; the workers are up to the body."""
    members = Team(folder)
    await members.publish(0)
    SeveralWorkersProcess.room.set()
    try:
        yield members
    finally:
        await members.dismiss()


def opened() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


async def idle() -> None:
    """Until nothing more happens by itself."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_slow_worker_is_waited_for_when_its_groups_are_due_and_not_before(tmp_path: Path) -> None:
    """It holds three groups of version 0. When one place is left in the second batch, they need it and all of the third
    one, which is the last that they can be in."""
    gate = asyncio.Event()
    async with team(tmp_path) as members:
        members.hire(gate, 2)
        members.hire(opened(), 2)
        assert await members.learn() == {1: 2}
        waiting = asyncio.create_task(members.learn())
        await idle()
        assert not waiting.done()
        gate.set()
        assert await waiting == {0: 1, 1: 1}
        assert await members.learn() == {0: 2}
    assert max(members.asked.values()) == 1


async def test_what_a_lost_worker_had_is_issued_again_and_made_by_whoever_is_free(tmp_path: Path) -> None:
    """It hangs; its process is replaced after deadlines.group."""
    async with team(tmp_path) as members:
        members.hire(asyncio.Event(), 2, deadline_s=0.2)
        members.hire(opened(), 2)
        for _ in range(20):
            await members.learn()
    assert [group for group in sorted(members.learned) if group[1] > 0] == [(0, 1), (1, 1), (2, 1)]
    assert len({position for position, _ in members.learned}) == 20 * PER_STEP


async def test_a_worker_whose_node_is_lost_is_waited_for_by_nobody_and_taken_back(tmp_path: Path) -> None:
    """Its slots are free at once; it misses a policy, and many starts for which there is no room."""
    async with team(tmp_path) as members:
        members.hire(asyncio.Event(), 2, deadline_s=0.1)
        members.hire(opened(), 2)
        slot = members.pipes.policy_slot
        await slot.acknowledged(0, ["generator-0", "generator-1"], 5)
        SeveralWorkersProcess.room.clear()
        for version in range(1, 4):
            for _ in range(20):
                assert await members.learn() == {1: 2} or version == 1
            await asyncio.sleep(0.1)  # as long as ten starts
            await members.publish(version)
            await slot.acknowledged(version, ["generator-0", "generator-1"], 5)
        assert slot.acknowledgements == {"generator-0": 0, "generator-1": 3}
        SeveralWorkersProcess.room.set()
        while slot.acknowledgements["generator-0"] < 3:
            await asyncio.sleep(0)
        await idle()
        shares = sum([await members.learn() for _ in range(30)], Counter())
    assert min(shares[0], shares[1]) >= 10 * PER_STEP
    assert len({position for position, _ in members.learned}) == len(members.learned)
    assert {p for p, _ in members.learned} >= {0, 1, 2}


async def test_a_worker_that_waits_long_for_its_first_policy_holds_no_slot(tmp_path: Path) -> None:
    async with team(tmp_path) as members:
        members.hire(opened(), 2)
        members.hire(opened(), 2, learning=asyncio.Event())
        shares = sum([await members.learn() for _ in range(10)], Counter())
        assert shares == {0: 10 * PER_STEP}
        assert members.pipes.policy_slot.acknowledgements == {"generator-0": 0}


async def test_a_late_worker_gets_its_share(tmp_path: Path) -> None:
    async with team(tmp_path) as members:
        members.hire(opened(), 2)
        await members.learn()
        members.hire(opened(), 2)
        await idle()
        shares = sum([await members.learn() for _ in range(30)], Counter())
    assert shares.total() == 30 * PER_STEP
    assert min(shares[0], shares[1]) >= 10 * PER_STEP


async def test_a_process_that_ends_while_nothing_is_asked_of_it_is_replaced_at_once() -> None:
    class Ending(Local[Any]):
        ends, revived = asyncio.Event(), asyncio.Event()

        async def until_ended(self, silence_s: float) -> None:
            await self.ends.wait()
            raise ActorDied("generator-0: process died")

        async def revive(self, deadline_s: float) -> None:
            self.ends.clear()
            self.revived.set()

    worker = SupervisedWorker(Ending("generator-0", object, []), Deadlines())
    keeping = asyncio.create_task(worker.keep())
    await idle()
    assert worker.restarts == 0
    Ending.ends.set()
    async with asyncio.timeout(5):
        await Ending.revived.wait()
    await idle()
    assert worker.restarts == 1
    assert not worker.away
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
