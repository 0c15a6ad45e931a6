"""What is told of a run's inputs within a second or two: all that needs neither the model's weights nor its tokenizer,
nor more of the data than its first rows. The rest, which takes many times as long, is learner.driver.preflight's.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.files import lacks
from cluster.machine import free_disk
from cluster.memory.between_steps import undo_bytes
from cluster.memory.plan import gib
from cluster.memory.shape import Shape
from cluster.memory.units import DTYPE_BYTES
from cluster.placement import PlacementError
from cluster.ray_cluster import in_job
from cluster.reading import Unreadable, no_regular_file
from cluster.trackers.tracker import ID, known_id
from learner.config import RunConfig
from learner.driver import checkpoint, mismatch_files, phases, run_lock, standard_streams
from learner.driver.absolute_paths import absolute
from learner.driver.cards import Cards
from learner.driver.findings import Findings, PreflightError
from learner.driver.function_checks import check_accuracy, check_uses, dummies, try_functions
from learner.driver.machine_checks import MachineError, check_placement
from learner.driver.memory_budget import MemoryPlanError
from learner.driver.model_checks import follow_adapter
from learner.driver.plan_request import layouts, wish_of
from learner.driver.publishing import ADAPTER
from learner.driver.resume import ResumeError
from learner.driver.reward_models import check_scored_adapters
from learner.driver.run_lock import RunFolderInUse
from learner.driver.step_record import POLICIES
from learner.model.adapter_config import MODEL, AdapterError
from learner.model.reference_config import ReferenceConfigError
from rewards.base import JUDGE, RewardError
from rewards.call import Group
from rewards.output import NAME as REWARD_OUTPUT
from rollout.architecture import ArchitectureError
from rollout.data import files, sources
from rollout.data.chat import prompt_of
from rollout.data.chat_error import ChatError
from rollout.data.files import Row
from rollout.data.model_files import CONFIG, has_template, read_json
from rollout.data.problems import ProblemsError
from rollout.data.prompts import NoPrompt, check_column, messages_of
from rollout.data.weight_files import WeightsError

PROBLEMS = (
    PreflightError, PlacementError, MachineError, MemoryPlanError, ArchitectureError, RewardError, ChatError,
    ProblemsError, checkpoint.CheckpointError, RunFolderInUse, AdapterError, ResumeError, ReferenceConfigError,
    WeightsError, Unreadable,
)  # fmt: skip
# What a run writes in its folder.
FILES = (
    run_lock.NAME, standard_streams.CONSOLE, "config.yaml", "metrics.jsonl", "plan.json", phases.FILE, POLICIES,
    "timeline.json", ID, REWARD_OUTPUT,
)  # fmt: skip
FOLDERS = ("rollouts", mismatch_files.FOLDER, "checkpoints", ADAPTER, MODEL)
EVERYTHING = frozenset(RunConfig.model_fields)


@dataclass(frozen=True, slots=True)
class First:
    """config: with the output folder that it means. wrong: a line for each mistake. group: dummy completions of the
    first row that has a prompt, on which reward functions can be tried; None where they cannot be yet."""

    config: RunConfig
    wrong: tuple[str, ...]
    group: Group | None

    @property
    def chatty(self) -> bool:
        """Whether the prompt of the group is a list of messages."""
        return self.group is not None and not isinstance(self.group.prompts[0], str)

    def finish(self) -> tuple[str, ...]:
        """Tries the reward functions; lines about those that work. Raises PreflightError with one line for each mistake
        there is in anything."""
        found = Findings(PROBLEMS)
        found.lines += self.wrong
        tried = None if self.group is None else found.of(try_functions, absolute(self.config), self.group)
        found.finish()
        return tried or ()


def look(config: RunConfig, cards: Cards | None = None, *, sections: Collection[str] = EVERYTHING) -> First:
    """Looks at all that can be told early, and calls nothing of the user's yet.

    cards: to be assumed instead of those that are here. sections: of the configuration, that are as they were written;
    of another, in which something is wrong, only files that it names are looked for. Where there are such, functions
    that may ask somebody are not tried.
    """
    found = Findings(PROBLEMS)
    output = found.of(place_output, config)
    config = output or config
    placed = absolute(config)
    if set(sections) >= EVERYTHING:
        found.of(check_placement, config, cards)
    if "model" in sections:
        told = found.of(read_json, placed.model.source, CONFIG)
        if {"learner", "rewards"} <= set(sections):
            found.of(follow_adapter, placed)
            found.of(check_scored_adapters, placed)
            if output is not None and cards is None:
                found.of(check_room, config, told or {})
    begun = found.of(_first_rows, placed, files.DATA, prompts="data" in sections) or files.Beginning()
    found.of(_first_rows, placed, files.EVAL, prompts="data" in sections)
    group, whole = None, set(sections) >= EVERYTHING
    if {"data", "rewards", "env"} <= set(sections):
        found.of(check_accuracy, config)
        asks = any(one.use == JUDGE or one.env for one in config.rewards)
        if "model" in sections and told and begun.whole and (whole or not asks):
            group = found.of(_dummies, placed, begun.rows)
    if group is None and "rewards" in sections:
        found.of(check_uses, placed)
    return First(config, tuple(found.lines), group)


def _first_rows(config: RunConfig, names: files.Names, *, prompts: bool) -> files.Beginning:
    """Of the training data, or of those for evaluation. prompts: whether they are to be made of them. Raises
    ProblemsError."""
    data, held_out = config.data, config.data.eval
    if names is files.EVAL:
        if held_out.every == 0 or held_out.path is None:
            return files.Beginning()
        own = data.args if held_out.path == data.path else {}
        begun = sources.first_rows(held_out.path, held_out.split, own, held_out.size, names)
    else:
        begun = sources.first_rows(data.path, data.split, data.args, data.size)
    for index, row in enumerate(begun.rows if prompts else ()):
        if begun.whole:
            with suppress(NoPrompt):  # one row says nothing: it is left out
                messages_of(row, data, f"{names.path} row {index}")
        elif data.prompt is not None:
            check_column(row, data.prompt)
    return begun


def _dummies(config: RunConfig, rows: Sequence[Row]) -> Group | None:
    """Dummy completions of the first row that has a prompt."""
    template = config.data.chat_template == "auto" and has_template(config.model.source)
    for row in rows:
        with suppress(NoPrompt):
            prompt = prompt_of(messages_of(row, config.data, "data.path"), template=template)
            return dummies(prompt, row)
    return None


def check_room(config: RunConfig, model: Mapping[str, Any]) -> None:
    """Whether the disk of the run folder has room for a checkpoint beside the one before it. model: the content of its
    config.json. Raises PreflightError."""
    try:
        shape, wish = Shape.from_config(model, config.model.path), wish_of(config, layouts(config))
    except (ValueError, TypeError):  # an architecture of which no memory is planned, or whose settings are none
        return
    weights = shape.params if wish.mode == "full" else shape.lora_params(wish.rank, wish.targets)
    each = DTYPE_BYTES[wish.dtype] * weights + undo_bytes(weights, config.learner.optimizer.kind)
    count = 1 if checkpoint.listing(config.run_dir / "checkpoints") else 2
    if count * each > (free := free_disk(config.run_dir)):
        raise PreflightError(
            f"output_dir: must have room for {count} checkpoint{'s' if count > 1 else ''}, {gib(count * each)} (of the "
            f"{weights:.3g} weights that are trained), and the disk of {config.run_dir} has {gib(free)} left; free "
            "some, or give another folder"
        )


def place_output(config: RunConfig) -> RunConfig:
    """The configuration with the output folder that it means, once that is known to be writable."""
    try:
        if in_job():  # its working directory is thrown away: a relative output_dir is taken from the home folder
            config = config.model_copy(update={"output_dir": str(Path.home() / Path(config.output_dir).expanduser())})
        folders = [config.run_dir, *config.run_dir.parents]
        there = next(path for path in folders if path.exists() or path.is_symlink())
        if not there.exists():
            raise PreflightError(
                f"output_dir: {there} is a link to {there.readlink()}, which is not there; mount it, or give another"
            )
        writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        if writable and there != config.run_dir:  # /proc calls itself writable, and a name may be too long
            with TemporaryDirectory(prefix=".gleaner-", dir=there) as trial:
                (Path(trial) / config.run_dir.relative_to(there)).mkdir(parents=True)
    except (OSError, RuntimeError) as error:  # a name that is too long; a user without a home folder
        reason = lacks(error) if isinstance(error, OSError) else error
        raise PreflightError(
            f"output_dir: {config.output_dir} is no folder for {config.name} ({reason}); give another, or another name"
        ) from error
    if not writable:
        raise PreflightError(f"output_dir: {config.run_dir} cannot be written ({there} is not a writable folder)")
    if there == config.run_dir:
        _check_files(config.run_dir)
    return config


def _check_files(run_dir: Path) -> None:
    """Whether a run may write what it writes: at a FIFO it would wait for ever, and a link may lead anywhere. Raises
    PreflightError."""
    for file in FILES:
        for path in (run_dir / file, (run_dir / file).with_suffix(".partial")):
            if (wrong := no_regular_file(path)) is not None:
                raise PreflightError(f"output_dir: {wrong}; take it away, or give this run another name=")
    for folder in FOLDERS:
        if (run_dir / folder).exists() and not (run_dir / folder).is_dir():
            raise PreflightError(
                f"output_dir: {run_dir / folder} must be a folder; take it away, or give this run another name="
            )
    try:
        known_id(run_dir)
    except Unreadable as error:
        raise PreflightError(f"output_dir: {error}") from None
