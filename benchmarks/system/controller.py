"""The controller's own cost from 1 to 64 rollout workers and more, in one process without a model, Ray or a GPU.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.controller [--workers 1 2 4 ...]

Real: Loop, Producers, Buffer, PolicySlot, Cursor, Timeline, ledger, metrics, between workers that wait instead of
generating and a trainer that does no work. Not there: Ray's share of a call (benchmarks.engine.push groups),
generation, training. Controller milliseconds are CPU time of the whole process less what workers and trainer spent in
their own code (they copy a ready group and answer the probe), so timers of their waits are in them. Ideal throughput is
what the workers do when they never wait: AT_ONCE / seconds, summed over the workers.

A process that wakes up ten times a second finds its caches cold, and takes several times the CPU time for the same
work. Hence the workers are counted twice: with groups of the same seconds, so that 64 of them make 64 times the groups
of one, and with groups of the same rate, so that what grows with their number is seen apart from that. The stand-ins,
who do the same for every group, tell by their own time how cold it is.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pyarrow as pa

from benchmarks.common import as_table, conditions, parser_of, save, under
from benchmarks.system.local_run import FakeTrainer, MadeUpProblems, local_run
from cluster.actor import Local
from cluster.files import Digest
from learner.config import RunConfig
from rollout.delivery import Answer, Receipt
from rollout.fakes import FakeEngine, make_group, make_problem
from rollout.schema import Problem
from rollout.service import RolloutService
from rollout.types import Adapter, Sampling, SentPolicy, Weights, WeightsInFile, group_seed

GROUPS_PER_STEP, STALENESS = 64, 3
AT_ONCE = 2  # groups that a worker runs at a time
RATE = 300.0  # groups/s of all workers together, where they are to have one
PAGE = resource.getpagesize()
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
    """What would run in other processes, and its CPU time.

    One fake engine stands for all. It samples one group before anything starts, and answers each policy's probe once:
    the groups of the run are that one with another position and version. Making text is not what is measured.
    """

    def __init__(self) -> None:
        self.clock = Clock()
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
    """A rollout worker that runs AT_ONCE groups at a time and waits `seconds` for each, give or take half."""

    def __init__(self, rank: int, seconds: float, away: Away) -> None:
        self.rank, self.seconds, self.away = rank, seconds, away
        self._slots = asyncio.Semaphore(AT_ONCE)
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
            return await self.away.group((problem.position, attempt, version, version, self.rank))

    async def sleep(self) -> None:
        raise NotImplementedError

    async def wake(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to end."""


class IdleTrainer(FakeTrainer):
    """A trainer that does no work: it counts steps and says so, and saves nothing."""

    def __init__(self, away: Away, on_step: Callable[[int], None]) -> None:
        super().__init__(VOCAB, 0.0)
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
    """`seconds`: of a group of a worker. `on_step` hears of each step as the trainer ends it."""

    def __init__(
        self, folder: Path, workers: int, seconds: float, groups_per_step: int, steps: int,
        on_step: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.away = Away()
        config = RunConfig.model_validate(
            {
                "steps": steps, "max_staleness": STALENESS, "model": {"path": "fake", "dtype": "float32"},
                "data": {"path": "fake", "eval": {"every": 0}}, "rewards": [{"use": "reward"}],
                "rollout": {
                    "workers": workers, "num_generations": GENERATIONS, "max_completion_length": MAX_TOKENS,
                },
                "learner": {"groups_per_step": groups_per_step}, "checkpoint": {"every": 10**9}, "trackers": [],
            }
        )  # fmt: skip
        generators = [Local(f"generator-{rank}", Worker, [rank, seconds, self.away]) for rank in range(workers)]
        trainer = Local("learner", IdleTrainer, [self.away, on_step])
        problems = MadeUpProblems(1_000_000, make_problem)
        self._run = local_run(folder, config, steps, problems=problems, generators=generators, trainer=trainer)

    async def run(self) -> None:
        await self._run.finish()


def _sampling(position: int, attempt: int) -> Sampling:
    return Sampling(n=GENERATIONS, max_tokens=MAX_TOKENS, seed=group_seed(0, position, attempt))


class Mark(NamedTuple):
    """The state of the process at the end of a step; what taking it costs lies between `cpu` and `cpu_after`."""

    wall: float
    cpu: float
    away: float
    resident: int
    cpu_after: float

    @classmethod
    def of(cls, fake: FakeRun) -> Mark:
        wall, cpu, away = time.perf_counter(), time.process_time(), fake.away.clock.seconds
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        return cls(wall, cpu, away, resident, time.process_time())


def measure(workers: int, seconds: float, steps: int, groups_per_step: int = GROUPS_PER_STEP) -> dict[str, Any]:
    """One run; `seconds`: of a group of a worker. The clock starts when what fills the buffer at the beginning is used
    up, and runs for `steps` optimizer steps."""
    warm = 2 * (1 + STALENESS)
    marks: dict[int, Mark] = {}

    def on_step(step: int) -> None:
        if step in (warm, warm + steps):
            marks[step] = Mark.of(fake)

    with tempfile.TemporaryDirectory() as folder:
        fake = FakeRun(Path(folder), workers, seconds, groups_per_step, warm + steps, on_step)
        asyncio.run(fake.run())
    first, last = marks[warm], marks[warm + steps]
    groups, wall = steps * groups_per_step, last.wall - first.wall
    row = {
        "workers": workers,
        "groups_per_step": groups_per_step,
        "groups_per_s": groups / wall,
        "ideal_groups_per_s": workers * AT_ONCE / seconds,
        "controller_ms": 1e3 * (last.cpu - first.cpu_after - last.away + first.away) / groups,
        "away_ms": 1e3 * (last.away - first.away) / groups,
        "resident_growth_bytes": (last.resident - first.resident) / groups,
    }
    print({key: round(value, 4) for key, value in row.items()}, flush=True)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["workers", "groups a step", "controller CPU-ms per group", "stand-ins' own", "groups/s", "ideal",
              "of ideal", "KiB grown per group"]  # fmt: skip
    return as_table(header, [
        [
            str(row["workers"]), str(row["groups_per_step"]), f"{row['controller_ms']:.2f}", f"{row['away_ms']:.2f}",
            f"{row['groups_per_s']:.0f}", f"{row['ideal_groups_per_s']:.0f}",
            f"{row['groups_per_s'] / row['ideal_groups_per_s']:.2f}", f"{row['resident_growth_bytes'] / 1024:.1f}",
        ]
        for row in rows
    ])  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=0.2, help="of a group in a worker")
    parser.add_argument("--most", type=int, default=256, help="workers of a run with as many groups a step")
    options = parser.parse_args()
    told = conditions()
    alike = [measure(count, options.seconds, max(4, min(16, 2 * count))) for count in options.workers]
    same_rate = [measure(count, count * AT_ONCE / RATE, 32) for count in options.workers]
    many = measure(options.most, 5 * options.seconds, 16, groups_per_step=options.most)
    text = (
        f"# The controller, {options.workers[0]} to {options.most} workers on no model\n\n"
        f"Workers with groups of {options.seconds:g} s, and many with groups of {5 * options.seconds:g} s:\n\n"
        f"{table([*alike, many])}\n\nThe same at one rate, {RATE:.0f} groups/s from all workers:\n\n"
        f"{table(same_rate)}\n\nA worker runs {AT_ONCE} groups at a time; staleness {STALENESS}. KiB grown: resident "
        "memory of the process from the first to the last measured step, by groups trained on.\n\n"
        f"Conditions: {under(told, 'CPU time, of this process alone')}"
    )
    save("controller", {"conditions": told, "rows": alike, "same_rate": same_rate, "many": many}, text)


if __name__ == "__main__":
    main()
