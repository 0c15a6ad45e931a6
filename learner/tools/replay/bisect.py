"""gleaner replay --bisect: the step at which a metric broke, and what changed shortly before it."""

import difflib
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from learner.driver.console import escaped
from learner.tools.replay.change_point import ENOUGH, LEAST, Change, change_of, worse
from learner.tools.replay.recorded import ReplayError
from learner.tools.report.run_folder import ReportError, Run, read_run

FEWEST = 3 * LEAST  # values of a metric
SHORTLY = 10  # steps before it
MOST = 10  # other metrics that are shown
NOT_A_CAUSE = ("time/", "memory/", "buffer/", "reward/ms", "rollout/tokens_per_s")


def bisect(folder: Path, metric: str, *, as_json: bool) -> int:
    """Prints it. Exit code: 0, also where nothing broke. Raises ReplayError."""
    try:
        run = read_run(folder, every=True)
    except ReportError as error:
        raise ReplayError(str(error)) from None
    steps, values = _values(run, metric)
    if len(values) < FEWEST:
        raise ReplayError(
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
    """Those after step 0. Raises ReplayError for a metric that the run does not have."""
    if metric not in run.metrics:
        near = difflib.get_close_matches(metric, run.metrics, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; docs/metrics.md has them all"
        raise ReplayError(f"--bisect: must be a metric of the run, got {metric}{hint}")
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
