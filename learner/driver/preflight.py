"""Checks all inputs of a run before anything expensive starts, and prepares the run. Every mistake gives one line, and
the checks leave nothing behind.

`look` makes the checks that take a second or two, `prepare` all checks of a start, `rehearse` those of --dry-run, which
include the ones that generators and learner make as they start.
"""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster import files as run_lock
from cluster.errors import WrongInput
from cluster.files import lacks
from cluster.machine import free_disk
from cluster.memory.learner import undo_bytes
from cluster.memory.plan import gib
from cluster.memory.shape import DTYPE_BYTES, Shape
from cluster.ray_cluster import in_job
from cluster.reading import no_regular_file
from cluster.telemetry import METRICS_FILE
from cluster.trackers import ID, known_id
from learner.config import RunConfig, roles
from learner.config.load import absolute, to_yaml
from learner.config.settings import rate_factor
from learner.driver import (
    checkpoint,
    console,
    process,
    record,
)
from learner.driver.checkpoint import ADAPTER
from learner.driver.evaluate import accuracy_of, check_scored_adapters
from learner.driver.failure import Findings
from learner.driver.identity import Fingerprints, check_allowed, check_same_run, config_of, fingerprints_of
from learner.driver.input_checks import (
    ENGINE,
    LEARNER,
    SHARED_BASE,
    TEACHER,
    Trial,
    Tried,
    adapter_notes,
    adapters_in,
    check_accuracy,
    check_data_prompts,
    check_environment,
    check_environment_column,
    check_grammar,
    check_loss,
    check_rewards,
    check_uses,
    check_weights,
    dummies,
    follow_adapter,
    load_chat,
    try_functions,
)
from learner.driver.machine_checks import check_main_memory, check_placement, machine_notes
from learner.driver.memory import Budgets, Cards, cards_present, hours, layouts, settle, settled, size_for, wish_of
from learner.driver.record import POLICIES, read_policies
from learner.model.adapter_config import MODEL
from rewards.base import JUDGE
from rewards.call import Group
from rewards.limits import NAME as REWARD_OUTPUT
from rollout.config import OWN_ROLLOUTS
from rollout.data import curriculum, files, sources
from rollout.data.chat import Chat, Messages, Prompt, prompt_of
from rollout.data.files import Row
from rollout.data.model_files import CONFIG, has_template, read_json
from rollout.data.problems import Problems, fitting, load
from rollout.data.prompts import NoPrompt, check_column, messages_of
from rollout.producer import Cursor
from rollout.schema import Problem
from rollout.teacher.fit import check_teacher

# The number of steps of a run: `steps`, or as many as the problems of `epochs` make.


def total_steps(config: RunConfig, num_problems: int, resume_from: Path | None) -> int:
    """Number of steps of the run. With `epochs`, it is the number that the epochs take if no group is replaced. A run
    that is resumed when enough problems were consumed has no further steps. Where the size of batches or the data has
    changed since the run began (resume_allow_changed), the rest of the problems determines the further steps."""
    if config.num_steps is not None:
        return config.num_steps
    needed, groups = config.num_problems(num_problems), config.learner.groups_per_step
    if resume_from is None:
        return math.ceil(needed / groups)
    state, then = checkpoint.read_state(resume_from), config_of(resume_from)
    consumed = Cursor()
    consumed.restore(state.cursor.low, state.cursor.done)
    step, left = checkpoint.step_of(resume_from), needed - consumed.consumed
    if left <= 0:
        return step
    before = num_problems if state.problems is None else state.problems  # problems of an epoch at the checkpoint
    if (then.learner.groups_per_step, before) == (groups, num_problems):
        planned = then.num_steps or math.ceil(then.num_problems(before) / groups)
        recorded = planned if state.total_steps is None else state.total_steps
        if then.num_steps is None and then.epochs == config.epochs:
            return recorded
        if recorded == planned:  # batches and data had not changed before the checkpoint either
            return math.ceil(needed / groups)
    return step + math.ceil(left / groups)


# Warnings about settings, model and data that may not mean what the user believes. They load nothing.

NO_TEXT = ("image", "images", "video", "videos", "audio", "audios")  # columns, as TRL and datasets name them
ATTENTION = ("attn_implementation", "_attn_implementation")  # keys of config.json


def setting_notes(config: RunConfig, model: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[str]:
    """A line for each such setting. model: content of the model's config.json. row: the columns of a problem."""
    loss = config.learner.loss
    if loss.ratio == "gspo" and loss.kind == "dapo" and "kind" not in loss.model_fields_set:
        yield (
            "learner.loss.ratio: gspo with kind: dapo, the default, weights a completion by its length, and its paper "
            "weights all alike; set learner.loss.kind=grpo for that, or dapo if it is meant"
        )
    for name in ATTENTION:
        if (wanted := model.get(name)) is not None:
            yield (
                f"model.path: {name} of its config.json, {wanted!s:.80}, is not followed: the learner has attention of "
                "its own, and vLLM chooses its"
            )
    if others := [name for name in NO_TEXT if row.get(name) is not None]:
        yield (
            f"data.path: the model reads text alone and is not given {', '.join(others)}, which reward functions are; "
            "if questions cannot be answered without, give other data"
        )


# The checks that take a second or two: they need neither the model's weights nor its tokenizer, and only the first rows
# of the data. `prepare_rest` makes the others, which take many times as long.

# Files and folders that a run writes in its folder.
FILES = (
    run_lock.LOCK_FILE, process.CONSOLE, "config.yaml", METRICS_FILE, "plan.json", console.PHASES_FILE, POLICIES,
    "timeline.json", ID, REWARD_OUTPUT,
)  # fmt: skip
FOLDERS = ("rollouts", record.MISMATCH_FOLDER, curriculum.FOLDER, "checkpoints", ADAPTER, MODEL)
EVERYTHING = frozenset(RunConfig.model_fields)


@dataclass(frozen=True, slots=True)
class First:
    """The result of the first checks.

    config: the configuration, with its output folder resolved. wrong: a line for each mistake. group: dummy completions
    of the first row that has a prompt, on which reward functions can be tried; None where that is not possible yet.
    """

    config: RunConfig
    wrong: tuple[str, ...]
    group: Group | None

    @property
    def chatty(self) -> bool:
        """Whether the prompt of the group is a list of messages."""
        return self.group is not None and not isinstance(self.group.prompts[0], str)

    def finish(self) -> tuple[str, ...]:
        """Tries the reward functions, and returns lines about them for the user. Raises WrongInput with a line for each
        mistake, those of the first checks included."""
        found = Findings()
        found.lines += self.wrong
        tried = None if self.group is None else found.of(try_functions, absolute(self.config), self.group)
        found.finish()
        return tried or ()


def look(config: RunConfig, cards: Cards | None = None, *, sections: Collection[str] = EVERYTHING) -> First:
    """Makes the first checks. It does not call any of the user's code yet.

    cards: cards to assume instead of those of this machine. sections: the sections of the configuration that are valid.
    Of another section, which has a mistake, only the files that it names are looked for; reward functions that may ask
    another server are then not tried.
    """
    found = Findings()
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
    """The first rows of the training data, or of the held-out data. prompts: whether to make the prompts of the rows,
    as a check. Raises WrongInput."""
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
            with suppress(NoPrompt):  # a row without a prompt is no mistake: the run leaves it out
                messages_of(row, data, f"{names.path} row {index}")
        elif data.prompt is not None:
            check_column(row, data.prompt)
    return begun


def _dummies(config: RunConfig, rows: Sequence[Row]) -> Group | None:
    """Dummy completions of the first row that has a prompt; None if no row has one."""
    template = config.data.chat_template == "auto" and has_template(config.model.source)
    for row in rows:
        with suppress(NoPrompt):
            prompt = prompt_of(messages_of(row, config.data, "data.path"), template=template)
            return dummies(prompt, row)
    return None


def check_room(config: RunConfig, model: Mapping[str, Any]) -> None:
    """Raises WrongInput unless the run folder's disk has room for two checkpoints, of which one may exist already.
    model: content of the model's config.json."""
    try:
        shape, wish = Shape.from_config(model, config.model.path), wish_of(config, layouts(config))
    except (ValueError, TypeError):  # the architecture is unknown to the memory model, or config.json is wrong
        return
    weights = shape.params if wish.mode == "full" else shape.lora_params(wish.rank, wish.targets)
    each = DTYPE_BYTES[wish.dtype] * weights + undo_bytes(weights, config.learner.optimizer.kind)
    count = 1 if checkpoint.listing(config.run_dir / "checkpoints") else 2
    if count * each > (free := free_disk(config.run_dir)):
        raise WrongInput(
            f"output_dir: must have room for {count} checkpoint{'s' if count > 1 else ''}, {gib(count * each)} (of the "
            f"{weights:.3g} weights that are trained), and the disk of {config.run_dir} has {gib(free)} left; free "
            "some, or give another folder"
        )


def place_output(config: RunConfig) -> RunConfig:
    """The configuration with its output folder resolved. Raises WrongInput if that folder cannot be written."""
    try:
        if in_job():  # a job's working directory is deleted, so a relative output_dir lies in the home folder
            config = config.model_copy(update={"output_dir": str(Path.home() / Path(config.output_dir).expanduser())})
        folders = [config.run_dir, *config.run_dir.parents]
        there = next(path for path in folders if path.exists() or path.is_symlink())
        if not there.exists():
            raise WrongInput(
                f"output_dir: {there} is a link to {there.readlink()}, which is not there; mount it, or give another"
            )
        writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        if writable and there != config.run_dir:  # a trial, since /proc claims to be writable and names may be too long
            with TemporaryDirectory(prefix=".gleaner-", dir=there) as trial:
                (Path(trial) / config.run_dir.relative_to(there)).mkdir(parents=True)
    except (OSError, RuntimeError) as error:  # a name is too long, or the user has no home folder
        reason = lacks(error) if isinstance(error, OSError) else error
        raise WrongInput(
            f"output_dir: {config.output_dir} is no folder for {config.name} ({reason}); give another, or another name"
        ) from error
    if not writable:
        raise WrongInput(f"output_dir: {config.run_dir} cannot be written ({there} is not a writable folder)")
    if there == config.run_dir:
        _check_files(config.run_dir)
    return config


def _check_files(run_dir: Path) -> None:
    """Raises WrongInput if a file of the run folder is not a regular one: at a FIFO a run would wait for ever, and a
    link may lead anywhere."""
    for file in FILES:
        for path in (run_dir / file, (run_dir / file).with_suffix(".partial")):
            if (wrong := no_regular_file(path)) is not None:
                raise WrongInput(f"output_dir: {wrong}; take it away, or give this run another name=")
    for folder in FOLDERS:
        if (run_dir / folder).exists() and not (run_dir / folder).is_dir():
            raise WrongInput(
                f"output_dir: {run_dir / folder} must be a folder; take it away, or give this run another name="
            )
    try:
        known_id(run_dir)
    except WrongInput as error:
        raise WrongInput(f"output_dir: {error}") from None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run whose inputs were checked, ready to start.

    heldout: problems of the evaluation. resume_from: checkpoint to continue from, None: from the start. finished_steps:
    step of that checkpoint. skipped_checkpoints: a line for each newer checkpoint that is not whole. changed: a line
    for each difference from the checkpoint that resume_allow_changed allows. notes: lines for the user. estimates: what
    data.curriculum begins with; None without.
    """

    config: RunConfig
    problems: Problems
    heldout: list[Problem]
    total_steps: int
    resume_from: Path | None
    finished_steps: int
    skipped_checkpoints: list[str]
    changed: list[str]
    fingerprints: Fingerprints
    budgets: Budgets
    notes: tuple[str, ...] = ()
    estimates: curriculum.Estimates | None = None


def rehearse(config: RunConfig, cards: Cards | None) -> Prepared:
    """Makes all checks of a start, and in processes of their own those that generators and learner make as they start.

    cards: cards to assume instead of those of this machine. Raises WrongInput with a line for each mistake.
    """
    first = look(config, cards)
    told = first.finish()
    found = Findings()
    modules = (LEARNER, ENGINE, SHARED_BASE) if config.arrangement.one_base else (LEARNER, ENGINE)
    trials = [Trial(module, absolute(first.config)) for module in modules if _has_config(config.model.source)]
    if config.model.teacher is not None and _has_config(config.model.teacher):
        trials.append(Trial(TEACHER, absolute(first.config), "model.teacher", "teacher"))
    try:
        prepared = found.of(_prepared, first, told, cards)
        for trial in trials:
            found.of(trial.finish)
    finally:
        for trial in trials:
            trial.close()
    found.finish()
    assert prepared is not None
    return prepared


def teacher_notes(config: RunConfig, chat: Chat | None) -> tuple[str, ...]:
    """Lines for the user about model.teacher, if there is one. Raises WrongInput if it cannot teach this policy."""
    model, cluster, rollout = config.model, config.cluster, config.rollout
    if model.teacher is None or chat is None:
        return ()
    longest = rollout.max_prompt_length + rollout.max_completion_length
    cuda, shards = cluster.gpus.teacher > 0, cluster.teacher_shards
    return check_teacher(model.teacher, chat, model.path, longest, model.dtype, cuda=cuda, shards=shards)


def _has_config(model: str) -> bool:
    """Whether the model has a readable config.json. If not, the checks of `prepare` report it, and a trial would only
    repeat that in the words of its library."""
    try:
        return bool(read_json(model, CONFIG))
    except WrongInput:
        return False


def prepare(config: RunConfig, cards: Cards | None = None) -> Prepared:
    """Checks placement, checkpoints, model, memory, data, rewards and loss: first what is quick to check, then the rest
    if that was in order. Within each of the two, a mistake does not hide others.

    Raises WrongInput with a line for each mistake.
    """
    return prepare_rest(look(config, cards), cards)


def prepare_rest(first: First, cards: Cards | None = None) -> Prepared:
    """The rest of `prepare`, after `look`."""
    return _prepared(first, first.finish(), cards)


def _prepared(first: First, told: tuple[str, ...], cards: Cards | None) -> Prepared:
    """The checks that take longer than those of `look`. told: lines about the reward functions, from First.finish."""
    config, found = first.config, Findings()
    resume_from, skipped = found.of(_checkpoint, config) or (None, [])
    followed = found.of(follow_adapter, absolute(config))
    config, notes = followed or (absolute(config), ())
    chat = found.of(load_chat, config)
    found.of(check_weights, config, followed=followed is not None)
    taught = found.of(teacher_notes, config, chat)
    notes += taught or ()
    if chat is not None:
        for key, folder in adapters_in(config):
            notes += found.of(adapter_notes, folder, key, config.model.path, chat) or ()
    cards = cards or cards_present(config)
    config, budgets, of_memory = _sized(found, config, None if taught is None else chat, cards)
    data = found.of(_loaded, config, chat)
    found.of(check_loss, config)
    if chat is not None:
        found.of(check_grammar, config)
    if chat is not None and data is not None:
        found.of(check_data_prompts, config, chat, chain(data[0].prompts(), (one.messages for one in data[1])))
        notes += chat.notes(config.rollout.stop)
        problem = data[0].at(0)
        notes += tuple(setting_notes(config, chat.config, problem.columns))
        prefilled = chat.prefilled(problem.prompt_ids)
        known = told if first.group is not None and not prefilled and chat.has_template == first.chatty else None
        notes += found.of(check_rewards, config, problem, prefilled, known) or ()
        found.of(check_environment_column, config, data[0].rows())
        tried = found.of(check_environment, config, chat, data[0].at(0)) or Tried()
        notes += tried.notes
        data = found.of(_with_tools, data, config, tried.tools)
    ordered = found.of(_estimates, config, data[0], resume_from) if data is not None else None
    found.finish()
    assert data is not None
    assert ordered is not None
    assert budgets is not None
    problems, heldout = data
    fingerprints = fingerprints_of(config, problems.rows())
    changed = check_same_run(config, fingerprints, resume_from) if resume_from is not None else []
    steps = total_steps(config, len(problems), resume_from)
    finished = 0 if resume_from is None else checkpoint.step_of(resume_from)
    of_memory += hours(config, budgets, cards, steps - finished, len(heldout))
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
        notes=(
            *notes, *ordered[1], *of_memory, *_other_rate(config, steps, finished),
            *_fewer_held_out(config, len(heldout)),
        ),
        estimates=ordered[0],
    )  # fmt: skip


def _estimates(
    config: RunConfig, problems: Problems, resume_from: Path | None
) -> tuple[curriculum.Estimates | None, tuple[str, ...]]:
    """What data.curriculum begins with (None without), and lines for the user. A checkpoint of the same setting has the
    estimates itself, so that the other run's folder is no longer needed. Raises WrongInput."""
    given = config.data.curriculum
    if given is None:
        return None, ()
    kept = None if resume_from is None else curriculum.recorded(resume_from / curriculum.FILE)
    if given == OWN_ROLLOUTS or (kept is not None and kept.source == curriculum.source_of(config.data)):
        return curriculum.Estimates(len(problems)), ()
    if Path(given).resolve() == config.run_dir.resolve():
        raise WrongInput(
            f"data.curriculum: must be own for the rollouts of this run itself, got its folder {given}; give own, or "
            "this run another name="
        )
    found = curriculum.estimates_from(Path(given), problems, accuracy_of(config))
    tried = int((found.known.count > 0).sum())
    return found, (f"data.curriculum: {given} has rollouts of {tried} of {len(problems)} problems",)


def _loaded(config: RunConfig, chat: Chat | None) -> tuple[Problems, list[Problem]]:
    longest, deadline = config.rollout.max_prompt_length, config.cluster.deadlines.start
    return load(config.data, chat or Untokenised(), longest, config.seed, deadline)


def _with_tools(data: tuple[Problems, list[Problem]], config: RunConfig, tools: int) -> tuple[Problems, list[Problem]]:
    """The problems that still fit when the environment's tools take `tools` tokens of the prompt. Raises WrongInput."""
    longest, (problems, heldout) = config.rollout.max_prompt_length, data
    return problems.fitting(config.data, longest, tools), fitting(heldout, config.data, longest, tools)


def _sized(
    found: Findings, config: RunConfig, chat: Chat | None, cards: Cards | None
) -> tuple[RunConfig, Budgets | None, tuple[str, ...]]:
    """The configuration with what the memory plan decides, the budgets, and lines for the user about memory."""
    card, budgets, notes = found.of(size_for, config, cards), None, tuple[str, ...]()
    kind = None if cards is None else cards.kind
    if chat is not None and (budgets := found.of(settle, config, chat.config, card, kind)):
        config = found.of(settled, config, budgets) or config
    if budgets is not None and not (cards and cards.assumed):
        notes += (*machine_notes(config), *(found.of(check_main_memory, config, budgets) or ()))
    if card and cards and cards.note:
        notes += (cards.note,)
    return config, budgets, notes


def _other_rate(config: RunConfig, steps: int, step: int) -> tuple[str, ...]:
    """A line for the user if a run that is resumed after this step was planned for another number of steps, and its
    learning rate differs for that reason: warm-up and decay are shares of all steps."""
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
    """A line for the user if fewer problems are held out than data.eval.size asks for, unless that is the default."""
    wanted = config.data.eval
    if wanted.every == 0 or "size" not in wanted.model_fields_set or found >= wanted.size:
        return ()
    why = "at most a tenth of the different prompts is kept from training; give data.eval.path for more"
    if wanted.path is not None or wanted.split is not None:
        why = "there are no more"
    return (f"data.eval.size: {found} problems are held out, {wanted.size} were asked for: {why}",)


def report(prepared: Prepared, cards: Cards | None, on_nodes: Sequence[str] = (), *, verbose: bool = False) -> str:
    """The text that --dry-run prints. cards: those that were assumed. on_nodes: lines about the nodes of a cluster that
    the run would join. verbose: whether to print every setting."""
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
    """The checkpoint to continue from (None: from the start), and a text for each one skipped. Raises WrongInput."""
    try:
        folder = config.run_dir / "checkpoints"
    except RuntimeError:  # place_output reports it
        return None, []
    check_allowed(config)
    resume_from, skipped = checkpoint.resolve(config.resume, folder)
    if config.resume == "none" and any(folder.glob("step-*")):
        raise WrongInput(f"resume: none, but {config.run_dir} holds checkpoints; give another name=, or resume=auto")
    if resume_from is not None and resume_from.parent.resolve() != folder.resolve() and checkpoint.listing(folder):
        raise WrongInput(
            f"resume: {resume_from} is another run's, and {config.run_dir} holds checkpoints of its own, which would "
            "be deleted; give resume=auto to go on from them, or another name="
        )
    return resume_from, skipped


class Untokenised:
    """Stands in for a tokenizer and template that cannot be loaded, so that the data is checked all the same."""

    def render(self, messages: Messages) -> tuple[Prompt, tuple[int, ...]]:
        """A prompt of a single made-up token id, which differs for different messages."""
        return "", (hash(tuple((message["role"], message["content"]) for message in messages)),)

    def count(self, text: str) -> int:
        """0, so that no prompt is too long."""
        return 0
