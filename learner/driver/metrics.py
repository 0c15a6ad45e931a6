"""Numbers of a batch of rollout groups, what they say of the training signal, and when they end a run. Pure."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from learner.config import GuardConfig, RunConfig
from learner.driver.failure import RunEnded
from rollout.env.play import FAULT, FAULTS
from rollout.schema import failed, lasts, masks_of, oldest_versions, parts_of, rewards_of, sampled_lengths, whole

# Numbers of trajectories: turns, calls, and what environments took and said of themselves. Pure.


def env_metrics(rows: pa.Table) -> dict[str, float]:
    """`env/...`: means over trajectories; empty where all are single completions.

    env/errors: share that a fault of the environment ended, and has no reward. env/outcome_<name>: share that ended so.
    env/seconds: of the environment, in all turns together. env/observation_tokens: tokens that the policy did not
    sample, of all rows of a trajectory. Numbers that an environment gave itself, by its names, are sums over turns.
    """
    if rows.column("messages").null_count == len(rows):
        return {}
    ends, last = whole(rows), lasts(rows)
    turns = rows.column("turns").to_pylist()
    every, count = [turn for row in turns for turn in row], len(ends)
    played = np.add.reduceat([len(row) for row in turns], np.flatnonzero(np.append(True, last[:-1])))
    outcomes = Counter(ends.column("finish_reason").to_pylist())
    observed = sum(np.count_nonzero(~mask) for mask in masks_of(rows))
    metrics = {
        "env/turns": len(every) / count,
        "env/turns_max": float(max(played)),
        "env/calls": sum(turn["calls"] for turn in every) / count,
        "env/malformed": sum(turn["malformed"] for turn in every) / count,
        "env/seconds": sum(turn["env_ms"] for turn in every) / count / 1e3,
        "env/observation_tokens": observed / count,
        "env/errors": sum(outcomes[name] for name in FAULTS) / count,
    }
    metrics |= {f"env/outcome_{name}": number / count for name, number in outcomes.items()}
    own: Counter[str] = Counter()
    for row in ends.column("env_metrics").to_pylist():
        own.update({number["name"]: number["value"] for number in row})
    return metrics | {f"env/{name}": total / count for name, total in own.items()}


# Numbers of a batch of rollout groups, before anything is learned from it. Pure.


def failing(groups: Sequence[pa.Table]) -> RunEnded | None:
    """What ends a run if reward functions, or environments, failed on more than half of the completions."""
    ends = whole(pa.concat_tables(groups))
    status, lost = Counter(ends.column("reward_status").to_pylist()), failed(ends)
    if lost.mean() <= 0.5:
        return None
    advice = "Try the functions alone: gleaner rewards try FILE:FUNCTION --rollouts runs/<name>/rollouts"
    if 2 * status[FAULT] > lost.sum():
        advice = "Mend the environment, or what a sentence names: docs/environments.md has the outcomes"
    return RunEnded(
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


# Whether there is anything to learn from in a run's last steps: nothing where completions are cut off before they
# answer, where no token is trained on, and where all completions score the same.

CUT = "length"  # finish_reason of what rollout.max_completion_length cut off
STEPS = 10  # a few steps without a difference are usual
LEAST = 3  # of a run that ended before
NEARLY_ALL = 0.9  # of the completions, or groups, of these steps, from which on it is worth a line


class Signal(NamedTuple):
    """What the metrics of a step say. alike: groups whose completions all scored alike; None: PPO, which has no such
    metric, and learns from one completion alone. same: whether all completions of the step did."""

    truncated: float
    alike: float | None
    mean: float
    same: bool
    trained: float | None

    @classmethod
    def of(cls, metrics: Mapping[str, float | None]) -> "Signal":
        """Of a line of metrics.jsonl, whose values may be None."""
        mean = metrics.get("reward/mean")
        return cls(
            metrics.get("rollout/truncated") or 0.0,
            metrics.get("reward/zero_variance_groups"),
            float("nan") if mean is None else mean,
            metrics.get("reward/std") == 0.0,
            metrics.get("loss/trained_tokens"),
        )


class SignalWatch:
    """Looks at the last steps of a run."""

    def __init__(self, config: RunConfig) -> None:
        self._groups, self._longest = config.learner.groups_per_step, config.rollout.max_completion_length
        self._masks = config.learner.loss.mask_truncated
        self._last: deque[Signal] = deque(maxlen=STEPS)
        self._said: set[str] = set()

    def add(self, metrics: Mapping[str, float | None]) -> list[str]:
        """One more step. The sentences of `advice` that were not said yet, each once in a run: that completions are cut
        off after LEAST steps, that they score alike after STEPS."""
        self._last.append(Signal.of(metrics))
        enough = {"cut": LEAST, "untrained": LEAST, "alike": STEPS}
        found = {
            name: sentence
            for name, sentence in self._findings()
            if name not in self._said and len(self._last) >= enough[name]
        }
        self._said |= set(found)
        return [*found.values()]

    def advice(self) -> list[str]:
        """A sentence for each cause; none where there is signal, or there were too few steps to say."""
        return [sentence for _, sentence in self._findings()]

    def _findings(self) -> Iterator[tuple[str, str]]:
        """The cause first: what is cut off often scores alike, too."""
        steps = list(self._last)
        if not steps:
            return
        last = "the last step" if len(steps) == 1 else f"the last {len(steps)} steps"
        share = sum(step.truncated for step in steps) / len(steps)
        untrained = all(step.trained == 0 for step in steps)
        masked = self._masks and untrained and any(step.truncated > 0 for step in steps)
        if share >= NEARLY_ALL:
            left_out = ". learner.loss.mask_truncated leaves them out: no token was trained on" if masked else ""
            yield "cut", f"in {last} {share:.0%} of the completions {cut_off(self._longest)}{left_out}"
        elif masked and not self._alike(steps):
            told = (
                f"in {last} no token was trained on (loss/trained_tokens is 0): learner.loss.mask_truncated leaves out "
                f"what was cut off, {share:.0%} of the completions, and the others score alike; raise "
                f"rollout.max_completion_length={self._longest}, or set learner.loss.mask_truncated=false"
            )
            yield "untrained", told
        if self._alike(steps):
            yield "alike", self._of_alike(steps, last)

    def _alike(self, steps: list[Signal]) -> bool:
        """Whether nearly all groups are; in fewer steps than LEAST only if all completions have one reward."""
        if len(steps) < LEAST or steps[0].alike is None:
            return all(step.same for step in steps) and len({step.mean for step in steps}) == 1
        return sum(step.alike or 0.0 for step in steps) >= NEARLY_ALL * len(steps) * self._groups

    def _of_alike(self, steps: list[Signal], last: str) -> str:
        groups, mean = len(steps) * self._groups, f"{steps[-1].mean:.3g}"
        if steps[0].alike is None:
            what = f"in {last} all completions have the same reward ({mean}), so that no answer is better than another"
        else:
            alike = sum(step.alike or 0.0 for step in steps)
            what = (
                f"in {alike:.0f} of the {groups} groups of {last} all completions have the same reward (mean {mean}), "
                "and from such a group nothing is learned"
            )
        return (
            f"{what}: the problems are too hard or too easy for the reward. Read some (gleaner rollouts show RUN); "
            "docs/learning.md has what to do"
        )


def cut_off(longest: int) -> str:
    """What is said of completions that reached rollout.max_completion_length."""
    return (
        f"reached rollout.max_completion_length={longest} before they ended, and rewards read what was cut off: raise "
        "it, name what ends an answer in rollout.stop, or reward brevity (length)"
    )


# The guard that stops a run before a broken sampler ruins the policy.

METRIC = "policy/mismatch_k3"
MOST_ABOVE = 5  # steps in a row above guard.mismatch_k3


class MismatchGuard:
    """Watches the mean k3 of learner and sampler, in nats: an estimate of KL(sampler || learner).

    With max_staleness > 0 the policy's own movement since the tokens were sampled is part of it. The count of steps in
    a row starts at 0 in a resumed run: it has as many steps to show that what was changed helped.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._above: list[float] = []

    def check(self, metrics: Mapping[str, float]) -> str | None:
        """The metrics of one step -> the reason to stop, or None. A step that trained nothing does not count."""
        limit, value = self._config.mismatch_k3, metrics.get(METRIC)
        if limit is None or value is None:
            return None
        self._above = [] if value <= limit else [*self._above, value]  # what is not a number is above
        if len(self._above) < MOST_ABOVE:
            return None
        return (
            f"{METRIC}: must be at most guard.mismatch_k3={limit:g}, was {', '.join(f'{v:.3g}' for v in self._above)} "
            f"in {len(self._above)} steps in a row: the learner trains on tokens that its policy would not have "
            "sampled so. Lower learner.learning_rate or max_staleness, or compare policy/mismatch_max_current: above "
            "1e-3 in float32 the engine disagrees with the learner (model.dtype, sampling settings). The run can be "
            "resumed; guard.mismatch_k3=null switches this off"
        )
