"""A whole run in one process without a model: the real Loop, Producers, Buffer, PolicySlot, Cursor and Timeline,
between workers that wait instead of generating and a trainer that does no work. What is left is the controller's cost.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa
from rich.console import Console

from cluster.actor import Local
from cluster.buffer import Buffer
from cluster.files import Digest
from cluster.policy_slot import PolicySlot
from cluster.telemetry import Metrics, Timeline
from learner.config import RunConfig
from learner.driver.console import Progress
from learner.driver.fingerprints import Fingerprints
from learner.driver.loop import Loop
from learner.driver.run_checkpoints import RunCheckpoints
from learner.driver.step_metrics import Sinks
from rollout.data.cursor import Cursor
from rollout.fake_engine import FakeEngine
from rollout.partial import Begun
from rollout.producer import Pipes, Producer, group_seed
from rollout.schema import Problem, group_position
from rollout.types import Adapter, Sampling
from rollout.weight_sync import Answer, Receipt
from tests.groups import make_group, make_problem

VOCAB, GENERATIONS, MAX_TOKENS = 64, 8, 200
STAMPED = ("position", "attempt", "policy_version_min", "policy_version_max", "worker")


class Clock:
    """CPU seconds of this thread inside of `with` blocks, none of which may suspend."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.thread_time() - self._began


class Away:
    """What would run in other processes, its CPU time, and the groups of each worker.

    One fake engine stands for all. It samples one group before anything starts, and answers each policy's probe once:
    the groups of the run are that one with another position and version. Making text is not what is measured.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.groups: Counter[int] = Counter()
        self._engine = FakeEngine(VOCAB)
        self._group: pa.Table | None = None
        self._answers: dict[int, Answer] = {}

    async def group(self, values: Sequence[int]) -> pa.Table:
        """The sampled group with these values in the columns STAMPED."""
        if self._group is None:
            sampled = await self._engine.generate((3, 1, 2), _sampling(0, 0))
            self._group = make_group(completions=sampled, rewards=[j / GENERATIONS for j in range(GENERATIONS)])
        group = self._group
        for name, value in zip(STAMPED, values, strict=True):
            index, kind = group.schema.get_field_index(name), group.schema.field(name)
            group = group.set_column(index, kind, pa.array([value] * len(group), kind.type))
        return group

    async def answer(self, adapter: Adapter, token_ids: Sequence[int]) -> Answer:
        """What the fake engine says of the probe under this policy."""
        if adapter.version not in self._answers:
            await self._engine.load_adapter(adapter)
            answer = Answer(await self._engine.probe(token_ids), await self._engine.held(), 0.0)
            self._answers = {adapter.version: answer}
        return self._answers[adapter.version]


class Worker:
    """A RolloutWorker that runs `at_once` groups at a time and waits `seconds` for each, give or take half."""

    def __init__(self, rank: int, seconds: float, at_once: int, away: Away) -> None:
        self.rank, self.seconds, self.away = rank, seconds, away
        self._slots = asyncio.Semaphore(at_once)
        self._random = random.Random(rank)

    async def take_policy(self, adapter: Adapter) -> Receipt:
        self._adapter = adapter
        return Receipt(adapter.digest, 0.0, 0.0)

    async def probe(self, token_ids: Sequence[int]) -> Answer:
        with self.away.clock:
            return await self.away.answer(self._adapter, token_ids)

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int, begun: Begun) -> pa.Table:
        version = self._adapter.version
        async with self._slots:
            await asyncio.sleep(self.seconds * self._random.uniform(0.5, 1.5))
        with self.away.clock:
            self.away.groups[self.rank] += 1
            return await self.away.group((problem.position, attempt, version, version, self.rank))


class IdleTrainer:
    """A trainer that does no work: it counts steps and says so. Its policy is the fake engine's of that version."""

    def __init__(self, away: Away, seconds: float, on_step: Callable[[int], None]) -> None:
        self.away, self.seconds, self.on_step, self.version = away, seconds, on_step, 0

    async def step(self, groups: list[pa.Table], oldest_version: int) -> dict[str, float]:
        await asyncio.sleep(self.seconds)
        self.version += 1
        self.on_step(self.version)
        return {}

    async def policy(self) -> tuple[Adapter, float]:
        return Adapter.build(self.version, b"weights", {}), 0.0

    async def probe(self, token_ids: list[int]) -> Answer:
        adapter, _ = await self.policy()
        with self.away.clock:
            return await self.away.answer(adapter, token_ids)

    async def sees(self, file: Path) -> bool:
        return file.exists()

    async def save(self, folder: Path) -> dict[str, Digest]:
        folder.mkdir()
        return {}


class Stream:
    """Problems without a source."""

    def __len__(self) -> int:
        return 1_000_000  # of an epoch

    def at(self, position: int) -> Problem:
        return make_problem(position)


class FakeRun:
    """`workers`: seconds of a group, for each. `on_step` hears of each step as the trainer ends it."""

    def __init__(
        self, folder: Path, workers: Sequence[float], at_once: int, groups_per_step: int, max_staleness: int,
        steps: int, on_step: Callable[[int], None], trainer_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self.away, self._at_once = Away(), at_once
        config = RunConfig.model_validate(
            {
                "steps": steps,
                "max_staleness": max_staleness,
                "model": {"path": "fake", "dtype": "float32"},
                "data": {"path": "fake", "eval": {"every": 0}},
                "rewards": [{"use": "reward"}],
                "rollout": {"workers": len(workers), "num_generations": GENERATIONS},
                "learner": {"groups_per_step": groups_per_step},
                "checkpoint": {"every": 10**9},
                "trackers": [],
            }
        )
        cursor, timeline = Cursor(), Timeline(folder / "timeline.json")
        buffer = Buffer(groups_per_step, max_staleness, 2**30, lambda group: cursor.again(*group_position(group)))
        self._pipes = Pipes(Stream(), cursor, buffer, PolicySlot(), timeline)
        self._deadlines = config.cluster.deadlines
        self.producers = [self._producer(rank, seconds) for rank, seconds in enumerate(workers)]
        trainer = Local("learner", IdleTrainer, [self.away, trainer_seconds, on_step])
        sinks = Sinks(folder, Metrics(folder, [], 0), timeline, Progress(steps, Console(file=io.StringIO())))
        checkpoints = RunCheckpoints(config, Fingerprints({}, {}, {}), trainer, self._pipes, sinks)
        self.loop = Loop(config, steps, trainer, self.producers, self._pipes, sinks, [], checkpoints)
        self._late: list[asyncio.Task[None]] = []

    def _producer(self, rank: int, seconds: float) -> Producer:
        worker = Local(f"generator-{rank}", Worker, [rank, seconds, self._at_once, self.away])
        return Producer(worker, self._pipes, _sampling, self._deadlines)

    def join(self, seconds: float) -> None:
        """One worker more, in the middle of the run."""
        late = self._producer(len(self.producers), seconds)
        self._late.append(asyncio.create_task(late.run(len(self.producers) + 1)))
        self.producers.append(late)

    async def run(self) -> None:
        try:
            await self.loop.run(None)
        finally:
            for task in self._late:
                task.cancel()
            await asyncio.gather(*self._late, return_exceptions=True)
            self.loop.sinks.metrics.close()
            self.loop.sinks.timeline.close()


def _sampling(position: int, attempt: int) -> Sampling:
    return Sampling(n=GENERATIONS, max_tokens=MAX_TOKENS, seed=group_seed(0, position, attempt))
