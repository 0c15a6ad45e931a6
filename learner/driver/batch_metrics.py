"""Numbers of a batch of rollout groups, before anything is learned from it. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from learner.driver.env_metrics import env_metrics
from learner.driver.failure import RunEnded
from rollout.env.trajectory import FAULT
from rollout.schema import failed, masks_of, oldest_versions, parts_of, rewards_of, sampled_lengths, whole


class RewardsFailing(RunEnded):
    """Reward functions fail on most completions, or nobody scores any: such a run must not go on silently."""


def failing(groups: Sequence[pa.Table]) -> RewardsFailing | None:
    """What ends a run if reward functions, or environments, failed on more than half of the completions."""
    ends = whole(pa.concat_tables(groups))
    status, lost = Counter(ends.column("reward_status").to_pylist()), failed(ends)
    if lost.mean() <= 0.5:
        return None
    advice = "Try the functions alone: gleaner rewards try FILE:FUNCTION --rollouts runs/<name>/rollouts"
    if 2 * status[FAULT] > lost.sum():
        advice = "Mend the environment, or what a sentence names: docs/environments.md has the outcomes"
    return RewardsFailing(
        f"{int(lost.sum())} of {len(ends)} completions of this batch have no reward ({dict(status)}); the sentences "
        f"are in the log above. {advice}"
    )


def unscored(groups: Sequence[pa.Table]) -> bool:
    """Whether no completion has a reward, so that there is nothing to learn from."""
    return all(bool(np.isnan(rewards_of(group)).all()) for group in groups)


def batch_metrics(groups: Sequence[pa.Table], version: int) -> dict[str, float]:
    """Reward, length and staleness figures of one batch, some of whose completions have a reward; `version` is the
    policy that will learn from it.

    reward/mean and reward/std, which is divided by their number, are of the completions that have a reward. Tokens are
    those that the policy sampled: what an environment or a tool said is in none of the figures.
    """
    rows = pa.concat_tables(groups)
    ends = whole(rows)
    rewards = rewards_of(ends)
    status = Counter(ends.column("reward_status").to_pylist())
    lost = failed(ends)
    lengths = sampled_lengths(rows)
    staleness = version - oldest_versions(rows)
    finished = np.asarray(ends.column("finish_reason").to_pylist())
    metrics = {
        "reward/mean": float(np.nanmean(rewards)),
        "reward/std": float(np.nanstd(rewards)),
        "reward/failed": float(lost.mean()),
        "reward/ms": float(np.mean(ends.column("reward_ms").to_numpy())),
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
    metrics |= logged_means(ends)
    return metrics | reward_means(ends) | staleness_shares(rows, version) | env_metrics(rows)


def staleness_shares(rows: pa.Table, version: int) -> dict[str, float]:
    """`policy/staleness_<k>`: share of the batch's tokens that were sampled k policy versions before `version`."""
    versions = pc.list_flatten(rows.column("token_versions")).to_numpy()[np.concatenate(masks_of(rows))]
    counts = np.bincount(version - versions)
    return {f"policy/staleness_{k}": float(count / counts.sum()) for k, count in enumerate(counts)}


# Names below reward/ of what no function gave.
OF_ALL = ("mean", "std", "failed", "ms", "zero_variance_groups", "zeroed")


def function_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Each reward function's own mean, by its name, out of the metrics of a step."""
    own = {key.removeprefix("reward/"): value for key, value in metrics.items() if key.startswith("reward/")}
    return {name: value for name, value in own.items() if name not in OF_ALL and not name.startswith("status_")}


def logged_means(rows: pa.Table) -> dict[str, float]:
    """`log/<name>`: what reward functions gave to log_metric, a mean over the completions of groups that have it."""
    values: dict[str, list[float]] = {}
    for row in rows.column("logged").to_pylist():
        for one in row:
            if one["value"] is not None:
                values.setdefault(f"log/{one['name']}", []).append(one["value"])
    return {key: float(np.mean(value)) for key, value in values.items()}


def reward_means(rows: pa.Table) -> dict[str, float]:
    """`reward/<name>`: mean of each reward function's own number over the completions that it scored."""
    values: dict[str, list[float]] = {}
    for parts in parts_of(rows):
        for name, value in parts.items():
            values.setdefault(f"reward/{name}", []).append(np.nan if value is None else value)
    return {key: float(np.nanmean(v)) for key, v in values.items() if not np.all(np.isnan(v))}
