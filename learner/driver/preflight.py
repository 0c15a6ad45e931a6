"""Everything that can be wrong is found before anything expensive starts: one clear line each, nothing left behind."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from cluster.memory.plan import gib
from learner.config import RunConfig, roles
from learner.driver import checkpoint
from learner.driver.absolute_paths import absolute
from learner.driver.cards import Cards, present, size_for
from learner.driver.config_io import to_yaml
from learner.driver.env_check import Tried, check_environment, check_environment_column
from learner.driver.findings import Findings, PreflightError
from learner.driver.fingerprints import Fingerprints, fingerprints_of
from learner.driver.first_checks import PROBLEMS, First, look
from learner.driver.function_checks import check_grammar, check_loss, check_rewards
from learner.driver.machine_checks import (
    check_main_memory,
    machine_notes,
)
from learner.driver.memory_budget import Budgets, settle, settled
from learner.driver.model_checks import adapter_notes, adapters_in, check_weights, follow_adapter, load_chat
from learner.driver.prompt_check import check_data_prompts
from learner.driver.resume import check_allowed, check_same_run
from learner.driver.run_length import total_steps
from learner.driver.setting_notes import setting_notes
from learner.driver.step_record import read_policies
from learner.driver.trials import ENGINE, LEARNER, SHARED_BASE, Trial
from learner.trainer.learning_rate import rate_factor
from rollout.architecture import check_unquantised
from rollout.data.chat import Chat, ChatError, Messages, Prompt
from rollout.data.model_files import CONFIG, read_json
from rollout.data.problems import Problems, fitting, load
from rollout.schema import Problem


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


def rehearse(config: RunConfig, cards: Cards | None) -> Prepared:
    """All checks of a start, and those which at a start the processes of generators and learner make themselves.

    cards: to be assumed instead of those that are here. Raises PreflightError with one line per mistake.
    """
    first = look(config, cards)
    told = first.finish()
    found = Findings(PROBLEMS)
    modules = (LEARNER, ENGINE, SHARED_BASE) if config.memory.base == "shared" else (LEARNER, ENGINE)
    trials = [Trial(module, absolute(first.config)) for module in modules if _has_config(config.model.source)]
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


def _has_config(model: str) -> bool:
    """Else the checks of `prepare` say so, and a trial would say it once more in the words of its library."""
    try:
        return bool(read_json(model, CONFIG))
    except ChatError:
        return False


def prepare(config: RunConfig, cards: Cards | None = None) -> Prepared:
    """Checks placement, checkpoints, model, memory, data, rewards and loss: first what is told at once, then the rest;
    of each what is wrong with one hides no other.

    Raises PreflightError with one line per mistake.
    """
    return prepare_rest(look(config, cards), cards)


def prepare_rest(first: First, cards: Cards | None = None) -> Prepared:
    """As prepare, of a configuration that was looked at just now."""
    return _prepared(first, first.finish(), cards)


def _prepared(first: First, told: tuple[str, ...], cards: Cards | None) -> Prepared:
    """told: of the reward functions, if they were tried on the first problem."""
    config, found = first.config, Findings(PROBLEMS)
    resume_from, skipped = found.of(_checkpoint, config) or (None, [])
    followed = found.of(follow_adapter, absolute(config))
    config, notes = followed or (absolute(config), ())
    chat = found.of(load_chat, config)
    found.of(check_weights, config, followed=followed is not None)
    if chat is not None:
        found.of(check_unquantised, chat.config, config.model.path)
        for key, folder in adapters_in(config):
            notes += found.of(adapter_notes, folder, key, config.model.path, chat) or ()
    config, budgets, of_memory = _sized(found, config, chat, cards or present(config))
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
