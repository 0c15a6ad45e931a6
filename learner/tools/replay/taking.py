"""Recorded steps, taken again by a learner in this process: a run's trainer, without Ray and without generators."""

import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from learner.config import RunConfig
from learner.driver.checkpoint import TRAINER
from learner.driver.metrics import (
    RewardsFailing,
    batch_metrics,
    failing,
    unscored,
)
from learner.tools.replay.recorded import ReplayError, Step

if TYPE_CHECKING:  # torch loads when the first step is taken
    from learner.trainer.trainer import Trainer

Scoring = Callable[["Trainer", list[pa.Table]], Awaitable[list[pa.Table]]]


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken again. groups: all that it consumed, as they were trained on. sha256: of the policy that it
    led to, as it would be sent to generators. trained: how many of them, the first, were. mismatch: of their tokens."""

    step: Step
    metrics: dict[str, float]
    sha256: str
    groups: list[pa.Table]
    trained: int
    mismatch: pa.Array


class Conditions(NamedTuple):
    """What a learner is built for, beside its configuration.

    total_steps: of the learning-rate schedule. tokens: of a micro-batch; None: as the configuration says. threads,
    products: as in learner.trainer.service.Arithmetic; None: by a trial.
    """

    total_steps: int
    tokens: int | None
    threads: int
    products: str | None


class Learner:
    """Takes recorded steps.

    config: of this replay. start: checkpoint to begin from; None: where the run began. scoring: gives groups other
    rewards; None: the recorded ones stay. as_recorded: threads, library and micro-batches are those of the run, not of
    `config`.
    """

    def __init__(
        self, config: RunConfig, start: Path | None, *, scoring: Scoring | None = None, as_recorded: bool = True
    ) -> None:
        self._config, self._state, self._scoring, self._as_recorded = config, start, scoring, as_recorded
        self._trainer: Trainer | None = None
        self._built: Conditions | None = None  # what the trainer was built for

    async def take(self, steps: Sequence[Step]) -> AsyncGenerator[Taken, None]:
        """Each in its order. A new trainer goes on where the schedule or the micro-batches of the run changed: when it
        was resumed with other settings, or ran out of memory."""
        for conditions, stretch in groupby(steps, self._conditions):
            trainer = await self._go_on(conditions)
            for step in stretch:
                yield await self._take(step, trainer)
            del trainer

    async def begun_with(self, steps: Sequence[Step]) -> str:
        """The sha256 of the policy before the first of the steps."""
        return await _digest(await self._go_on(self._conditions(steps[0])))

    async def save(self, folder: Path) -> None:
        """The present policy, in the form of a checkpoint."""
        assert self._trainer is not None, "a step comes first"
        await self._trainer.save(folder)

    def _conditions(self, step: Step) -> Conditions:
        policy, budget = step.policy, step.metrics.get("memory/token_budget")
        total = self._config.num_steps if policy is None else policy.total_steps
        if total is None:
            raise ReplayError(
                f"step {step.number}: an earlier version of gleaner made this run with epochs, and did not record for "
                "how many steps its learning-rate schedule was made; it cannot be replayed"
            )
        tokens = int(budget) if self._as_recorded and budget is not None else None
        if policy is None or not self._as_recorded:
            return Conditions(total, tokens, self._config.cluster.cpus.learner, None)
        return Conditions(total, tokens, policy.arithmetic.threads, policy.arithmetic.products)

    async def _go_on(self, conditions: Conditions) -> "Trainer":
        if self._trainer is not None and self._built == conditions:
            return self._trainer
        with tempfile.TemporaryDirectory() as folder:
            state = self._state
            if self._trainer is not None:
                state = Path(folder)
                await self._trainer.save(state / TRAINER)
                self._trainer = None  # two of them might not fit
            try:
                self._trainer, self._built = _build(self._config, conditions), conditions
            except ValueError as error:
                raise ReplayError(str(error)) from error
            if state is not None:
                await self._trainer.load(state / TRAINER)
        return self._trainer

    async def _take(self, step: Step, trainer: "Trainer") -> Taken:
        trained, others = step.groups(self._config.learner.groups_per_step)
        groups = [*trained, *others]
        if self._scoring is not None:
            groups = await self._scoring(trainer, groups)
        if (wrong := failing(groups)) is not None:
            raise wrong
        if unscored(groups[: len(trained)]):
            raise RewardsFailing(
                f"step {step.number}: no completion of its batch has a reward, so nothing can be learned from it; give "
                "reward functions that score some, or other steps by --from and --to"
            )
        metrics = batch_metrics(groups, step.number - 1) | step.counted()
        try:
            metrics |= await trainer.step(groups[: len(trained)])
        except ValueError as error:
            raise ReplayError(f"step {step.number}: {error} ({step.file})") from error
        return Taken(step, metrics, await _digest(trainer), groups, len(trained), await trainer.mismatch())


async def _digest(trainer: "Trainer") -> str:
    _, exported = await trainer.outgoing()
    return exported.policy_id.digest


def _build(config: RunConfig, conditions: Conditions) -> "Trainer":
    """As a run's learner is built. Threads and library hold for the whole process."""
    import torch
    from transformers.utils import logging as transformers_logging

    from learner.driver.roles import make_trainer
    from learner.trainer.float32_products import use_library

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(conditions.threads)
    if conditions.tokens is not None:
        settled = config.learner.model_copy(update={"token_budget": conditions.tokens})
        config = config.model_copy(update={"learner": settled})
    trainer = make_trainer(config, conditions.total_steps, None)
    if conditions.products is not None:
        use_library(conditions.products)
    return trainer
