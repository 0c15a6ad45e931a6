"""Everything that can be wrong is found before anything expensive starts: one clear line each, nothing written."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from cluster.placement import PlacementError, local_node, place
from cluster.ray_cluster import in_job
from learner import checkpoint
from learner.adapter_config import AdapterError, follow, read_adapter
from learner.config import RunConfig, roles
from learner.evaluate import accuracy_judge
from learner.fingerprints import Fingerprints, fingerprints_of
from learner.learner_config import LoraConfig
from learner.memory_plan import Budgets, MemoryPlanError, settle
from learner.reference_config import ReferenceConfigError, check_reference
from learner.resume import ResumeError, check_allowed, check_same_run
from learner.run_lock import RunFolderInUse
from learner.settings import to_yaml
from rewards.base import RewardError, case_of
from rewards.check import try_rewards
from rollout.architecture import ArchitectureError, check_architecture, check_length
from rollout.chat import Chat, ChatError
from rollout.cursor import Cursor
from rollout.problems import Problems, ProblemsError, load
from rollout.schema import Problem


class PreflightError(ValueError):
    """An input of the run is wrong."""


PROBLEMS = (
    PreflightError, PlacementError, MemoryPlanError, ArchitectureError, RewardError, ChatError, ProblemsError,
    checkpoint.CheckpointError, RunFolderInUse, AdapterError, ResumeError,
    ReferenceConfigError,
)  # fmt: skip


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
    if in_job():  # its working directory is thrown away: a relative output_dir is taken from the home folder
        config = config.model_copy(update={"output_dir": str(Path.home() / Path(config.output_dir).expanduser())})
    there = next(path for path in [config.run_dir, *config.run_dir.parents] if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise PreflightError(f"output_dir: {config.run_dir} cannot be written ({there} is not a writable folder)")
    return config


def prepare(config: RunConfig) -> Prepared:
    """Checks placement, checkpoints, model, memory, data and rewards, cheapest first."""
    if config.cluster.address == "local" and not in_job():  # a cluster is asked once we are connected to it
        place(roles(config), [local_node(sum(role.cpus for role in roles(config)))])
    resume_from, skipped = checkpoint.resolve(config.resume, config.run_dir / "checkpoints")
    check_allowed(config)
    if config.resume == "none" and any((config.run_dir / "checkpoints").glob("step-*")):
        raise PreflightError(
            f"resume: none, but {config.run_dir} holds checkpoints; give another name=, or resume=auto"
        )
    config, notes = _follow_adapter(_absolute(config))
    chat = Chat.load(config.model.path, config.data.chat_template_kwargs)
    chat.stops(config.rollout.stop)
    _check_context(config, chat.context)
    check_architecture(chat.config, config.model.path, lora=config.learner.mode == "lora")
    longest = config.rollout.max_prompt_length + config.rollout.max_completion_length
    check_length(chat.config, config.model.path, longest)
    budgets = settle(config, chat.config)
    problems, heldout = load(config.data, chat, config.rollout.max_prompt_length, config.seed)
    try:
        accuracy_judge(config.rewards, config.data.eval.judge)
    except ValueError as error:
        raise PreflightError(str(error)) from None
    _check_rewards(config, problems.at(0))
    fingerprints = fingerprints_of(config, problems.rows())
    changed = check_same_run(config, fingerprints, resume_from) if resume_from is not None else []
    return Prepared(
        config=config,
        problems=problems,
        heldout=heldout,
        total_steps=_total_steps(config, len(problems), resume_from),
        resume_from=resume_from,
        finished_steps=0 if resume_from is None else checkpoint.step_of(resume_from),
        skipped_checkpoints=skipped,
        changed=changed,
        fingerprints=fingerprints,
        budgets=budgets,
        notes=notes,
    )


def report(prepared: Prepared) -> str:
    """What --dry-run prints."""
    config = prepared.config
    lines = [to_yaml(config), f"run folder   {config.run_dir}", f"steps        {prepared.total_steps}"]
    lines += [f"resume       {prepared.resume_from or 'from the start'}"]
    lines += [f"changed      {change}, as resume_allow_changed allows" for change in prepared.changed]
    lines += [f"problems     {len(prepared.problems)} to train on, {len(prepared.heldout)} held out"]
    lines += [f"placement    {role.name}: {role.cpus:g} CPU, {role.gpus:g} GPU" for role in roles(config)]
    lines += [prepared.budgets.note, *prepared.notes]
    return "\n".join([*lines, "model, data and rewards are in order; nothing was started or written"])


def _follow_adapter(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """With learner.lora as model.adapter has it where it is left open, and the line that says so."""
    if config.model.reference is not None and config.learner.mode == "full":
        check_reference(config.model.reference, config.model.path)
    elif config.model.reference is not None:
        read_adapter(config.model.reference, "model.reference")
    if config.model.adapter is None:
        return config, ()
    lora = follow(config.learner.lora, config.model.adapter)
    open_fields = [name for name in LoraConfig.model_fields if name not in config.learner.lora.model_fields_set]
    followed = ", ".join(f"{name} {getattr(lora, name)}" for name in open_fields)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})
    return config, (f"learner.lora follows model.adapter: {followed}",) if followed else ()


def _absolute(config: RunConfig) -> RunConfig:
    """Paths that exist here are made absolute, since the processes of the run have folders of their own."""

    def whole(text: str | None) -> str | None:
        path = Path(text).expanduser() if text is not None else None
        return str(path.absolute()) if path is not None and path.exists() else text

    model = config.model.model_copy(
        update={name: whole(getattr(config.model, name)) for name in ("path", "adapter", "reference")}
    )
    rewards = []
    for reward in config.rewards:
        file, colon, function = reward.use.rpartition(":")
        use = f"{whole(file)}{colon}{function}" if file.endswith(".py") else reward.use
        rewards.append(reward.model_copy(update={"use": use}))
    return config.model_copy(update={"model": model, "rewards": rewards})


def _check_context(config: RunConfig, context: int | None) -> None:
    need = config.rollout.max_prompt_length + config.rollout.max_completion_length
    if context is not None and need > context:
        raise PreflightError(
            f"rollout: max_prompt_length + max_completion_length must be at most the model's context of {context} "
            f"tokens, got {need}"
        )


def _check_rewards(config: RunConfig, problem: Problem) -> None:
    """Each judge once, on a dummy completion of the first problem, in a worker process like those of the run."""
    case = case_of(problem.messages, [""], [[0]], problem.columns)
    try_rewards(config.rewards, **case, memory_bytes=config.rollout.reward_memory)


def _total_steps(config: RunConfig, num_problems: int, resume_from: Path | None) -> int:
    """With epochs, if no group is replaced; fewer where the checkpoint says that enough problems were consumed."""
    if config.num_steps is not None:
        return config.num_steps
    needed = config.num_problems(num_problems)
    if resume_from is not None:
        consumed = Cursor()
        consumed.restore(**json.loads((resume_from / "state.json").read_text())["cursor"])
        if consumed.consumed >= needed:
            return checkpoint.step_of(resume_from)
    return math.ceil(needed / config.learner.groups_per_step)
