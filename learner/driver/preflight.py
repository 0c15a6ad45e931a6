"""Everything that can be wrong is found before anything expensive starts: one clear line each, nothing left behind."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.files import lacks
from cluster.memory.plan import gib
from cluster.placement import PlacementError
from cluster.ray_cluster import in_job
from cluster.reading import Unreadable, no_regular_file
from cluster.trackers.tracker import ID, known_id
from learner.config import RunConfig, roles
from learner.driver import checkpoint, mismatch_files, phases, run_lock, standard_streams
from learner.driver.absolute_paths import absolute
from learner.driver.cards import Cards, present, size_for
from learner.driver.config_io import to_yaml
from learner.driver.env_check import Tried, check_environment, check_environment_column
from learner.driver.findings import Findings, PreflightError
from learner.driver.fingerprints import Fingerprints, fingerprints_of
from learner.driver.function_checks import check_accuracy, check_loss, check_rewards
from learner.driver.machine_checks import (
    MachineError,
    check_main_memory,
    check_placement,
    machine_notes,
)
from learner.driver.memory_budget import Budgets, MemoryPlanError, settle, settled
from learner.driver.model_checks import adapter_notes, adapters_in, check_weights, follow_adapter, load_chat
from learner.driver.prompt_check import check_data_prompts
from learner.driver.publishing import ADAPTER
from learner.driver.resume import ResumeError, check_allowed, check_same_run
from learner.driver.reward_models import check_scored_adapters
from learner.driver.run_length import total_steps
from learner.driver.run_lock import RunFolderInUse
from learner.driver.setting_notes import setting_notes
from learner.driver.step_record import POLICIES, read_policies
from learner.driver.trials import ENGINE, LEARNER, SHARED_BASE, Trial
from learner.model.adapter_config import MODEL, AdapterError
from learner.model.reference_config import ReferenceConfigError
from learner.trainer.learning_rate import rate_factor
from rewards.base import RewardError
from rewards.output import NAME as REWARD_OUTPUT
from rollout.architecture import ArchitectureError, check_unquantised
from rollout.data.chat import Chat, ChatError, Messages, Prompt
from rollout.data.model_files import CONFIG, read_json
from rollout.data.problems import Problems, ProblemsError, fitting, load
from rollout.data.weight_files import WeightsError
from rollout.schema import Problem

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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can start."""

    config: RunConfig
    problems: Problems
    heldout: list[Problem]
    total_steps: int
    resume_from: Path | None
    finished_steps: int
    skipped_checkpoints: list[str]
    changed: list[str]  # since the checkpoint, and allowed
    fingerprints: Fingerprints
    budgets: Budgets
    notes: tuple[str, ...] = ()  # for the user


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


def rehearse(config: RunConfig, cards: Cards | None) -> Prepared:
    """All checks of a start, and those which at a start the processes of generators and learner make themselves.

    cards: to be assumed instead of those that are here. Raises PreflightError with one line per mistake.
    """
    found = Findings(PROBLEMS)
    placed = found.of(place_output, config)
    modules = (LEARNER, ENGINE, SHARED_BASE) if config.memory.base == "shared" else (LEARNER, ENGINE)
    trials = [Trial(module, absolute(config)) for module in modules if _has_config(config.model.source)]
    try:
        try:
            prepared = found.of(prepare, placed or config, cards)
        except (OSError, RuntimeError):  # a user without a home folder, for one
            if placed is not None:
                raise
            prepared = None  # of that folder, which is told already
        for trial in trials:
            found.of(trial.finish)
    finally:
        for trial in trials:
            trial.close()
    found.finish()
    assert prepared is not None
    return prepared


def _has_config(model: str) -> bool:
    """Else the checks of `prepare` say so, and a trial would say it once more in the words of its library."""
    try:
        return bool(read_json(model, CONFIG))
    except ChatError:
        return False


def prepare(config: RunConfig, cards: Cards | None = None) -> Prepared:
    """Checks placement, checkpoints, model, memory, data, rewards and loss; what is wrong with one hides no other.

    Raises PreflightError with one line per mistake.
    """
    found = Findings(PROBLEMS)
    found.of(check_placement, config, cards)
    resume_from, skipped = found.of(_checkpoint, config) or (None, [])
    followed = found.of(follow_adapter, absolute(config))
    config, notes = followed or (absolute(config), ())
    chat = found.of(load_chat, config)
    found.of(check_weights, config, followed=followed is not None)
    if chat is not None:
        found.of(check_unquantised, chat.config, config.model.path)
        for key, folder in adapters_in(config):
            notes += found.of(adapter_notes, folder, key, config.model.path, chat) or ()
    found.of(check_scored_adapters, config)
    config, budgets, of_memory = _sized(found, config, chat, cards or present(config))
    data = found.of(_loaded, config, chat)
    found.of(check_accuracy, config)
    found.of(check_loss, config)
    if chat is not None and data is not None:
        found.of(check_data_prompts, config, chat, chain(data[0].prompts(), (one.messages for one in data[1])))
        notes += chat.notes(config.rollout.stop)
        first = data[0].at(0)
        notes += tuple(setting_notes(config, chat.config, first.columns))
        notes += found.of(check_rewards, config, first, chat.prefilled(first.prompt_ids)) or ()
        found.of(check_environment_column, config, data[0].rows())
        tried = found.of(check_environment, config, chat, data[0].at(0)) or Tried()
        notes += tried.notes
        data = found.of(_with_tools, data, config, tried.tools)
    found.finish()
    assert data is not None
    assert budgets is not None
    problems, heldout = data
    fingerprints = fingerprints_of(config, problems.rows())
    changed = check_same_run(config, fingerprints, resume_from) if resume_from is not None else []
    steps = total_steps(config, len(problems), resume_from)
    finished = 0 if resume_from is None else checkpoint.step_of(resume_from)
    return Prepared(
        config=config,
        problems=problems,
        heldout=heldout,
        total_steps=steps,
        resume_from=resume_from,
        finished_steps=finished,
        skipped_checkpoints=skipped,
        changed=changed,
        fingerprints=fingerprints,
        budgets=budgets,
        notes=(*notes, *of_memory, *_other_rate(config, steps, finished), *_fewer_held_out(config, len(heldout))),
    )


def _loaded(config: RunConfig, chat: Chat | None) -> tuple[Problems, list[Problem]]:
    longest, deadline = config.rollout.max_prompt_length, config.cluster.deadlines.start
    return load(config.data, chat or Untokenised(), longest, config.seed, deadline)


def _with_tools(data: tuple[Problems, list[Problem]], config: RunConfig, tools: int) -> tuple[Problems, list[Problem]]:
    """Those that fit with the environment's tools. Raises ProblemsError."""
    longest, (problems, heldout) = config.rollout.max_prompt_length, data
    return problems.fitting(config.data, longest, tools), fitting(heldout, config.data, longest, tools)


def _sized(
    found: Findings, config: RunConfig, chat: Chat | None, cards: Cards | None
) -> tuple[RunConfig, Budgets | None, tuple[str, ...]]:
    """The configuration with what the memory plan decides, its budgets, and lines about memory."""
    card, budgets, notes = found.of(size_for, config, cards), None, tuple[str, ...]()
    if chat is not None and (budgets := found.of(settle, config, chat.config, card)):
        config = found.of(settled, config, budgets) or config
    if budgets is not None and not (cards and cards.assumed):
        notes += (*machine_notes(config), *(found.of(check_main_memory, config, budgets) or ()))
    if card and cards and cards.note:
        notes += (cards.note,)
    return config, budgets, notes


def _other_rate(config: RunConfig, steps: int, step: int) -> tuple[str, ...]:
    """A line if a run that goes on after this step was planned for another number of steps, and so learns at another
    rate: warm-up and decay are shares of all steps."""
    then = next((line.total_steps for line in read_policies(config.run_dir) if line.step == step), steps)
    schedule = config.learner.schedule
    planned, now = rate_factor(step, then, schedule), rate_factor(step, steps, schedule)
    if now == planned or not 0 < step < steps:
        return ()
    told = (
        f"learner.schedule: is made for {steps} steps now and was for {then}, so step {step + 1} learns at "
        f"{now:.3g} times learner.learning_rate, where step {step} had {rate_factor(step - 1, then, schedule):.3g}"
    )
    return (told,)


def _fewer_held_out(config: RunConfig, found: int) -> tuple[str, ...]:
    """A line if a number that was asked for, not the default one, is not what there is."""
    wanted = config.data.eval
    if wanted.every == 0 or "size" not in wanted.model_fields_set or found >= wanted.size:
        return ()
    why = "at most a tenth of the different prompts is kept from training; give data.eval.path for more"
    if wanted.path is not None or wanted.split is not None:
        why = "there are no more"
    return (f"data.eval.size: {found} problems are held out, {wanted.size} were asked for: {why}",)


def report(prepared: Prepared, cards: Cards | None, on_nodes: Sequence[str] = (), *, verbose: bool = False) -> str:
    """What --dry-run prints. on_nodes: what a cluster that would be joined says. verbose: with every setting."""
    config = prepared.config
    assumed = [] if cards is None else [f"assumed      {cards.count} cards of {gib(cards.size)}, not looked for"]
    settings = [to_yaml(config)] if verbose else []
    lines = [*settings, f"run folder   {config.run_dir}", f"steps        {prepared.total_steps}"]
    lines += [f"resume       {prepared.resume_from or 'from the start'}"]
    lines += [f"changed      {change}, as resume_allow_changed allows" for change in prepared.changed]
    lines += [f"problems     {len(prepared.problems)} to train on, {len(prepared.heldout)} held out"]
    lines += [f"placement    {role.name}: {role.cpus:g} CPU, {role.gpus:g} GPU" for role in roles(config)]
    lines += [*on_nodes, *assumed, prepared.budgets.note, *prepared.notes]
    return "\n".join([*lines, "model, data and rewards are in order; nothing was started or written"])


def _checkpoint(config: RunConfig) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and those that were passed over."""
    try:
        folder = config.run_dir / "checkpoints"
    except RuntimeError:  # said by place_output
        return None, []
    check_allowed(config)
    resume_from, skipped = checkpoint.resolve(config.resume, folder)
    if config.resume == "none" and any(folder.glob("step-*")):
        raise PreflightError(
            f"resume: none, but {config.run_dir} holds checkpoints; give another name=, or resume=auto"
        )
    if resume_from is not None and resume_from.parent.resolve() != folder.resolve() and checkpoint.listing(folder):
        raise PreflightError(
            f"resume: {resume_from} is another run's, and {config.run_dir} holds checkpoints of its own, which would "
            "be deleted; give resume=auto to go on from them, or another name="
        )
    return resume_from, skipped


class Untokenised:
    """Stands for the model's chat where that cannot be loaded, so that the data is checked all the same."""

    def render(self, messages: Messages) -> tuple[Prompt, tuple[int, ...]]:
        """The text instead of token ids: of no length that counts, and different for different prompts."""
        return "", (hash(tuple((message["role"], message["content"]) for message in messages)),)

    def count(self, text: str) -> int:
        """As little as the whole."""
        return 0
