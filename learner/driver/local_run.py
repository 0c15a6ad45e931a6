"""A whole run in one process: the real Loop, producers, Buffer and policy slot, between whatever objects are given.

With rollout.fake_worker and learner.driver.fake_trainer it needs no model and no Ray, and takes less than a second: for
logic tests, for the benchmark of the controller, and for trying a change of the data flow.
"""

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cluster.actor import Actor, Local, RevivableActor
from cluster.telemetry import Metrics, Timeline
from learner.config import RunConfig
from learner.driver import checkpoint
from learner.driver.console import Progress
from learner.driver.fake_trainer import FakeTrainer
from learner.driver.fingerprints import Fingerprints
from learner.driver.loop import Loop
from learner.driver.phases import Phases
from learner.driver.step_metrics import Sinks, closed
from learner.driver.wiring import Inputs, wire
from learner.trainer.service import TrainerService
from rollout.fake_engine import FakeEngine
from rollout.fake_worker import FakeWorker
from rollout.producer import Pipes, ProblemStream
from rollout.schema import Problem
from rollout.service import RolloutService

VOCAB = 8  # of the fakes that are used where none are given


class MadeUpProblems:
    """Problems without a source. size: of an epoch."""

    def __init__(self, size: int, problem: Callable[[int], Problem]) -> None:
        self._size, self._problem = size, problem

    def __len__(self) -> int:
        return self._size

    def at(self, position: int) -> Problem:
        """The problem at this position of the stream."""
        return self._problem(position)


def counting_problem(position: int) -> Problem:
    """A problem whose prompt begins with its position, modulo the vocabulary of the fakes."""
    return Problem(
        f"train-{position}", f"question {position}", {"answer": "4"}, (position % VOCAB, 1, 5, 2), position, 0
    )


@dataclass(slots=True)
class LocalRun:
    """The parts of a run, to be looked at; `finish` runs it."""

    loop: Loop
    pipes: Pipes
    sinks: Sinks
    trainer: Actor[TrainerService]

    async def finish(self, resume_from: Path | None = None) -> None:
        """Runs to the last step, and closes what it writes to."""
        with closed(self.sinks):
            await self.loop.run(resume_from)


def local_run(
    folder: Path,
    config: RunConfig,
    total_steps: int,
    *,
    problems: ProblemStream | None = None,
    heldout: Sequence[Problem] = (),
    generators: Sequence[RevivableActor[RolloutService]] | None = None,
    trainer: Actor[TrainerService] | None = None,
    resumed_step: int = 0,
    alternating: bool = False,
    weights_stay: bool = False,
) -> LocalRun:
    """A run that leaves its files in `folder`; two fake generators and a fake trainer where none are given.

    resumed_step: of the checkpoint that `finish` will be given. alternating: as memory.layout.
    weights_stay: as of Inputs.
    """
    if generators is None:
        generators = [Local(f"generator-{rank}", FakeWorker, [FakeEngine(VOCAB), rank]) for rank in range(2)]
    trainer = trainer or Local("learner", FakeTrainer, [VOCAB])
    problems = problems or MadeUpProblems(1000, counting_problem)
    checkpoint.set_aside_after(folder / "checkpoints", resumed_step)
    sinks = Sinks(
        folder,
        Metrics(folder, [], resumed_step),
        Timeline(folder / "timeline.json"),
        Progress(total_steps, config.kv_dtype, Console(file=io.StringIO())),
        Phases(time.perf_counter()),
    )
    inputs = Inputs(config, total_steps, problems, heldout, Fingerprints({}, {}, {}), alternating, weights_stay)
    loop, pipes = wire(inputs, generators, trainer, sinks)
    return LocalRun(loop, pipes, sinks, trainer)
