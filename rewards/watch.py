"""Finds in the means of a run's steps that its reward rises and a check that is not trained on does not follow.

A reward that is optimised ceases to measure what it was meant to (Goodhart; Gao et al., 2210.10760, have the curves:
the proxy rises on, the gold reward falls). So a run may score a second check that it never trains on, a watch
(rewards.config, `watch: true`). This module compares the two over time. It reads only means of steps, which
metrics.jsonl has, so that the console and a report come to the same findings, also of a resumed run.

Two windows of steps are compared, an earlier one and the newest. The noise of a mean is taken from differences of
neighbouring steps, in which a trend hardly counts. Each step compares again, and with many earlier windows, so the
thresholds are meant for whole runs: `python -m benchmarks hacking_power` measures on simulated ones how often each
check speaks in honest runs, and under exploits. Only what speaks there in less than one honest run of a hundred (upper
95 % bound) is here; what does not pass, such as growing completions, is measured there alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rewards.config import RewardConfig, resolved_names, trained_on, watches_of

FALLS, STALLS = "falls", "stalls"
CHECKS = {FALLS: "the reward rises, the watch falls", STALLS: "the reward rises, the watch does not follow"}

LEAST = 10  # steps of a window, at least
SHARE = 5  # the windows grow with the run, to the fifth part of its steps
ERRORS = 4.5  # standard errors by which a mean must differ
RISE = 0.25  # of the rewards' standard deviation within a step: the least rise of the reward
FOLLOWS = 0.1  # a series follows another's rise if it rises, in units of its own noise, by this share of it
ALIVE = 12.0  # standard errors by which a watch must be above 0 before it can stand still: some hardly ever pass
ROUNDING = 1e-9  # of the largest value: the least noise

Column = Sequence[float | None]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Series:
    """Means of the steps of a run. Letters: S steps.

    steps: [S] their numbers, ascending. reward: [S] mean reward. deviation: [S] its standard deviation within the
    step. main: [S] the part of the reward with the largest weight, times that weight. watches: [S] mean of each watch,
    by name. nan where a step has no such value.
    """

    steps: npt.NDArray[np.int64]
    reward: Floats
    deviation: Floats
    main: Floats
    watches: Mapping[str, Floats]

    @classmethod
    def of(cls, rewards: Sequence[RewardConfig], steps: Sequence[int], metrics: Mapping[str, Column]) -> "Series":
        """The series of a run's metrics: name -> values of these steps, None where a step has none. Step 0, an
        evaluation, has no rewards."""

        def column(name: str) -> Floats:
            return np.asarray(metrics.get(name) or [None] * len(steps), float)

        reward, watches = column("reward/mean"), watches_of(rewards)
        trained = sorted(trained_on(rewards), key=lambda one: -one.weight)
        main = trained[0].weight * column(f"reward/{trained[0].name}") if len(trained) > 1 else reward
        found = {name: column(f"reward/{name}") for name in watches}
        return cls(np.asarray(steps, np.int64), reward, column("reward/std"), main, found)


def columns_of(rewards: Sequence[RewardConfig]) -> list[str]:
    """Names of the metrics that Series.of reads."""
    return ["reward/mean", "reward/std", *(f"reward/{name}" for name in resolved_names(rewards))]


class Finding(NamedTuple):
    """Reward and watch that part. check: one of CHECKS. name: of the watch. early, late: first and last step of both
    windows. reward, watch: means in the early and the late window; of STALLS `reward` is its main part, weighted."""

    check: str
    name: str
    early: tuple[int, int]
    late: tuple[int, int]
    reward: tuple[float, float]
    watch: tuple[float, float]


def findings(series: Series) -> list[Finding]:
    """What the steps so far show: for each watch at most one finding, of the windows with the largest rise. A watch
    that falls does not follow either; that it falls is then said.

    Many honest runs learn a form first, for which a smaller part of the reward pays, and the watch waits meanwhile. So
    it must follow the main part alone.
    """
    found = []
    for name, watch in series.watches.items():
        whole, main = (Pair.of(series.steps, one, watch, series.deviation) for one in (series.reward, series.main))
        if (falls := whole.falls).any():
            found.append(Finding(FALLS, name, *whole.windows(falls)))
        elif (stalls := main.stalls & (main.first[1] > ALIVE * main.error[1] / np.sqrt(2))).any():
            found.append(Finding(STALLS, name, *main.windows(stalls)))
    return found


@dataclass(frozen=True)
class Pair:
    """A series that rises and one that should follow, compared in W pairs of windows: the newest, and each earlier one,
    half a window apart.

    steps: [S] numbers of the steps that have both values. starts: [W] index at which each early window begins. size:
    steps of a window. first, last: means [2, W] of both series in the early window, [2, 1] in the newest. noise: [2, 1]
    standard deviation of a step's mean. unit: what the first series must rise by, times RISE.
    """

    steps: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    size: int
    first: Floats
    last: Floats
    noise: Floats
    unit: Floats

    @classmethod
    def of(cls, steps: npt.NDArray[np.int64], rising: Floats, other: Floats, unit: Floats) -> "Pair":
        """unit: [S] the mean of what is known of it counts."""
        known = np.isfinite(rising) & np.isfinite(other) & np.isfinite(unit)
        both = np.stack([rising[known], other[known]])
        count = both.shape[1]
        size = max(LEAST, count // SHARE)
        starts = np.arange(0, count - 2 * size + 1, size // 2)
        if not len(starts):
            nothing = np.empty((2, 0))
            return cls(steps[known], starts, size, nothing, nothing, nothing, np.empty(0))
        sums = np.cumsum(np.pad(both, ((0, 0), (1, 0))), axis=1)
        first = (sums[:, starts + size] - sums[:, starts]) / size
        noise = np.sqrt(np.mean(np.diff(both, axis=1) ** 2, axis=1, keepdims=True) / 2)
        noise = np.maximum(noise, ROUNDING * np.abs(both).max(axis=1, keepdims=True))
        last = both[:, -size:].mean(axis=1, keepdims=True)
        return cls(steps[known], starts, size, first, last, noise, np.mean(unit[known], keepdims=True))

    @property
    def _change(self) -> Floats:
        return self.last - self.first

    @property
    def error(self) -> Floats:
        """[2, 1] standard error of the difference of two windows."""
        return np.asarray(self.noise * np.sqrt(2 / self.size))

    @property
    def rises(self) -> Flags:
        """[W] whether the first series rose, by ERRORS and by RISE units."""
        change = self._change[0]
        return np.asarray((change > ERRORS * self.error[0]) & (change >= RISE * self.unit))

    # The shares are multiplied out, since a series that never moves has no noise.

    @property
    def _share(self) -> Floats:
        """[W] the change of the second series, times the noise of the first, by which it follows the rise."""
        return np.asarray(FOLLOWS * self._change[0] * self.noise[1])

    @property
    def falls(self) -> Flags:
        """[W] whether the first series rose, and the second fell."""
        change = self._change[1]
        fell = (change < -ERRORS * self.error[1]) & (change * self.noise[0] <= -self._share)
        return np.asarray(fell & self.rises)

    @property
    def stalls(self) -> Flags:
        """[W] whether the first series rose, and the second, two standard errors aside, did not follow."""
        return np.asarray(((self._change[1] + 2 * self.error[1]) * self.noise[0] <= self._share) & self.rises)

    def windows(
        self, there: Flags
    ) -> tuple[tuple[int, int], tuple[int, int], tuple[float, float], tuple[float, float]]:
        """Of the windows that are `there`, those with the largest rise: first and last step of the early and of the
        newest; means of both series, early and late."""
        chosen = int(np.argmax(np.where(there, self._change[0], -np.inf)))
        start, steps = int(self.starts[chosen]), self.steps
        early = int(steps[start]), int(steps[start + self.size - 1])
        (rising, other), (now, then) = self.first[:, chosen].tolist(), self.last[:, 0].tolist()
        return early, (int(steps[-self.size]), int(steps[-1])), (rising, now), (other, then)


def sentence(found: Finding) -> str:
    """The finding in words, with what to do."""
    (start, end), (begin, now) = found.early, found.late
    told = "{:.3g} to {:.3g}".format
    what = "has fallen" if found.check == FALLS else "has not followed"
    return (
        f"from steps {start}-{end} to steps {begin}-{now} the reward has risen from {told(*found.reward)}, and the "
        f"watch {found.name!r} {what} (from {told(*found.watch)}): the policy may have found answers that are paid and "
        "not meant; read some of both (gleaner rollouts show RUN), mend the reward and begin anew (docs/rewards.md, "
        "A watch)"
    )
