"""A replay with other settings or other rewards: what would the recorded completions have taught? This module checks
which settings may differ, scores completions again, and writes the folder of the replay.
"""

import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from cluster.errors import WrongInput
from cluster.telemetry import Metrics
from learner.config import RunConfig
from learner.config.load import to_yaml
from learner.config.settings import NAME
from learner.driver import record
from learner.driver.checkpoint import ADAPTER_FILES
from learner.driver.identity import FIXED, leaves, same_value
from learner.model.adapter_config import MODEL
from learner.tools.replay.recorded import Learner, Scoring, Step, Taken
from learner.tools.report.summary import REPLAY
from learner.tools.reward_trial import group_of
from rewards.check import try_rewards
from rewards.config import adapters_of, functions_of
from rewards.pool import RewardPool
from rollout import ledger
from rollout.schema import with_part, with_scores

if TYPE_CHECKING:
    from learner.trainer.trainer import Trainer


class ReplayFolder:
    """The folder of a replay, which gleaner report, gleaner eval and gleaner rollouts show read as that of a run.

    path: a new folder, or an empty one.
    facts: the content of replay.json.
    rescored: whether the groups get other rewards than the recorded ones; if not, the rollouts are links to the run's.

    Raises WrongInput if the folder cannot be written.
    """

    def __init__(self, path: Path, config: RunConfig, facts: dict[str, Any], *, rescored: bool) -> None:
        self.path, self._rescored, self._steps = path, rescored, 0
        self._whole = config.learner.mode == "full"
        rollouts = path / "rollouts"
        try:
            rollouts.mkdir(parents=True)
            (path / "config.yaml").write_text(to_yaml(config))
            (path / REPLAY).write_text(json.dumps(facts, indent=1))
        except OSError as error:
            raise WrongInput(f"--output: {path} cannot be written ({error.strerror}); give another folder") from error
        self._rollouts, self._metrics = rollouts, Metrics(path, [], 0)

    def add(self, taken: Taken) -> None:
        """Writes a step: its metrics, its rollouts, and the mismatch of their tokens with this learner."""
        step = taken.step
        if self._rescored:
            ledger.write(self._rollouts, step.number, taken.groups)
        else:
            link = self._rollouts / step.file.name
            link.symlink_to(os.path.relpath(step.file.resolve(), self._rollouts.resolve()))
        record.write_mismatch(self.path, step.number, taken.groups[: taken.trained], taken.mismatch)
        self._metrics.log(step.number, taken.metrics)
        self._steps += 1

    async def finish(self, learner: Learner) -> None:
        """Writes what was learned, in the form in which a run publishes it."""
        with tempfile.TemporaryDirectory(dir=self.path) as saved:
            await learner.save(Path(saved))
            if self._whole:
                shutil.move(Path(saved) / MODEL, self.path / MODEL)
                return
            for name in ADAPTER_FILES:
                if (source := Path(saved) / name).exists():
                    target = self.path / "adapter" / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._metrics.close()
        if kind is None:
            return
        if self._steps == 0:
            shutil.rmtree(self.path)
        else:
            print(
                f"unfinished {self.path} has {self._steps} steps and not what was learned; for another try delete it, "
                "or give another --output",
                file=sys.stderr,
            )


def place_for(run: Path, output: Path | None) -> Path:
    """Returns the folder to write: `output`, or without it the first name that is free beside the run. Raises
    WrongInput if `output` is not empty, or its name is not a name for a run."""
    if output is None:
        beside = run.resolve()
        own = re.sub(r"[^A-Za-z0-9._-]", "-", beside.name)  # the name of a run may have only these characters
        names = (f"{own}-replay{'' if number == 1 else f'-{number}'}" for number in range(1, 10**6))
        return next(place for name in names if not (place := beside.with_name(name)).exists())
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise WrongInput(f"--output: must be a new folder or an empty one, got {output}; give another")
    if not re.fullmatch(NAME, output.absolute().name):
        raise WrongInput(
            f"--output: its last part names a run, so it must be of letters, digits, dots, dashes and _, got {output}"
        )
    return output.absolute()


# Other rewards for recorded completions, by reward functions in reward processes and by reward models on the learner's
# base, as in a run.


def try_on(config: RunConfig, group: pa.Table) -> None:
    """Calls each reward function once. It must not be called in an event loop. Raises WrongInput."""
    if functions := functions_of(config.rewards):
        try_rewards(functions, group_of(group), config.rollout.reward_memory)


@asynccontextmanager
async def scoring(config: RunConfig) -> AsyncIterator[Scoring]:
    """Starts reward processes, and yields the function that replaces the rewards of groups by those of this
    configuration."""
    functions, models = functions_of(config.rewards), adapters_of(config.rewards)
    workers, memory = config.rollout.reward_workers, config.rollout.reward_memory

    async def score(trainer: "Trainer", groups: list[pa.Table]) -> list[pa.Table]:
        scores = await asyncio.gather(*(pool.score(group_of(group)) for group in groups))
        groups = [with_scores(group, given) for group, given in zip(groups, scores, strict=True)]
        said = await trainer.score(groups) if models else []
        begin = 0
        for place, group in enumerate(groups):
            for model, numbers in zip(models, said, strict=True):
                group = with_part(group, str(model.name), model.share, numbers[begin : begin + len(group)])
            groups[place], begin = group, begin + len(group)
        return groups

    async with RewardPool(functions, workers=workers, memory_bytes=memory) as pool:
        yield score


# The settings that may differ between a replay and its run, whose completions cannot be changed.

REWARDS = "rewards"
POSSIBLE = ("learner", REWARDS, "cluster.cpus.learner", "cluster.gpus.learner")
NOT_ALONE = ("learner.groups_per_step", "learner.push", "learner.restarts")  # they concern other processes, too
# Settings that change on which hardware, and in which pieces, the same is computed.
WHERE = (
    "cluster.cpus.learner", "cluster.gpus.learner", "learner.checkpointing",
    "learner.token_budget",
)  # fmt: skip

Changes = dict[str, tuple[Any, Any]]  # dotted key -> the run's value, and the replay's


def changes_of(then: RunConfig, now: RunConfig) -> Changes:
    """Returns the settings that differ."""
    old, new = (dict(_leaves(one)) for one in (then, now))
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if not same_value(old.get(key), new.get(key))}


def asked_again(changes: Changes, overrides: Sequence[str], then: RunConfig) -> Changes:
    """Returns the changes, and `rewards` among them if the user named `rewards` with the value of the run: the
    functions in its files may have changed."""
    named = any(word.partition("=")[0].strip().partition(".")[0] == REWARDS for word in overrides)
    if not named or rescored(changes):
        return changes
    uses = [reward.use for reward in then.rewards]
    return changes | {REWARDS: (uses, uses)}


def check_possible(changes: Changes, then: RunConfig, now: RunConfig, start: int) -> None:
    """Raises WrongInput, with a line for each change that would need other completions, or another checkpoint."""
    if then.learner.mode == "full" and then.arrangement.in_shards:
        raise WrongInput(
            "memory.layout: a replay has the whole model in one process, and a run with learner.mode=full and "
            "memory.layout=sharded sums and rounds in its shards otherwise, so its steps cannot be taken again; "
            "--bisect looks at what it recorded"
        )
    wrong = [
        f"{key}: must be as in the run, whose completions a replay takes as they are; for another value start a run: "
        f"gleaner train --config {then.run_dir / 'config.yaml'} {key}=... name=..."
        for key in changes
        if not _within(key, POSSIBLE) or _within(key, NOT_ALONE)
    ]
    if start > 0:
        wrong += [
            f"{key}: must be as in the run where a replay begins at a checkpoint, whose weights and optimizer are made "
            "for it; leave out --from"
            for key in changes
            if _within(key, FIXED)
        ]
    if now.env.use is not None and _within_any(changes, REWARDS):
        wrong.append(
            "rewards: must be as in the run with env.use, since what an environment gave for a turn cannot be taken "
            "out of a reward again; for others start a run"
        )
    if wrong:
        raise WrongInput("\n".join(wrong))


def decides(changes: Changes) -> bool:
    """Whether a change concerns more than on which hardware, and in which pieces, the same is computed."""
    return any(not _within(key, WHERE) for key in changes)


def rescored(changes: Changes) -> bool:
    """Whether the completions are scored again."""
    return _within_any(changes, REWARDS)


def computes_elsewhere(changes: Changes) -> bool:
    """Whether threads, device or micro-batches differ from the recorded ones."""
    return any(_within(key, WHERE) for key in changes)


def own_loss(changes: Changes) -> bool:
    """Whether a setting of the loss differs."""
    return _within_any(changes, "learner.loss")


def _leaves(config: RunConfig) -> list[tuple[str, Any]]:
    values = config.model_dump(mode="json", exclude={"name", "output_dir"})
    return [leaf for section, value in values.items() for leaf in leaves(section, value)]


def _within(key: str, ones: tuple[str, ...]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in ones)


def _within_any(changes: Changes, one: str) -> bool:
    return any(_within(key, (one,)) for key in changes)


FAR = 1e-2  # bound of policy/mismatch_k3 where guard.mismatch_k3 is null, nats per token


@dataclass(frozen=True, slots=True)
class Question:
    """A replay with other settings that is to be carried out."""

    run: Path  # folder of the run
    config: RunConfig  # configuration of the replay
    changes: Changes
    steps: Sequence[Step]
    start: Path | None  # checkpoint from which it begins; None: it begins where the run began
    place: Path  # folder that is written


async def answer(question: Question, told: Callable[[Taken], None]) -> int | None:
    """Computes the steps and writes the folder; `told` is called after each step. Returns the first step in which the
    policy was further from the one that sampled than `bound_of` allows; None if there is none."""
    config, changes = question.config, question.changes
    facts = {
        "of": str(question.run.resolve()),
        "from": question.steps[0].number - 1,
        "to": question.steps[-1].number,
        "changed": {key: {"run": then, "replay": now} for key, (then, now) in changes.items()},
    }
    far: int | None = None
    async with AsyncExitStack() as stack:
        given = await stack.enter_async_context(scoring(config)) if rescored(changes) else None
        learner = Learner(config, question.start, scoring=given, as_recorded=not computes_elsewhere(changes))
        folder = stack.enter_context(ReplayFolder(question.place, config, facts, rescored=given is not None))
        taking: AsyncGenerator[Taken, None] = learner.take(question.steps)
        async for taken in taking:
            folder.add(taken)
            told(taken)
            if far is None and taken.metrics.get("policy/mismatch_k3", 0.0) > bound_of(config):
                far = taken.step.number
        await folder.finish(learner)
    return far


def bound_of(config: RunConfig) -> float:
    """Returns the bound of `policy/mismatch_k3` in nats per token, beyond which a run is stopped by its guard."""
    return config.guard.mismatch_k3 or FAR
