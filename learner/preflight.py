"""Everything that can be wrong is found before anything expensive starts: one clear line each, nothing written."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.actors import in_job
from cluster.placement import PlacementError, Role, local_node, place
from learner import checkpoint
from learner.config import RunConfig
from learner.evaluate import accuracy_judge
from learner.memory_plan import Budgets, MemoryPlanError, settle
from learner.settings import to_yaml
from rewards.base import RewardError
from rewards.check import try_rewards
from rollout.chat import Chat, ChatError
from rollout.problems import Problems, ProblemsError, load
from rollout.schema import Problem

# What decides which numbers a run produces: a resumed run must have the same.
IDENTITY = ("seed", "max_staleness", "model", "data", "rewards", "rollout", "learner")


class PreflightError(ValueError):
    """An input of the run is wrong."""


PROBLEMS = (
    PreflightError, PlacementError, MemoryPlanError, RewardError, ChatError, ProblemsError, checkpoint.CheckpointError
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
    budgets: Budgets


def roles(config: RunConfig) -> list[Role]:
    """The processes of a run: its generators, then the learner."""
    cpus, gpus = config.cluster.cpus, config.cluster.gpus
    generators = [Role(f"generator-{rank}", cpus.generator, gpus.generator) for rank in range(config.rollout.workers)]
    return [*generators, Role("learner", cpus.learner, gpus.learner)]


def prepare(config: RunConfig) -> Prepared:
    """Checks output folder, placement, checkpoints, model, memory, data and rewards, cheapest first."""
    if in_job():  # its working directory is thrown away: a relative output_dir is taken from the home folder
        config = config.model_copy(update={"output_dir": str(Path.home() / config.output_dir)})
    _check_output(config.run_dir)
    if config.cluster.address == "local" and not in_job():  # a cluster is asked once we are connected to it
        place(roles(config), [local_node(sum(role.cpus for role in roles(config)))])
    resume_from, skipped = checkpoint.resolve(config.resume, config.run_dir / "checkpoints")
    if resume_from is not None:
        _check_same_run(config, resume_from)
    elif config.resume == "none" and any((config.run_dir / "checkpoints").glob("step-*")):
        raise PreflightError(
            f"resume: none, but {config.run_dir} holds checkpoints; give another name=, or resume=auto"
        )
    config = _absolute(config)
    budgets = settle(config, _check_model(config))
    chat = Chat.load(config.model.path)
    problems, heldout = load(config.data, chat, config.rollout.max_prompt_length, config.seed)
    try:
        accuracy_judge(config.rewards, config.data.eval.judge)
    except ValueError as error:
        raise PreflightError(str(error)) from None
    _check_rewards(config, problems.at(0))
    return Prepared(
        config=config,
        problems=problems,
        heldout=heldout,
        total_steps=_total_steps(config, len(problems)),
        resume_from=resume_from,
        finished_steps=0 if resume_from is None else checkpoint.step_of(resume_from),
        skipped_checkpoints=skipped,
        budgets=budgets,
    )


def report(prepared: Prepared) -> str:
    """What --dry-run prints."""
    config = prepared.config
    lines = [to_yaml(config), f"run folder   {config.run_dir}", f"steps        {prepared.total_steps}"]
    lines += [f"resume       {prepared.resume_from or 'from the start'}"]
    lines += [f"problems     {len(prepared.problems)} to train on, {len(prepared.heldout)} held out"]
    lines += [f"placement    {role.name}: {role.cpus:g} CPU, {role.gpus:g} GPU" for role in roles(config)]
    lines += [prepared.budgets.note]
    return "\n".join([*lines, "model, data and rewards are in order; nothing was started or written"])


def _check_output(run_dir: Path) -> None:
    there = next(path for path in [run_dir, *run_dir.parents] if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise PreflightError(f"output_dir: {run_dir} cannot be written ({there} is not a writable folder)")


def _check_same_run(config: RunConfig, folder: Path) -> None:
    then = json.loads((folder / "config.json").read_text())
    now = _absolute(config).model_dump(mode="json")
    different = [key for key in IDENTITY if then.get(key) != now[key] and key != "data"]
    if {**then["data"], "eval": None} != {**now["data"], "eval": None}:
        different.append("data")
    if different:
        raise PreflightError(
            f"resume: {folder} was made with another {', '.join(different)}; give this run another name=, or set the "
            "same values again"
        )


def _absolute(config: RunConfig) -> RunConfig:
    """Paths that exist here are made absolute, since the processes of the run have folders of their own."""

    def whole(text: str | None) -> str | None:
        return str(Path(text).absolute()) if text is not None and Path(text).exists() else text

    model = config.model.model_copy(
        update={name: whole(getattr(config.model, name)) for name in ("path", "adapter", "reference")}
    )
    rewards = []
    for reward in config.rewards:
        file, colon, function = reward.use.rpartition(":")
        use = f"{whole(file)}{colon}{function}" if file.endswith(".py") else reward.use
        rewards.append(reward.model_copy(update={"use": use}))
    return config.model_copy(update={"model": model, "rewards": rewards})


def _check_model(config: RunConfig) -> dict[str, Any]:
    """Reads config.json only, and returns it: the model exists, and prompt and completion fit its context."""
    from transformers import AutoConfig

    try:
        shape = AutoConfig.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"model.path: {config.model.path} is neither a folder with a config.json nor a model that the hub gives "
            f"({str(error).splitlines()[0]})"
        ) from None
    need = config.rollout.max_prompt_length + config.rollout.max_completion_length
    context = getattr(shape, "max_position_embeddings", None)
    if context is not None and need > context:
        raise PreflightError(
            f"rollout: max_prompt_length + max_completion_length must be at most the model's context of {context} "
            f"tokens, got {need}"
        )
    content: dict[str, Any] = shape.to_dict()
    return content


def _check_rewards(config: RunConfig, problem: Problem) -> None:
    """Each judge once, on a dummy completion of the first problem, in a worker process like those of the run."""
    chatty = not isinstance(problem.messages, str)
    try_rewards(
        config.rewards,
        prompts=[list(problem.messages) if chatty else problem.messages],
        completions=[[{"role": "assistant", "content": ""}] if chatty else ""],
        completion_ids=[[0]],
        columns={key: [value] for key, value in problem.columns.items()},
    )


def _total_steps(config: RunConfig, num_problems: int) -> int:
    if config.epochs is None:
        assert config.num_steps is not None
        return config.num_steps
    return max(1, round(config.epochs * num_problems / config.learner.groups_per_step))
