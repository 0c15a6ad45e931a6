"""A whole run in one process without a model: the real Loop, Producers, Buffer, PolicySlot, Cursor and Timeline,
between workers that wait instead of generating and a trainer that does no work. What is left is the controller's cost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from cluster.actor import Local
from cluster.files import Digest
from learner.config import RunConfig
from learner.driver.launch import sampling_of
from learner.driver.local import FakeTrainer, MadeUpProblems, local_run
from rollout.delivery import Answer, Receipt
from rollout.fakes import FakeEngine, make_group, make_problem
from rollout.producer import Producer
from rollout.schema import Problem
from rollout.service import RolloutService
from rollout.types import Adapter, Sampling, SentPolicy, Weights, WeightsInFile, group_seed

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

    async def answer(self, policy: Adapter | Weights, token_ids: Sequence[int]) -> Answer:
        """What the fake engine says of the probe under this policy."""
        if policy.version not in self._answers:
            if isinstance(policy, Weights):
                await self._engine.load_weights(policy)
            else:
                await self._engine.load_adapter(policy)
            answer = Answer(await self._engine.probe(token_ids), await self._engine.held(), 0.0)
            self._answers = {policy.version: answer}
        return self._answers[policy.version]


class Worker(RolloutService):
    """A rollout worker that runs `at_once` groups at a time and waits `seconds` for each, give or take half."""

    def __init__(self, rank: int, seconds: float, at_once: int, away: Away) -> None:
        self.rank, self.seconds, self.away = rank, seconds, away
        self._slots = asyncio.Semaphore(at_once)
        self._random = random.Random(rank)

    async def take_policy(self, policy: SentPolicy) -> Receipt:
        assert not isinstance(policy, WeightsInFile), "the fake trainer sends adapters"
        self._policy = policy
        return Receipt(policy.digest, 0.0, 0.0)

    async def probe(self, token_ids: Sequence[int]) -> Answer:
        with self.away.clock:
            return await self.away.answer(self._policy, token_ids)

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        version = self._policy.version
        async with self._slots:
            await asyncio.sleep(self.seconds * self._random.uniform(0.5, 1.5))
        with self.away.clock:
            self.away.groups[self.rank] += 1
            return await self.away.group((problem.position, attempt, version, version, self.rank))

    async def sleep(self) -> None:
        raise NotImplementedError

    async def wake(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to end."""


class IdleTrainer(FakeTrainer):
    """A trainer that does no work: it counts steps and says so, and saves nothing."""

    def __init__(self, away: Away, seconds: float, on_step: Callable[[int], None]) -> None:
        super().__init__(VOCAB, seconds)
        self.away, self.on_step = away, on_step

    async def step(self, groups: list[pa.Table]) -> dict[str, float]:
        await super().step(groups)
        self.on_step(self.version)
        return {}

    async def probe(self, token_ids: list[int]) -> Answer:
        with self.away.clock:
            return await self.away.answer(self.adapter(), token_ids)

    async def save(self, folder: Path) -> dict[str, Digest]:
        folder.mkdir()
        return {}


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
                "rollout": {
                    "workers": len(workers),
                    "num_generations": GENERATIONS,
                    "max_completion_length": MAX_TOKENS,
                },
                "learner": {"groups_per_step": groups_per_step},
                "checkpoint": {"every": 10**9},
                "trackers": [],
            }
        )
        generators = [self._generator(rank, seconds) for rank, seconds in enumerate(workers)]
        self._run = local_run(
            folder,
            config,
            steps,
            problems=MadeUpProblems(1_000_000, make_problem),
            generators=generators,
            trainer=Local("learner", IdleTrainer, [self.away, trainer_seconds, on_step]),
        )
        self.producers = [*self._run.loop.producers]
        self._deadlines = config.cluster.deadlines
        self._sampling = sampling_of(config)
        self._late: list[asyncio.Task[None]] = []

    def _generator(self, rank: int, seconds: float) -> Local[Worker]:
        return Local(f"generator-{rank}", Worker, [rank, seconds, self._at_once, self.away])

    def join(self, seconds: float) -> None:
        """One worker more, in the middle of the run."""
        worker = self._generator(len(self.producers), seconds)
        late = Producer(worker, self._run.pipes, self._sampling, self._deadlines)
        self._late.append(asyncio.create_task(late.run(len(self.producers) + 1)))
        self.producers.append(late)

    async def run(self) -> None:
        try:
            await self._run.finish()
        finally:
            for task in self._late:
                task.cancel()
            await asyncio.gather(*self._late, return_exceptions=True)


def _sampling(position: int, attempt: int) -> Sampling:
    return Sampling(n=GENERATIONS, max_tokens=MAX_TOKENS, seed=group_seed(0, position, attempt))
