"""Carries out gleaner replay: it computes the same steps again and compares them with the record, or computes what
other settings would have taught, or finds the step at which a metric changed for the worse (--bisect).
"""

import asyncio
import difflib
import json
import math
import sys
import time
from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster import machine
from cluster.errors import WrongInput
from learner.config import RunConfig
from learner.config.load import absolute
from learner.driver.console import escaped
from learner.driver.failure import RunEnded
from learner.driver.record import POLICIES
from learner.tools.replay import ReplayRequest
from learner.tools.replay.recorded import Learner, Recorded, Step, Taken, load_config, read_recorded
from learner.tools.replay.what_if import (
    Changes,
    Question,
    answer,
    asked_again,
    bound_of,
    changes_of,
    check_possible,
    computes_elsewhere,
    decides,
    own_loss,
    place_for,
    rescored,
    try_on,
)
from learner.tools.report.summary import REPLAY, Run, read_run
from learner.tools.reported import reported
from rollout.env.trajectory import FAULTS

# gleaner replay --bisect: the step at which a metric broke, and which other metrics changed shortly before it.

WINDOW = 8  # number of values whose mean is taken before and after a change; fewer at the ends of the series
LEAST = 2  # least number of values before and after a change
ENOUGH = 5.0  # standard errors of a change, which noise alone reaches in at most one of a hundred series

# Beginnings of the names of metrics that are worse when they fall, when they rise, or of which it cannot be said. A
# metric with none of these names is worse when it rises (see `worse` for the order).
FALLING = ("eval/", "reward/", "policy/entropy", "value/explained_variance", "rollout/tokens_per_s")
RISING = (
    "eval/failed", "eval/unscored", "eval/errors", "reward/failed", "reward/status_", "reward/ms",
    "reward/zero_variance_groups",
)  # fmt: skip
EITHER = ("rollout/completion_length", "reward/std", "loss/total", "value/mean")
# Metrics under env/ that are worse when they rise. Of others it cannot be said: most are the environment's own.
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
    """Returns -1 if the metric is worse when it falls, 1 if it is worse when it rises, and 0 if that is not known.

    known: names of the run's metrics. eval/<name> is the environment's if env/<name> is among them, else a reward
        function's.
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
    """Returns the largest change of level in a direction (0: in either) of at least ENOUGH standard errors; None if
    there is none.

    A change is the difference of the means before and after it, in units of the noise from one value to the next
    (median of the absolute differences), so a slow drift counts little. within: first and last step at which the
    first value after the change may be; None: any.
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
    """Returns the standard deviation of a value, assuming normal noise, from the differences of neighbours. It uses
    their median, which a few jumps do not change, or their mean square if the median is 0. Only a constant series gives
    0."""
    apart = np.abs(np.diff(series))
    return float((np.median(apart) * 1.4826 or np.sqrt(np.mean(apart**2))) / np.sqrt(2))


FEWEST = 3 * LEAST  # least number of values of a metric
SHORTLY = 10  # number of steps before the change in which other metrics may have changed
MOST_BISECTED = 10  # most other metrics that are shown
NOT_A_CAUSE = ("time/", "memory/", "buffer/", "reward/ms", "rollout/tokens_per_s")


def bisect(folder: Path, metric: str, *, as_json: bool) -> int:
    """Prints where the metric broke, and what changed before. Returns the exit code 0, also if nothing broke. Raises
    WrongInput if the run does not have the metric, or too few values of it."""
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
    """Returns the steps and values of a metric, without step 0 (except for eval/ metrics). Raises WrongInput if the run
    does not have the metric."""
    if metric not in run.metrics:
        near = difflib.get_close_matches(metric, run.metrics, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; docs/metrics.md has them all"
        raise WrongInput(f"--bisect: must be a metric of the run, got {metric}{hint}")
    pairs = [(step, value) for step, value in zip(run.steps, run.metrics[metric], strict=True) if value is not None]
    kept = [pair for pair in pairs if pair[0] > 0 or metric.startswith("eval/")]
    return [step for step, _ in kept], [value for _, value in kept]


def _shortly_before(run: Run, metric: str, change: Change) -> dict[str, Change]:
    """Returns other metrics that changed shortly before, in either direction: those that changed most, in the order of
    their steps."""
    found = {}
    for name in run.metrics:
        if name in (metric, "at") or name.startswith(NOT_A_CAUSE):
            continue
        steps, values = _values(run, name)
        one = change_of(steps, values, 0, (change.last - SHORTLY, change.first)) if len(values) >= FEWEST else None
        if one is not None:
            found[name] = one
    most = sorted(found, key=lambda name: -abs(found[name].errors))[:MOST_BISECTED]
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


# The same settings again: does each step lead to the recorded policy and metrics?

NOT_COMPARED = ("time/", "memory/")  # metrics that depend on the machine


@dataclass(frozen=True, slots=True)
class Compared:
    """A step that was computed again, compared with what the run recorded.

    Attributes:
        step: number of the step.
        digests: digest of the resulting policy as recorded (None: the run recorded none), and as computed now.
        metrics: the metrics that differ: name -> value as recorded (None: the run recorded none), and as computed now.
    """

    step: int
    digests: tuple[str | None, str]
    metrics: dict[str, tuple[float | None, float]]

    @property
    def same_policy(self) -> bool:
        """Whether the digests agree, or none was recorded."""
        then, now = self.digests
        return then in (None, now)

    @property
    def same(self) -> bool:
        """Whether digest and metrics are as recorded."""
        return self.same_policy and not self.metrics


async def compared(learner: Learner, recorded: Recorded, steps: Sequence[Step]) -> AsyncGenerator[Compared, None]:
    """Computes the steps again, and yields a comparison of each; before them, if the run recorded its digest, a
    comparison of the policy that the first step begins with."""
    before = steps[0].number - 1
    if (then := recorded.policies.get(before)) is not None:
        yield Compared(before, (then.sha256, await learner.begun_with(steps)), {})
    async for taken in learner.take(steps):
        yield compare(taken)


def compare(taken: Taken) -> Compared:
    """Compares one step with its record. A metric that is not finite is not in metrics.jsonl, and counts as equal."""
    then = taken.step.metrics
    differing = {
        name: (then.get(name), value)
        for name, value in taken.metrics.items()
        if not name.startswith(NOT_COMPARED)
        and then.get(name) != value
        and not (name not in then and not math.isfinite(value))
    }
    policy = taken.step.policy
    return Compared(taken.step.number, (policy.sha256 if policy else None, taken.sha256), differing)


# Output in a terminal.

DIGITS = 12  # digits of a digest that are shown
BESIDE = ("loss/total", "loss/grad_norm", "policy/mismatch_k3", "policy/mismatch_max", "policy/clip_fraction")
MOST = 12  # most differing metrics that are shown


def show_step(found: Compared) -> None:
    """Prints a line about a step."""
    then, now = found.digests
    if then is None:
        said = "the same metrics; the run recorded no digest" if found.same else "other metrics"
    elif found.same_policy:
        said = f"the same digest {now[:DIGITS]}" + ("" if found.same else ", but other metrics")
    else:
        said = f"another digest, {now[:DIGITS]}, where the run recorded {then[:DIGITS]}"
    print(f"step {found.step}: {said}", flush=True)


def show_same(recorded: Recorded, steps: Sequence[Step], seconds: float) -> None:
    """Prints the summary after steps that were all computed as recorded."""
    took = sum(one.metrics.get("time/step", 0.0) for one in steps)
    known = [one for one in steps if one.policy is not None]
    print(f"{len(steps)} steps in {seconds:.1f} s; the run took {took:.1f} s for them, without its start and its end")
    if len(known) == len(steps):
        print("every policy has the digest that the run recorded")
    else:
        print(
            f"{len(known)} of {len(steps)} steps have a digest in {recorded.folder / POLICIES}, which earlier versions "
            "of gleaner did not write; of the others all metrics agree"
        )


def show_difference(recorded: Recorded, found: Compared) -> None:
    """Prints the metrics that differ, the largest relative difference first, and possible reasons."""
    table = Table("metric", "recorded", "now")
    rows = sorted(found.metrics.items(), key=lambda row: -_relative(*row[1]))
    for name, (then, now) in rows[:MOST]:
        table.add_row(Text(escaped(name)), "none" if then is None else f"{then:.9g}", f"{now:.9g}")
    if rows:
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True)
        console.print(table)
    if len(rows) > MOST:
        print(f"and {len(rows) - MOST} more")
    print(
        f"step {found.step} is the first that differs: its rollouts were changed, or its settings when the run was "
        "resumed, or it was computed with something else, as by several learner ranks with learner.reduce=fast "
        "(docs/replay.md)"
    )
    if (policy := recorded.policies.get(found.step)) is not None:
        print(f"the run computed with {', '.join(f'{k} {v}' for k, v in policy.arithmetic._asdict().items())}")


def show_other(taken: Taken, *, rescored: bool) -> None:
    """Prints a line about a step with other settings: its metrics, and the recorded ones in parentheses."""
    names = (*(("reward/mean",) if rescored else ()), *BESIDE)
    pairs = [(name, taken.metrics.get(name), taken.step.metrics.get(name)) for name in names]
    told = [f"{name} {_number(now)} ({_number(then)})" for name, now, then in pairs if now is not None]
    print(f"step {taken.step.number}: {'  '.join(told)}", flush=True)


def show_far(step: int | None, bound: float) -> str:
    """Returns a sentence on how far the result can be trusted. step: the first step beyond `bound`; None: there is
    none."""
    if step is None:
        return (
            f"in every step the policy was within {bound:g} nats a token of the one that sampled (policy/mismatch_k3)"
        )
    return (
        f"from step {step} on the policy was more than {bound:g} nats a token from the one that sampled "
        "(policy/mismatch_k3): it would have written other completions, and what comes after says little about a run "
        "(docs/replay.md)"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _relative(then: float | None, now: float) -> float:
    return float("inf") if then is None else abs(now - then) / max(abs(then), abs(now), 1e-30)


def run(asked: ReplayRequest) -> int:
    """Carries out the command. Returns the exit code: 0; 1 if something differs or failed; 2 for a wrong input."""
    codes: list[int] = []
    return reported(lambda: codes.append(_replay(asked)), failed=(RunEnded,)) or codes[0]


def _replay(asked: ReplayRequest) -> int:
    if asked.bisect is not None:
        if asked.overrides or asked.output is not None or asked.start or asked.to is not None:
            raise WrongInput(
                "--bisect: looks at what the run recorded and takes no step; leave out other settings, --from, --to "
                "and --output"
            )
        return bisect(asked.run, asked.bisect, as_json=asked.as_json)
    recorded = read_recorded(asked.run)
    config = absolute(load_config(asked.run, asked.overrides or ()))
    changes = asked_again(changes_of(absolute(recorded.config), config), asked.overrides or (), recorded.config)
    check_possible(changes, recorded.config, config, asked.start)
    steps, state = recorded.chosen(asked.start, asked.to), recorded.checkpoint(asked.start)
    recorded.check_inputs(own_loss=not own_loss(changes))
    machine.sleeping_threads(config.cluster.cpus.learner)  # the number of threads of a run's learner
    if decides(changes) or asked.output is not None:
        return _what_if(asked, recorded, config, changes, steps, state)
    learner = Learner(config, state, as_recorded=not computes_elsewhere(changes))
    return asyncio.run(_again(asked, recorded, steps, learner))


async def _again(asked: ReplayRequest, recorded: Recorded, steps: Sequence[Step], learner: Learner) -> int:
    """Computes steps with the same settings, up to the first difference. Returns the exit code."""
    started = time.perf_counter()
    async with aclosing(compared(learner, recorded, steps)) as found:
        async for one in found:
            if not asked.as_json:
                show_step(one)
            if not one.same:
                break
    seconds = time.perf_counter() - started
    if asked.as_json:
        summary = {"from": asked.start, "to": steps[-1].number, "same": one.same, "seconds": round(seconds, 1)}
        print(json.dumps(summary | ({} if one.same else {"first_difference": asdict(one)}), indent=2))
    elif one.same:
        show_same(recorded, steps, seconds)
    else:
        show_difference(recorded, one)
    return 0 if one.same else 1


def _what_if(
    asked: ReplayRequest,
    recorded: Recorded,
    config: RunConfig,
    changes: Changes,
    steps: Sequence[Step],
    state: Path | None,
) -> int:
    """Computes steps with other settings, and writes them into a new folder. Returns the exit code."""
    if scores := rescored(changes):
        try_on(config, steps[0].groups(config.learner.groups_per_step)[0][0])
    place = place_for(asked.run, asked.output)
    named = load_config(asked.run, [*(asked.overrides or ()), f"name={place.name}", f"output_dir={place.parent}"])
    question = Question(asked.run, absolute(named), changes, steps, state, place)
    far = asyncio.run(answer(question, lambda taken: None if asked.as_json else show_other(taken, rescored=scores)))
    bound = bound_of(config)
    if asked.as_json:
        facts = json.loads((place / REPLAY).read_text())
        print(json.dumps({"folder": str(place)} | facts | {"bound": bound, "far_from_step": far}, indent=2))
    else:
        print(show_far(far, bound))
        print(f"folder   {place}\ncompare  gleaner report {place} --against {asked.run}")
        print(f"score    gleaner eval --run {place}")
    return 0
