"""Computes the metrics of a batch of groups, warns where they show no training signal, and ends a run whose generators
and learner disagree. learner.driver.loop calls these functions. The only I/O is RewardWatch's, which reads the steps
before a resume."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cluster.telemetry import METRICS_FILE, MetricsFile
from learner.config import GuardConfig, RunConfig
from learner.driver.failure import RunEnded
from rewards.config import RewardConfig, watches_of
from rewards.watch import Finding, Series, columns_of, findings, sentence
from rollout.env.trajectory import FAULT, FAULTS
from rollout.schema import failed, lasts, masks_of, oldest_versions, parts_of, rewards_of, sampled_lengths, whole

# Metrics of trajectories.


def env_metrics(rows: pa.Table) -> dict[str, float]:
    """The metrics `env/...`, means over trajectories; empty where each trajectory is a single completion.

    env/errors: share of trajectories that a fault of the environment ended, which have no reward. env/outcome_<name>:
    share of trajectories that ended so. env/seconds: seconds that the environment took in all turns of a trajectory.
    env/observation_tokens: tokens of a trajectory, in all of its rows, that the policy did not sample. env/<name>: a
    number that the environment itself gave under this name, summed over the turns.
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


# Metrics of a batch, before the learner trains on it.


def failing(groups: Sequence[pa.Table]) -> RunEnded | None:
    """The error that ends the run if reward functions or environments failed on more than half of the completions."""
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
    """Metrics of reward, length and staleness of a batch. version: that of the policy that will be trained on it.

    At least one completion must have a reward. reward/mean and reward/std (divided by N, not N - 1) are taken over the
    completions that have one. Lengths and tokens count what the policy sampled, not what an environment or a tool said.
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
    """The metrics `policy/staleness_<k>`: share of tokens that were sampled k policy versions before `version`."""
    versions = pc.list_flatten(rows.column("token_versions")).to_numpy()[np.concatenate(masks_of(rows))]
    counts = np.bincount(version - versions)
    return {f"policy/staleness_{k}": float(count / counts.sum()) for k, count in enumerate(counts)}


# Names below reward/ that are not those of reward functions.
OF_ALL = ("mean", "std", "failed", "ms", "zero_variance_groups", "zeroed")


def function_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Name of each reward function -> its mean, from the metrics of a step."""
    own = {key.removeprefix("reward/"): value for key, value in metrics.items() if key.startswith("reward/")}
    return {name: value for name, value in own.items() if name not in OF_ALL and not name.startswith("status_")}


def logged_means(rows: pa.Table) -> dict[str, float]:
    """The metrics `log/<name>`: mean, over the completions that have it, of what reward functions gave log_metric."""
    values: dict[str, list[float]] = {}
    for row in rows.column("logged").to_pylist():
        for one in row:
            if one["value"] is not None:
                values.setdefault(f"log/{one['name']}", []).append(one["value"])
    return {key: float(np.mean(value)) for key, value in values.items()}


def reward_means(rows: pa.Table) -> dict[str, float]:
    """The metrics `reward/<name>`: mean of each reward function's scores, over the completions that it scored."""
    values: dict[str, list[float]] = {}
    for parts in parts_of(rows):
        for name, value in parts.items():
            values.setdefault(f"reward/{name}", []).append(np.nan if value is None else value)
    return {key: float(np.nanmean(v)) for key, v in values.items() if not np.all(np.isnan(v))}


# The training signal of a run's last steps. There is none where completions are cut off before they answer, where no
# token is trained on, or where all completions get the same reward.

CUT = "length"  # finish_reason of a completion that rollout.max_completion_length cut off
STEPS = 10  # number of steps that are judged together: a few steps of equal rewards are usual
LEAST = 3  # number of steps that suffice where completions are cut off, or where the run has ended
NEARLY_ALL = 0.9  # share of the completions, or groups, of these steps from which on the user is told
MOST = 0.75  # share of groups with equal rewards from which on a task whose accuracy has stopped to rise is learned
# Held-out accuracy of a learned task: most between the last three evaluations, least gain since the first, and least.
FLAT, GAIN, HIGH = 0.02, 0.1, 0.8


class Signal(NamedTuple):
    """The metrics of a step that show whether there is a training signal.

    truncated: share of completions that were cut off. alike: number of groups whose completions all have the same
    reward; None with PPO, which trains on single completions and has no such metric. mean: the mean reward. same:
    whether all completions of the step have the same reward. trained: number of tokens trained on, None if unknown.
    """

    truncated: float
    alike: float | None
    mean: float
    same: bool
    trained: float | None

    @classmethod
    def of(cls, metrics: Mapping[str, float | None]) -> "Signal":
        """The signal of a line of metrics.jsonl, whose values may be None."""
        mean = metrics.get("reward/mean")
        return cls(
            metrics.get("rollout/truncated") or 0.0,
            metrics.get("reward/zero_variance_groups"),
            float("nan") if mean is None else mean,
            metrics.get("reward/std") == 0.0,
            metrics.get("loss/trained_tokens"),
        )


class SignalWatch:
    """Tells the user, in sentences with advice, when the last steps of a run had no training signal."""

    def __init__(self, config: RunConfig) -> None:
        self._groups, self._longest = config.learner.groups_per_step, config.rollout.max_completion_length
        self._masks = config.learner.loss.mask_truncated
        self._last: deque[Signal] = deque(maxlen=STEPS)
        self._accuracy: list[float] = []  # of each evaluation
        self._said: set[str] = set()

    def add(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Takes the metrics of one more step; returns the sentences to print now, each once in a run: after LEAST steps
        that completions are cut off or no token is trained on, after STEPS that completions have equal rewards."""
        self._last.append(Signal.of(metrics))
        self.evaluated(metrics)
        enough = {"cut": LEAST, "untrained": LEAST, "learned": STEPS, "alike": STEPS}
        found = {
            name: sentence
            for name, sentence in self._findings()
            if name not in self._said and len(self._last) >= enough[name]
        }
        self._said |= set(found)
        return [*found.values()]

    def evaluated(self, metrics: Mapping[str, float | None]) -> None:
        """Takes the held-out accuracy among metrics that come without those of a step, if there is one."""
        if (accuracy := metrics.get("eval/accuracy")) is not None:
            self._accuracy.append(accuracy)

    def advice(self) -> list[str]:
        """A sentence for each cause of a missing signal; empty where there is a signal, or no step was taken."""
        return [sentence for _, sentence in self._findings()]

    def _findings(self) -> Iterator[tuple[str, str]]:
        """Pairs of a cause's name and a sentence. Cut-off completions come first: often they cause equal rewards."""
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
        if self._learned(steps):
            yield "learned", self._of_learned(steps, last)
        elif self._alike(steps):
            yield "alike", self._of_alike(steps, last)

    def _learned(self, steps: list[Signal]) -> bool:
        """Whether most groups have equal rewards, and held-out accuracy has risen, is high and rises no more."""
        newest, alike = self._accuracy[-3:], [step.alike for step in steps if step.alike is not None]
        return (
            len(self._accuracy) > len(newest) == 3
            and max(newest) - min(newest) <= FLAT
            and newest[-1] - self._accuracy[0] >= GAIN
            and newest[-1] >= HIGH
            and len(alike) == len(steps)
            and sum(alike) >= MOST * len(steps) * self._groups
        )

    def _of_learned(self, steps: list[Signal], last: str) -> str:
        alike = sum(step.alike or 0.0 for step in steps)
        return (
            f"the task seems learned: in {alike:.0f} of the {len(steps) * self._groups} groups of {last} all "
            f"completions have the same reward, and eval/accuracy has stayed at {self._accuracy[-1]:.3f} for three "
            f"evaluations, from {self._accuracy[0]:.3f} at first; further steps want harder problems (data.path), and "
            "Ctrl-C ends a run with a checkpoint"
        )

    def _alike(self, steps: list[Signal]) -> bool:
        """Whether nearly all groups have equal rewards; in fewer steps than LEAST, and with PPO, whether all
        completions of all steps have the same reward."""
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


# Reward and watches (rewards.watch): how they go together within a step, and whether they part over the steps.


class RewardWatch:
    """Compares the reward with the watches of a run over all of its steps; of a run without watches it says nothing.

    folder: the run's folder, from whose metrics.jsonl the steps before a resume are read.
    """

    def __init__(self, rewards: Sequence[RewardConfig], folder: Path) -> None:
        self._rewards, self._watches = rewards, watches_of(rewards)
        self._steps: list[int] = []
        self._columns: dict[str, list[float | None]] = {}
        self._said: set[tuple[str, str]] = set()
        if self._watches and (file := folder / METRICS_FILE).is_file():
            before = MetricsFile(file)
            for row in before.rows([step for step in before.steps if step]):
                if row:
                    self._take(row["step"], row)
            self._said = {(one.check, one.name) for one in self._findings()}  # told before the resume

    def batch(self, groups: Sequence[pa.Table]) -> dict[str, float]:
        """The metrics `watch/...` of a batch: docs/metrics.md says what they mean."""
        found: dict[str, float] = {}
        if not self._watches:
            return found
        ends = [whole(group) for group in groups]
        rewards, parts = [rewards_of(group) for group in ends], [parts_of(group) for group in ends]
        for name in self._watches:
            values = [np.asarray([row.get(name) for row in rows], float) for rows in parts]
            given = np.asarray([row.get(name) is not None for rows in parts for row in rows])
            both = np.concatenate(rewards) - np.concatenate(values)
            found[f"watch/failed_{name}"] = float((given & np.isnan(np.concatenate(values))).mean())
            if np.isfinite(both).any():
                found[f"watch/gap_{name}"] = float(np.nanmean(both))
            if (together := within_groups(rewards, values)) is not None:
                found[f"watch/correlation_{name}"] = together
        lengths = [sampled_lengths(group).astype(float) for group in groups]
        if (together := within_groups(rewards, lengths)) is not None:
            found["watch/length_correlation"] = together
        return found

    def add(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Takes the metrics of one more step; returns the sentences to print now, each check and watch once."""
        if not self._watches:
            return []
        self._take(step, metrics)
        new = [one for one in self._findings() if (one.check, one.name) not in self._said]
        self._said |= {(one.check, one.name) for one in new}
        return [sentence(one) for one in new]

    def advice(self) -> list[str]:
        """A sentence for each watch that has parted from the reward by the newest step."""
        return [sentence(one) for one in self._findings()]

    def _take(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._steps.append(step)
        for name in columns_of(self._rewards):
            self._columns.setdefault(name, []).append(metrics.get(name))

    def _findings(self) -> list[Finding]:
        return findings(Series.of(self._rewards, self._steps, self._columns)) if self._watches else []


def within_groups(one: Sequence[npt.NDArray[np.float64]], other: Sequence[npt.NDArray[np.float64]]) -> float | None:
    """The correlation of two numbers [G] of the completions of each group, each less its group's mean. Completions that
    lack one are left out; None where either is the same in every group."""
    pairs = [np.stack([x, y])[:, np.isfinite(x) & np.isfinite(y)] for x, y in zip(one, other, strict=True)]
    centred = [pair - pair.mean(axis=1, keepdims=True) for pair in pairs if pair.shape[1]]
    x, y = np.concatenate([np.empty((2, 0)), *centred], axis=1)
    size = float(np.sqrt(np.sum(x**2) * np.sum(y**2)))
    return float(np.sum(x * y) / size) if size > 0 else None


def cut_off(longest: int) -> str:
    """A clause for messages: completions reached rollout.max_completion_length, and what to do."""
    return (
        f"reached rollout.max_completion_length={longest} before they ended, and rewards read what was cut off: raise "
        "it, name what ends an answer in rollout.stop, or reward brevity (length)"
    )


# The guard that stops a run before wrong sampling ruins the policy.

METRIC = "policy/mismatch_k3"
MOST_ABOVE = 5  # number of steps in a row above guard.mismatch_k3 that end the run


class MismatchGuard:
    """Ends a run whose learner and generators disagree: it watches the mean k3 of their logprobs, in nats, which is an
    estimate of KL(sampler || learner).

    With max_staleness > 0, k3 includes the policy's movement since the tokens were sampled. In a resumed run the count
    of steps in a row starts at 0, so that it has MOST_ABOVE steps to show whether a changed setting helped.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._above: list[float] = []

    def check(self, metrics: Mapping[str, float]) -> str | None:
        """Takes a step's metrics; returns the reason to end the run, or None. Skips a step that trained nothing."""
        limit, value = self._config.mismatch_k3, metrics.get(METRIC)
        if limit is None or value is None:
            return None
        self._above = [] if value <= limit else [*self._above, value]  # nan counts as above the limit
        if len(self._above) < MOST_ABOVE:
            return None
        return (
            f"{METRIC}: must be at most guard.mismatch_k3={limit:g}, was {', '.join(f'{v:.3g}' for v in self._above)} "
            f"in {len(self._above)} steps in a row: the learner trains on tokens that its policy would not have "
            "sampled so. Lower learner.learning_rate or max_staleness, or compare policy/mismatch_max_current: above "
            "1e-3 in float32 the engine disagrees with the learner (model.dtype, sampling settings). The run can be "
            "resumed; guard.mismatch_k3=null switches this off"
        )
