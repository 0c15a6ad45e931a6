"""Several workers on one Buffer: what a slow or lost one costs the others, and what a late one gets."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import pyarrow as pa

from cluster.actor import ActorDied, DeadlineExceeded, Local
from cluster.buffer import Buffer, PolicySlot
from cluster.config import Deadlines
from cluster.telemetry import Timeline
from rollout.data.problems import Cursor
from rollout.delivery import Answer, Receipt
from rollout.fakes import make_group, make_problem
from rollout.producer import Pipes, Producer, SupervisedWorker
from rollout.schema import Problem, group_position
from rollout.types import Adapter, Sampling
from tests.pushes import pushed, said

PROBE = said([-1.0])
PER_STEP, STALENESS = 2, 2


class Worker:
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


class Process(Local[Worker]):
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


class Stream:
    """Problems without a source."""

    def __len__(self) -> int:
        return 1000

    def at(self, position: int) -> Problem:
        return make_problem(position)


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
        actor = Process(f"generator-{rank}", Worker, [rank, gate, learning or opened(), self.asked])
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
    Process.room.set()
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
        Process.room.clear()
        for version in range(1, 4):
            for _ in range(20):
                assert await members.learn() == {1: 2} or version == 1
            await asyncio.sleep(0.1)  # as long as ten starts
            await members.publish(version)
            await slot.acknowledged(version, ["generator-0", "generator-1"], 5)
        assert slot.acknowledgements == {"generator-0": 0, "generator-1": 3}
        Process.room.set()
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
