"""A whole run in one process: the real Loop, producers, Buffer and policy slot, between whatever objects are given.

With rollout.fakes and the FakeTrainer below it needs no model and no Ray, and takes less than a second: for
logic tests, for the benchmark of the controller, and for trying a change of the data flow.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from cluster.actor import Actor, Local, RevivableActor, Shared
from cluster.files import Digest, digests_in, writing
from cluster.telemetry import Metrics, Timeline
from learner.config import RunConfig
from learner.config.arrangement import Arrangement
from learner.driver import checkpoint
from learner.driver.arrangement import hooks_of
from learner.driver.console import Phases, Progress
from learner.driver.identity import Fingerprints
from learner.driver.launch import Inputs, wire
from learner.driver.loop import Loop
from learner.driver.record import Sinks, closed
from learner.trainer.service import Arithmetic, Exported, TrainerService
from rollout.data.curriculum import Curriculum
from rollout.delivery import Answer
from rollout.fakes import FakeEngine, FakeWorker
from rollout.producer import Pipes, ProblemStream
from rollout.schema import Problem
from rollout.service import RolloutService
from rollout.types import Adapter, Manifest, SentPolicy, WeightsInFile

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
    arrangement: Arrangement | None = None,
    weights_stay: bool = False,
    curriculum: Curriculum | None = None,
) -> LocalRun:
    """A run that leaves its files in `folder`; two fake generators and a fake trainer where none are given.

    resumed_step: of the checkpoint that `finish` will be given. arrangement: None: by memory.layout.
    weights_stay, curriculum: as of Inputs.
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
    lies = arrangement or config.arrangement
    inputs = Inputs(
        config, total_steps, problems, heldout, Fingerprints({}, {}, {}), hooks_of(lies), weights_stay, curriculum
    )
    loop, pipes = wire(inputs, generators, trainer, sinks)
    return LocalRun(loop, pipes, sinks, trainer)


# A trainer that learns nothing: its policy is the fake engine's of the same version.

VERSION_FILE = "adapter_model.safetensors"  # what is published must have the name that users load


class FakeTrainer(TrainerService):
    """seconds: that a step takes."""

    def __init__(self, vocab_size: int, seconds: float = 0.0) -> None:
        self.version, self.seconds, self._vocab_size = 0, seconds, vocab_size
        self._rows = 0  # of the newest step

    async def step(self, groups: list[pa.Table]) -> dict[str, float]:
        await asyncio.sleep(self.seconds)
        self.version += 1
        self._rows = sum(map(len, groups))
        return {"loss/total": float(self.version)}

    async def mismatch(self) -> pa.Array:
        """It computes no logprobs."""
        return pa.nulls(self._rows, pa.list_(pa.float16()))

    async def score(self, groups: list[pa.Table]) -> list[list[float]]:
        """Of one reward model, which counts tokens."""
        return [[float(len(ids)) for group in groups for ids in group.column("completion_ids").to_pylist()]]

    async def rehearse(self, prompt_length: int, teacher_length: int = 0) -> dict[str, float]:
        return {"memory/learner_peak": 0.0}

    async def outgoing(self, stays: bool = False) -> tuple[Shared[SentPolicy], Exported]:
        adapter = self.adapter()
        return Shared(adapter), Exported(adapter.policy_id, 4.0)

    async def empty_weights(self) -> WeightsInFile:
        return WeightsInFile(0, "", "nowhere", "", 0, 0, 0)

    def adapter(self) -> Adapter:
        return Adapter.build(self.version, b"weights %d" % self.version, {})

    async def probe(self, token_ids: list[int]) -> Answer:
        engine = FakeEngine(self._vocab_size)
        await engine.load_adapter(self.adapter())
        return Answer(await engine.probe(token_ids), await engine.held(), 5.0)

    async def arithmetic(self) -> Arithmetic:
        return Arithmetic("none", "none", 1, "default")

    async def detach_base(self) -> None:
        """It has none."""

    async def attach_base(self, manifest: Manifest) -> None:
        """It needs none."""

    async def release_cache(self) -> None:
        """It has none."""

    async def pulse(self) -> float:
        return float(self.version)

    async def sees(self, file: Path) -> bool:
        return file.exists()

    async def save(self, folder: Path) -> dict[str, Digest]:
        with writing(folder):
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")
            (folder / VERSION_FILE).write_text(str(self.version))
        return digests_in(folder)

    async def load(self, folder: Path) -> None:
        self.version = int((folder / VERSION_FILE).read_text())
