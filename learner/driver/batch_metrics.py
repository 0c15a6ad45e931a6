"""Numbers of a batch of rollout groups, before anything is learned from it. Pure."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from learner.driver.env_metrics import env_metrics
from learner.driver.failure import RunEnded
from rollout.env.trajectory import FAULT
from rollout.schema import failed, parts_of, rewards_of, whole


class RewardsFailing(RunEnded):
    """Most completions of a batch got no reward, or nobody gives any: such a run must not go on silently."""


def batch_metrics(groups: Sequence[pa.Table], version: int) -> dict[str, float]:
    """Reward, length and staleness figures of one batch; `version` is the policy that will learn from it.

    reward/mean and reward/std are of the completions that have a reward. Raises RewardsFailing if reward functions
    failed on more than half of the completions, or none of them has a reward.
    """
    rows = pa.concat_tables(groups)
    ends = whole(rows)
    rewards = rewards_of(ends)
    status = Counter(ends.column("reward_status").to_pylist())
    lost = failed(ends)
    if lost.mean() > 0.5:
        advice = "Try the functions alone: gleaner rewards try FILE:FUNCTION --rollouts runs/<name>/rollouts"
        if 2 * status[FAULT] > lost.sum():
            advice = "Mend the environment, or what a sentence names: docs/environments.md has the outcomes"
        raise RewardsFailing(
            f"{int(lost.sum())} of {len(rewards)} completions of this batch have no reward ({dict(status)}); the "
            f"sentences are in the log above. {advice}"
        )
    if np.isnan(rewards).all():
        raise RewardsFailing(
            f"rewards: must score some completions of each batch, and of these {len(rewards)} no reward function, "
            "reward model or environment scored any; add a reward function, or let the environment return rewards"
        )
    lengths = pc.list_value_length(rows.column("completion_ids")).to_numpy()
    staleness = version - rows.column("policy_version_min").to_numpy()
    finished = np.asarray(ends.column("finish_reason").to_pylist())
    metrics = {
        "reward/mean": float(np.nanmean(rewards)),
        "reward/std": float(np.nanstd(rewards)),
        "reward/failed": float(lost.mean()),
        "reward/ms": float(np.mean(rows.column("reward_ms").to_numpy())),
        "rollout/completion_length": float(lengths.mean()),
        "rollout/completion_length_max": float(lengths.max()),
        "rollout/truncated": float((finished == "length").mean()),
        "rollout/tokens": float(lengths.sum()),
        "policy/staleness_mean": float(staleness.mean()),
        "policy/staleness_max": float(staleness.max()),
    }
    told = ends.column("reward_error").to_pylist()
    if zeroed := sum(error is not None for error, kept in zip(told, ~lost, strict=True) if kept):
        metrics["reward/zeroed"] = float(zeroed)
    metrics |= {f"reward/status_{name}": float(count) for name, count in status.items() if name != "ok"}
    return metrics | reward_means(ends) | staleness_shares(rows, version) | env_metrics(rows)


def staleness_shares(rows: pa.Table, version: int) -> dict[str, float]:
    """`policy/staleness_<k>`: share of the batch's tokens that were sampled k policy versions before `version`."""
    versions = pc.list_flatten(rows.column("token_versions")).to_numpy()
    counts = np.bincount(version - versions)
    return {f"policy/staleness_{k}": float(count / counts.sum()) for k, count in enumerate(counts)}


def reward_means(rows: pa.Table) -> dict[str, float]:
    """`reward/<name>`: mean of each reward function's own number over the completions that it scored."""
    values: dict[str, list[float]] = {}
    for parts in parts_of(rows):
        for name, value in parts.items():
            values.setdefault(f"reward/{name}", []).append(np.nan if value is None else value)
    return {key: float(np.nanmean(v)) for key, v in values.items() if not np.all(np.isnan(v))}
