"""A run's recorded steps: reading them from the run folder (Recorded), and computing them again by a trainer in this
process, without Ray and without generators (Learner).
"""

import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
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
    """A recorded step of a run.

    Attributes:
        number: number of the step, from 1.
        file: the Parquet file of its rollouts.
        lines: the run's metrics.jsonl.
        policy: the recorded line about the resulting policy; None if the run recorded none.
    """

    number: int
    file: Path
    lines: MetricsFile
    policy: PolicyLine | None

    @property
    def metrics(self) -> dict[str, float]:
        """The step's metrics in metrics.jsonl, without those that were not finite. Raises WrongInput if the line cannot
        be read."""
        row = next(self.lines.rows([self.number]))
        if not row:
            raise WrongInput(
                f"step {self.number}: its line in metrics.jsonl cannot be read; choose others by --from and --to"
            )
        return {name: known for name, value in row.items() if name != "step" and (known := number(value)) is not None}

    def counted(self) -> dict[str, float]:
        """Returns the metrics that count groups which the step consumed and did not learn from."""
        return {name: self.metrics[name] for name in NOT_LEARNED if name in self.metrics}

    def groups(self, groups_per_step: int) -> tuple[list[pa.Table], list[pa.Table]]:
        """Returns the groups that the learner got, in its order, and the groups that dynamic sampling replaced or that
        had no reward. Raises WrongInput if the file cannot be read, or holds another number of groups."""
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
    """What a run folder holds.

    steps: number -> step, ascending; only steps with both rollouts and metrics.
    policies: version -> recorded line about the policy.
    """

    folder: Path
    config: RunConfig
    steps: dict[int, Step]
    policies: dict[int, PolicyLine]

    def chosen(self, start: int, to: int | None) -> list[Step]:
        """Returns the steps after `start` up to `to`, or to the last. Raises WrongInput if a step is missing."""
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
        """Returns the kept checkpoint of a step; None for step 0, the beginning of the run. Raises WrongInput if no
        whole checkpoint of the step is kept."""
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
        """Raises WrongInput if the base model, or with `own_loss` the user's own loss, is no longer that of the run. It
        compares with the newest kept checkpoint; without one nothing is checked."""
        known = [one / FILE for one in reversed(_kept(self.folder / "checkpoints")) if (one / FILE).exists()]
        if not known:
            return
        try:
            then = Fingerprints.read(known[0])
        except WrongInput as error:
            raise WrongInput(f"RUN: {error}; take that checkpoint away") from None
        now = fingerprints_of(self.config.model_copy(update={"rewards": [], "env": EnvConfig()}), (), asks=False)
        base = {name: digest for name, digest in then.base.items() if not name.startswith("teacher ")}
        pairs: list[tuple[str, Mapping[str, str], Mapping[str, str]]] = [("model.path", now.base, base)]
        if own_loss:
            pairs.append(("learner.loss.ratio", now.loss, then.loss))
        for key, new, old in pairs:
            if others := differing(new, old):
                raise WrongInput(
                    f"{key}: must have the content that the run was made with, and {', '.join(others)} differs; "
                    "put that back"
                )


def read_recorded(folder: Path) -> Recorded:
    """Reads a run folder. Raises WrongInput if it is not a run folder, was written by another version of gleaner, or
    has no whole step."""
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
    """Returns the run's configuration with `overrides` applied. Raises WrongInput if this version of gleaner refuses
    the run's configuration, WrongInput if it refuses the overrides."""
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
    """Returns the committed checkpoints, oldest first."""
    return sorted((one for one in root.glob("step-*") if one.is_dir()), key=checkpoint.step_of)


# Recorded steps computed again.

Scoring = Callable[["Trainer", list[pa.Table]], Awaitable[list[pa.Table]]]


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was computed again."""

    step: Step
    metrics: dict[str, float]
    sha256: str  # digest of the resulting policy, as it would be sent to generators
    groups: list[pa.Table]  # all groups that the step consumed, with the rewards that were used
    trained: int  # number of groups, the first ones, that were trained on
    mismatch: pa.Array  # mismatch of the tokens of the trained groups (TrainerService.mismatch)


class Conditions(NamedTuple):
    """What a trainer is built for, besides its configuration; a resumed run may have changed it between steps."""

    total_steps: int  # steps of the learning-rate schedule
    tokens: int | None  # most tokens of a micro-batch; None: the configuration's
    threads: int  # see learner.trainer.service.Arithmetic
    products: str | None  # see learner.trainer.service.Arithmetic; None: found by a trial


class Learner:
    """Computes recorded steps again.

    config: configuration of the replay.
    start: checkpoint from which it begins; None: it begins where the run began.
    scoring: gives the groups other rewards; None: they keep the recorded rewards.
    as_recorded: whether threads, library and micro-batches are those of the run instead of those of `config`.
    """

    def __init__(
        self, config: RunConfig, start: Path | None, *, scoring: Scoring | None = None, as_recorded: bool = True
    ) -> None:
        self._config, self._state, self._scoring, self._as_recorded = config, start, scoring, as_recorded
        self._trainer: Trainer | None = None
        self._built: Conditions | None = None  # what the trainer was built for

    async def take(self, steps: Sequence[Step]) -> AsyncGenerator[Taken, None]:
        """Computes the steps in their order. Where the run's schedule or micro-batches changed, because it was resumed
        with other settings or ran out of memory, a new trainer goes on."""
        for conditions, stretch in groupby(steps, self._conditions):
            trainer = await self._go_on(conditions)
            for step in stretch:
                yield await self._take(step, trainer)
            del trainer

    async def begun_with(self, steps: Sequence[Step]) -> str:
        """Returns the sha256 of the policy before the first of the steps."""
        return await _digest(await self._go_on(self._conditions(steps[0])))

    async def save(self, folder: Path) -> None:
        """Writes the present policy in the form of a checkpoint."""
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
                self._trainer = None  # two trainers might not fit into memory
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
    """Builds a trainer as a run does. Threads and library of products are set for the whole process."""
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
