"""Which settings a replay may have other than the run, since the run's completions are what they are."""

from collections.abc import Sequence
from typing import Any

from learner.config import RunConfig
from learner.driver.identity import FIXED, leaves, same_value
from learner.tools.replay.recorded import ReplayError

REWARDS = "rewards"
POSSIBLE = ("learner", REWARDS, "cluster.cpus.learner", "cluster.gpus.learner")
NOT_ALONE = ("learner.groups_per_step", "learner.push", "learner.restarts")  # of the run's other processes too
WHERE = (
    "cluster.cpus.learner", "cluster.gpus.learner", "learner.checkpointing", "learner.offload_boundaries",
    "learner.token_budget",
)  # fmt: skip

Changes = dict[str, tuple[Any, Any]]  # dotted key -> the run's value, and the replay's


def changes_of(then: RunConfig, now: RunConfig) -> Changes:
    """What differs."""
    old, new = (dict(_leaves(one)) for one in (then, now))
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if not same_value(old.get(key), new.get(key))}


def asked_again(changes: Changes, overrides: Sequence[str], then: RunConfig) -> Changes:
    """With the rewards among them where they are named with the value that they have: the functions in their files may
    be others now."""
    named = any(word.partition("=")[0].strip().partition(".")[0] == REWARDS for word in overrides)
    if not named or rescored(changes):
        return changes
    uses = [reward.use for reward in then.rewards]
    return changes | {REWARDS: (uses, uses)}


def check_possible(changes: Changes, then: RunConfig, now: RunConfig, start: int) -> None:
    """Raises ReplayError, with a line for each change that would need other completions, or another beginning."""
    if then.learner.mode == "full" and then.memory.base == "sharded":
        raise ReplayError(
            "memory.base: a replay has the whole model in one process, and a run with learner.mode=full and "
            "memory.base=sharded sums and rounds in its shards otherwise, so its steps cannot be taken again; --bisect "
            "looks at what it recorded"
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
        raise ReplayError("\n".join(wrong))


def decides(changes: Changes) -> bool:
    """Whether any of them changes more than where, and in which pieces, the same is computed."""
    return any(not _within(key, WHERE) for key in changes)


def rescored(changes: Changes) -> bool:
    """Whether the completions get other rewards."""
    return _within_any(changes, REWARDS)


def computes_elsewhere(changes: Changes) -> bool:
    """Whether threads, device or micro-batches are to be others than the recorded ones."""
    return any(_within(key, WHERE) for key in changes)


def own_loss(changes: Changes) -> bool:
    """Whether the loss is another."""
    return _within_any(changes, "learner.loss")


def _leaves(config: RunConfig) -> list[tuple[str, Any]]:
    values = config.model_dump(mode="json", exclude={"name", "output_dir"})
    return [leaf for section, value in values.items() for leaf in leaves(section, value)]


def _within(key: str, ones: tuple[str, ...]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in ones)


def _within_any(changes: Changes, one: str) -> bool:
    return any(_within(key, (one,)) for key in changes)
