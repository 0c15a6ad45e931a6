"""Several workers on one Buffer: how far a slow one holds the others up, and what a late one gets."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from cluster.actors import Local
from cluster.buffer import Buffer
from cluster.config import DeadlineConfig
from cluster.latest import Latest
from cluster.telemetry import Timeline
from rollout.cursor import Cursor
from rollout.delivery import Push, Receipt
from rollout.engine import Adapter, Sampling
from rollout.producer import Pipes, Producer
from rollout.schema import Problem
from tests.groups import make_group, make_problem

PROBE = np.array([-1.0], np.float32)
PER_STEP, STALENESS = 2, 2


class Worker:
    """Stands for a RolloutWorker: it answers soon, or not before its gate opens."""

    def __init__(self, rank: int, gate: asyncio.Event) -> None:
        self.rank, self.gate = rank, gate

    async def take_policy(self, adapter: Adapter, probe_ids: tuple[int, ...]) -> Receipt:
        return Receipt(adapter.digest, PROBE, 0.0, 0.0, 0.0)

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        await self.gate.wait()
        await asyncio.sleep(0)  # as any real one, it lets the others work meanwhile
        return make_group(problem.position, attempt=attempt, worker=[self.rank] * 2)


class Stream:
    """Problems without a source."""

    def at(self, position: int) -> Problem:
        return make_problem(position)


class Team:
    """Producers over one Buffer, and a consumer that learns in no time."""

    def __init__(self, folder: Path) -> None:
        self.buffer = Buffer(PER_STEP, STALENESS, 2**20, print)
        self.pipes = Pipes(Stream(), Cursor(), self.buffer, Latest(), Timeline(folder / "timeline.json"))
        self.step = 0
        self._tasks: list[asyncio.Task[None]] = []

    def hire(self, gate: asyncio.Event, workers: int) -> None:
        rank = len(self._tasks)
        actor = Local(f"generator-{rank}", Worker, [rank, gate])
        producer = Producer(actor, self.pipes, lambda position, attempt: Sampling(2, 8), DeadlineConfig())
        self._tasks.append(asyncio.create_task(producer.run(workers)))

    async def learn(self) -> Counter[int]:
        """One step; groups by worker."""
        batch = await self.buffer.take(PER_STEP, 0)
        self.step += 1
        await self.buffer.release(PER_STEP)
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
    await members.pipes.latest.publish(0, Push(Adapter.build(0, b"weights", {}), (1, 2), PROBE, None, "float32"))
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


async def test_a_slow_worker_holds_the_others_up_by_the_staleness_bound_and_no_more(tmp_path: Path) -> None:
    """Its groups of version 0 are due in step STALENESS + 1; until then the quick one fills every batch alone."""
    gate = asyncio.Event()
    async with team(tmp_path) as members:
        members.hire(gate, 2)
        members.hire(opened(), 2)
        await idle()
        for _ in range(STALENESS):
            assert await members.learn() == {1: PER_STEP}
        waiting = asyncio.create_task(members.learn())
        await idle()
        assert not waiting.done()  # on-policy enough only if the slow ones are in it
        gate.set()
        assert await waiting == {0: PER_STEP}


async def test_a_late_worker_gets_its_share(tmp_path: Path) -> None:
    async with team(tmp_path) as members:
        members.hire(opened(), 2)
        await members.learn()
        members.hire(opened(), 2)
        await idle()
        shares = sum([await members.learn() for _ in range(30)], Counter())
    assert shares.total() == 30 * PER_STEP
    assert min(shares[0], shares[1]) >= 10 * PER_STEP
