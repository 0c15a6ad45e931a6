"""A run in one process, without a model: the real Loop, producers and pipes, with a fake engine and a fake trainer."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.system.local_run import (
    VOCAB,
    FakeTrainer,
    LocalRun,
    MadeUpProblems,
    local_run,
)
from cluster.actor import Actor, Local
from cluster.config import Deadlines
from learner.config import RunConfig
from learner.config.arrangement import ARRANGEMENTS
from learner.driver.evaluate import Evaluation
from learner.driver.record import RunCheckpoints
from learner.trainer.service import TrainerService
from rollout import ledger
from rollout.fakes import FakeEngine, FakeWorker, make_problem
from rollout.types import Completion, Sampling

PER_STEP = 3
PROBLEMS = 31  # of an epoch
PROMPT = 4  # tokens


class Paced(FakeEngine):
    """Groups of every fourth position take longer than the others."""

    def __init__(self, pace_s: float, drop_adapter_at: int | None) -> None:
        super().__init__(VOCAB, drop_adapter_at=drop_adapter_at)
        self.pace_s = pace_s

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        self._delay_s = self.pace_s * (40 if prompt_ids[0] % 4 == 0 and len(prompt_ids) == PROMPT else 1)
        return await super().generate(prompt_ids, sampling)


class Worker(FakeWorker):
    def __init__(self, pace_s: float, drop_adapter_at: int | None) -> None:
        super().__init__(Paced(pace_s, drop_adapter_at))


class Trainer(FakeTrainer):
    """Notes what it is given; mismatch_k3: of the policies after the third."""

    def __init__(self, pace_s: float, mismatch_k3: float) -> None:
        super().__init__(VOCAB, pace_s)
        self.mismatch_k3 = mismatch_k3
        self.learned: list[list[pa.Table]] = []
        self.holds_the_card: Callable[[], bool] = lambda: True
        self.cached = 0

    async def step(self, groups: list[pa.Table]) -> dict[str, float]:
        assert self.holds_the_card()
        self.cached = 1
        self.learned.append(groups)
        metrics = await super().step(groups)
        return metrics | {"policy/mismatch_k3": self.mismatch_k3 * (self.version > 3)}

    async def release_cache(self) -> None:
        assert self.holds_the_card()
        self.cached = 0


def configure(**changed: Any) -> RunConfig:
    on_cards = max(changed.get("cluster", {}).get("gpus", {0: 0}).values()) > 0  # there adapters are in 16 bits
    given: dict[str, Any] = {
        "model": {"path": "fake", "dtype": "bfloat16" if on_cards else "float32"},
        "data": {"path": "fake", "eval": {"every": 2}},
        "rewards": [{"use": "odd"}],
        "learner": {"groups_per_step": PER_STEP},
        "rollout": {"num_generations": 2, "max_completion_length": 6},
        "checkpoint": {"every": 2, "keep": 9},
        "trackers": [],
    }
    changed["rollout"] = given["rollout"] | changed.get("rollout", {})
    return RunConfig.model_validate(given | changed)


def waiting(config: RunConfig, **seconds: float) -> RunConfig:
    """The same, with these deadlines; the others are as they are by default."""
    return config.model_copy(update={"cluster": config.cluster.waiting(Deadlines(**seconds))})


class Built(LocalRun):
    """A local run, with what tests look at."""

    @property
    def step(self) -> int:
        return self.loop.step

    @property
    def stop(self) -> asyncio.Event:
        return self.loop.stop

    @property
    def evaluations(self) -> list[Evaluation]:
        return self.loop.held_out.evaluations

    @property
    def total_steps(self) -> int:
        return self.loop.schedule.total_steps

    async def run(self, resume_from: Path | None, *beside: Any) -> None:
        await self.loop.run(resume_from, *beside)

    @property
    def checkpoints(self) -> RunCheckpoints:
        return self.loop.checkpoints


def build(
    folder: Path,
    config: RunConfig,
    total_steps: int,
    *,
    resume_step: int = 0,
    workers: Sequence[Local[Any]] | None = None,
    pace_s: float = 0.0,
    trainer_s: float = 0.0,
    mismatch_k3: float = 0.0,
    alternating: bool = False,
    trainer: Actor[TrainerService] | None = None,
) -> Built:
    """A run in one process."""
    made = local_run(
        folder,
        config,
        total_steps,
        problems=MadeUpProblems(PROBLEMS, lambda position: make_problem(position, (position % VOCAB, 1, 5, 2))),
        heldout=[make_problem(position) for position in (1000, 1001)],
        generators=workers or [Local(f"generator-{rank}", Worker, [pace_s, None]) for rank in range(2)],
        trainer=trainer or Local("learner", Trainer, [trainer_s, mismatch_k3]),
        resumed_step=resume_step,
        arrangement=ARRANGEMENTS["alternating"] if alternating else None,
    )
    return Built(made.loop, made.pipes, made.sinks, made.trainer)


async def started(run: Built, steps: int) -> asyncio.Task[None]:
    """A run that goes on after so many steps; fails if it ended before."""
    running = asyncio.create_task(finish(run))
    while run.step < steps and not running.done():
        await asyncio.sleep(1e-3)
    if running.done():
        await running
    return running


async def finish(run: Built, resume_from: Path | None = None) -> None:
    await run.finish(resume_from)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def consumed(folder: Path) -> list[list[int]]:
    """Positions by step, as they lie in the ledger."""
    steps = [ledger.read(path).column("position").to_pylist() for path in ledger.steps(folder / "rollouts")]
    return [list(dict.fromkeys(step)) for step in steps]


def first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
