"""Where a series of noisy values changes its level for the worse. Pure numpy."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.env.trajectory import FAULTS

WINDOW = 8  # values on each side, fewer at the ends
LEAST = 2  # of which there must be so many
ENOUGH = 5.0  # standard errors, which noise alone reaches in at most one of a hundred series

# Which way is worse; the first that fits. Where nothing does, up is.
FALLING = ("eval/", "reward/", "policy/entropy", "value/explained_variance", "rollout/tokens_per_s")
RISING = (
    "eval/failed", "eval/unscored", "eval/errors", "reward/failed", "reward/status_", "reward/ms",
    "reward/zero_variance_groups",
)  # fmt: skip
EITHER = ("rollout/completion_length", "reward/std", "loss/total", "value/mean")
# Of env/; nobody can say it of its other names, most of which are the environment's own.
ENV_RISING = ("malformed", "seconds", "errors", *(f"outcome_{fault}" for fault in FAULTS))


@dataclass(frozen=True, slots=True)
class Change:
    """A change of level between two values that follow each other.

    Attributes:
        last, first: steps of the last value before it, and of the first after it.
        before, after: means over WINDOW values on each side.
        errors: the difference in standard errors, negative where the level fell.
    """

    last: int
    first: int
    before: float
    after: float
    errors: float


def worse(metric: str, known: Container[str]) -> int:
    """-1: the metric is worse where it falls, 1: where it rises, 0: nobody can say.

    known: the metrics of the run, which tell an environment's eval/<name> from a reward function's: by its env/<name>.
    """
    part, _, name = metric.partition("/")
    own = f"env/{name}" in known or (name.startswith("outcome_") and f"reward/{name}" not in known)
    if part == "env" or (part == "eval" and own):
        return 1 if name in ENV_RISING else 0
    if metric.startswith(RISING):
        return 1
    if metric.startswith(EITHER):
        return 0
    return -1 if metric.startswith(FALLING) else 1


def change_of(
    steps: Sequence[int], values: Sequence[float], direction: int, within: tuple[int, int] | None = None
) -> Change | None:
    """The largest change in that direction (0: in either) of at least ENOUGH standard errors; None where there is none.

    It is the difference of the means of the values before and after, by the noise from one value to the next (median
    of the absolute differences), so a slow drift counts little. within: steps in which the first value after it lies.
    """
    series = np.asarray(values, dtype=np.float64)
    noise = _noise(series)
    found: list[Change] = []
    for place in range(LEAST, len(series) - LEAST + 1):
        if within is not None and not within[0] <= steps[place] <= within[1]:
            continue
        before, after = series[max(place - WINDOW, 0) : place], series[place : place + WINDOW]
        error = noise * np.sqrt(1 / len(before) + 1 / len(after))
        gap = float(after.mean() - before.mean())
        if gap != 0 and (direction == 0 or gap * direction > 0):
            means = float(before.mean()), float(after.mean())
            found.append(Change(steps[place - 1], steps[place], *means, float(gap / error)))
    largest = max(found, key=lambda change: abs(change.errors), default=None)
    return largest if largest is not None and abs(largest.errors) >= ENOUGH else None


def _noise(series: npt.NDArray[np.float64]) -> float:
    """The standard deviation of a value, were it normal, from the differences of neighbours: their median, which a few
    jumps do not move, and their mean square where most values are equal. 0 for a constant series alone."""
    apart = np.abs(np.diff(series))
    return float((np.median(apart) * 1.4826 or np.sqrt(np.mean(apart**2))) / np.sqrt(2))
