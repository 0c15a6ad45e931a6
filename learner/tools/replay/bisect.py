"""gleaner replay --bisect: the step at which a metric broke, and what changed shortly before it."""

import difflib
import json
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.errors import WrongInput
from learner.driver.console import escaped
from learner.tools.report.run_folder import Run, read_run
from rollout.env.trajectory import FAULTS

# Where a series of noisy values changes its level for the worse. Pure numpy.

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


FEWEST = 3 * LEAST  # values of a metric
SHORTLY = 10  # steps before it
MOST = 10  # other metrics that are shown
NOT_A_CAUSE = ("time/", "memory/", "buffer/", "reward/ms", "rollout/tokens_per_s")


def bisect(folder: Path, metric: str, *, as_json: bool) -> int:
    """Prints it. Exit code: 0, also where nothing broke. Raises WrongInput."""
    run = read_run(folder, every=True)
    steps, values = _values(run, metric)
    if len(values) < FEWEST:
        raise WrongInput(
            f"--bisect: needs at least {FEWEST} values of {metric}, and {folder} has {len(values)}; wait for more steps"
        )
    direction = worse(metric, run.metrics)
    change = change_of(steps, values, direction)
    others = {} if change is None else _shortly_before(run, metric, change)
    if as_json:
        told = {name: asdict(one) for name, one in others.items()}
        print(json.dumps({"metric": metric, "change": change and asdict(change), "others": told}, indent=2))
    elif change is None:
        way = {-1: "fell", 0: "changed", 1: "rose"}[direction]
        print(
            f"{metric} has {len(values)} values from {min(values):.4g} to {max(values):.4g}, and at no step it {way} "
            f"by {ENOUGH:g} standard errors; gleaner report {folder} shows its curve"
        )
    else:
        _show(folder, metric, change, others)
    return 0


def _values(run: Run, metric: str) -> tuple[list[int], list[float]]:
    """Those after step 0. Raises WrongInput for a metric that the run does not have."""
    if metric not in run.metrics:
        near = difflib.get_close_matches(metric, run.metrics, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; docs/metrics.md has them all"
        raise WrongInput(f"--bisect: must be a metric of the run, got {metric}{hint}")
    pairs = [(step, value) for step, value in zip(run.steps, run.metrics[metric], strict=True) if value is not None]
    kept = [pair for pair in pairs if pair[0] > 0 or metric.startswith("eval/")]
    return [step for step, _ in kept], [value for _, value in kept]


def _shortly_before(run: Run, metric: str, change: Change) -> dict[str, Change]:
    """Other metrics that changed then, either way: those that changed most, in the order of their steps."""
    found = {}
    for name in run.metrics:
        if name in (metric, "at") or name.startswith(NOT_A_CAUSE):
            continue
        steps, values = _values(run, name)
        one = change_of(steps, values, 0, (change.last - SHORTLY, change.first)) if len(values) >= FEWEST else None
        if one is not None:
            found[name] = one
    most = sorted(found, key=lambda name: -abs(found[name].errors))[:MOST]
    return {name: found[name] for name in sorted(most, key=lambda name: found[name].first)}


def _show(folder: Path, metric: str, change: Change, others: dict[str, Change]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{metric} {_said(change)} {_when(change)}", markup=False)
    if others:
        table = Table("what else", "when", "how")
        for name, one in others.items():
            table.add_row(Text(escaped(name)), _when(one), _said(one))
        console.print(table)
    console.print(f"what it wrote   gleaner rollouts show {folder} --step {change.first} --worst", markup=False)
    if change.first - change.last > 1:
        between = (change.first + change.last) // 2
        console.print(
            f"steps between   gleaner replay {folder} --to {between} --output at-{between} && "
            f"gleaner eval --run at-{between}",
            markup=False,
        )


def _when(change: Change) -> str:
    return f"at step {change.first}" if change.first - change.last == 1 else f"in steps {change.last} to {change.first}"


def _said(change: Change) -> str:
    way = "fell" if change.errors < 0 else "rose"
    return f"{way} from {change.before:.4g} to {change.after:.4g} ({abs(change.errors):.1f} standard errors)"
