"""What a run folder holds of the steps that the run has taken, and where a replay of them may begin."""

import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from cluster.errors import WrongInput
from cluster.telemetry import MetricsFile, number
from learner.config import RunConfig, load
from learner.driver import checkpoint
from learner.driver.checkpoint import TRAINER
from learner.driver.failure import RunEnded
from learner.driver.identity import (
    FILE,
    Fingerprints,
    differing,
    fingerprints_of,
)
from learner.driver.metrics import batch_metrics, failing, unscored
from learner.driver.record import PolicyLine, read_policies
from learner.tools.report.summary import read_run
from rollout import ledger
from rollout.env.config import EnvConfig
from rollout.schema import groups_of

if TYPE_CHECKING:
    from learner.trainer.trainer import Trainer

NOT_LEARNED = ("rollout/refilled_groups", "rollout/unscored_groups")


@dataclass(frozen=True, slots=True)
class Step:
    """One step that the run has taken.

    Attributes:
        file: its rollouts.
        lines: metrics.jsonl of the run.
        policy: the line of the policy that it led to; None where the run recorded none.
    """

    number: int
    file: Path
    lines: MetricsFile
    policy: PolicyLine | None

    @property
    def metrics(self) -> dict[str, float]:
        """Its line of metrics.jsonl, without what was not finite. Raises WrongInput."""
        row = next(self.lines.rows([self.number]))
        if not row:
            raise WrongInput(
                f"step {self.number}: its line in metrics.jsonl cannot be read; choose others by --from and --to"
            )
        return {name: known for name, value in row.items() if name != "step" and (known := number(value)) is not None}

    def counted(self) -> dict[str, float]:
        """The metrics that count the groups which the step consumed and did not learn from."""
        return {name: self.metrics[name] for name in NOT_LEARNED if name in self.metrics}

    def groups(self, groups_per_step: int) -> tuple[list[pa.Table], list[pa.Table]]:
        """Those that the learner got, in its order, and those that dynamic sampling replaced, or that had no reward.
        Raises WrongInput."""
        try:
            found = groups_of(ledger.read(self.file))
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())[:200]
            raise WrongInput(f"step {self.number}: {self.file} cannot be read: {reason}") from error
        replaced = int(sum(self.counted().values()))
        if len(found) != groups_per_step + replaced:
            raise WrongInput(
                f"step {self.number}: {self.file} must hold {groups_per_step + replaced} groups, as the step had, and "
                f"holds {len(found)}: it was changed since, or the run was resumed with another learner.groups_per_step"
            )
        return found[:groups_per_step], found[groups_per_step:]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run folder. steps: number -> step, those that are whole, ascending. policies: version -> its line."""

    folder: Path
    config: RunConfig
    steps: dict[int, Step]
    policies: dict[int, PolicyLine]

    def chosen(self, start: int, to: int | None) -> list[Step]:
        """The steps after `start` up to `to`, or to the last. Raises WrongInput for one that is not there."""
        last = max(self.steps)
        to = last if to is None else to
        if not 0 <= start < to <= last:
            raise WrongInput(
                f"--from, --to: must be 0 <= --from < --to <= {last}, the last recorded step, since the first that is "
                f"taken is the one after --from; got {start} and {to}"
            )
        if missing := [step for step in range(start + 1, to + 1) if step not in self.steps]:
            raise WrongInput(
                f"step {missing[0]}: {self.folder} has not both its rollouts and its line in metrics.jsonl; choose "
                "others by --from and --to"
            )
        return [self.steps[step] for step in range(start + 1, to + 1)]

    def checkpoint(self, step: int) -> Path | None:
        """The kept checkpoint of that step; None for step 0, the beginning. Raises WrongInput."""
        if step == 0:
            return None
        root = self.folder / "checkpoints"
        folder = root / checkpoint.name_of(step)
        if not folder.is_dir():
            kept = ", ".join(str(checkpoint.step_of(one)) for one in _kept(root)) or "none"
            raise WrongInput(
                f"--from: must be 0 or the step of a kept checkpoint ({kept}), got {step}; checkpoint.keep says how "
                "many are kept"
            )
        if reason := checkpoint.verify(folder):
            raise WrongInput(f"--from: {folder} is not whole: {reason}; give another step")
        return folder

    def check_inputs(self, *, own_loss: bool) -> None:
        """Whether base model and, if asked for, the user's own loss are still those of the run, as far as a kept
        checkpoint says. Raises WrongInput."""
        known = [one / FILE for one in reversed(_kept(self.folder / "checkpoints")) if (one / FILE).exists()]
        if not known:
            return
        try:
            then = Fingerprints.read(known[0])
        except WrongInput as error:
            raise WrongInput(f"RUN: {error}; take that checkpoint away") from None
        now = fingerprints_of(self.config.model_copy(update={"rewards": [], "env": EnvConfig()}), ())
        pairs = [("model.path", now.base, then.base)]
        if own_loss:
            pairs.append(("learner.loss.ratio", now.loss, then.loss))
        for key, new, old in pairs:
            if others := differing(new, old):
                raise WrongInput(
                    f"{key}: must have the content that the run was made with, and {', '.join(others)} differs; "
                    "put that back"
                )


def read_recorded(folder: Path) -> Recorded:
    """Raises WrongInput: it is no run folder, it is another version's, or no step of it is whole."""
    run = read_run(folder)
    config = load_config(folder, ())
    try:
        policies = {line.step: line for line in read_policies(folder)}
    except WrongInput as error:
        raise WrongInput(f"RUN: {error}; take it away") from None
    files = {int(file.stem.removeprefix("step-")): file for file in run.rollouts}
    lines = run.file
    known = [] if lines is None else [step for step in sorted(files) if step > 0 and step in lines]
    steps = {step: Step(step, files[step], lines, policies.get(step)) for step in known if lines is not None}
    if not steps:
        raise WrongInput(
            f"RUN: {folder} has no step with both its rollouts and its line in metrics.jsonl yet; wait for the first"
        )
    return Recorded(folder, config, steps, policies)


def load_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration with `overrides` on top. Raises WrongInput if this version refuses the run's own,
    WrongInput for the overrides."""
    file = folder / "config.yaml"
    if not file.exists():
        raise WrongInput(f"RUN: {folder} has no config.yaml, so it is not the folder of a run; check the path")
    try:
        plain = load.load_config(str(file), ())
    except WrongInput as error:
        first = str(error).splitlines()[0]
        raise WrongInput(
            f"RUN: {file} was written by another version of gleaner, and this one refuses it ({first}); correct the "
            "file, or replay with that version"
        ) from None
    return load.load_config(str(file), overrides) if overrides else plain


def _kept(root: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    return sorted((one for one in root.glob("step-*") if one.is_dir()), key=checkpoint.step_of)


# Recorded steps, taken again by a learner in this process: a run's trainer, without Ray and without generators.

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
            raise WrongInput(
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
                raise WrongInput(str(error)) from error
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
            raise RunEnded(
                f"step {step.number}: no completion of its batch has a reward, so nothing can be learned from it; give "
                "reward functions that score some, or other steps by --from and --to"
            )
        metrics = batch_metrics(groups, step.number - 1) | step.counted()
        try:
            metrics |= await trainer.step(groups[: len(trained)])
        except ValueError as error:
            raise WrongInput(f"step {step.number}: {error} ({step.file})") from error
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
