"""What gleaner replay is asked for: the same steps again, what other settings would have taught, or the step at which a
series of metrics changed for the worse.
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
from rollout.env.play import FAULTS

# gleaner replay --bisect: the step at which a metric broke, and what changed shortly before it.

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
MOST_BISECTED = 10  # other metrics that are shown
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


# The same settings again: whether each step leads to the policy that it led to, and to the same metrics.

NOT_COMPARED = ("time/", "memory/")  # of the machine, not of the step


@dataclass(frozen=True, slots=True)
class Compared:
    """A step beside what the run recorded.

    Attributes:
        digests: of the policy that it led to: as recorded (None: the run recorded none), and now.
        metrics: those that differ: name -> value as recorded (None: none), and now.
    """

    step: int
    digests: tuple[str | None, str]
    metrics: dict[str, tuple[float | None, float]]

    @property
    def same_policy(self) -> bool:
        """Whether the digests agree, as far as there are two."""
        then, now = self.digests
        return then in (None, now)

    @property
    def same(self) -> bool:
        """Whether everything is as it was recorded."""
        return self.same_policy and not self.metrics


async def compared(learner: Learner, recorded: Recorded, steps: Sequence[Step]) -> AsyncGenerator[Compared, None]:
    """What the steps begin with, if the run recorded its digest; then each step, as it was taken again."""
    before = steps[0].number - 1
    if (then := recorded.policies.get(before)) is not None:
        yield Compared(before, (then.sha256, await learner.begun_with(steps)), {})
    async for taken in learner.take(steps):
        yield compare(taken)


def compare(taken: Taken) -> Compared:
    """One step. What was not finite is not in metrics.jsonl."""
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


# A replay in a terminal.

DIGITS = 12  # of a digest
BESIDE = ("loss/total", "loss/grad_norm", "policy/mismatch_k3", "policy/mismatch_max", "policy/clip_fraction")
MOST = 12  # metrics that are shown beside each other


def show_step(found: Compared) -> None:
    """One line."""
    then, now = found.digests
    if then is None:
        said = "the same metrics; the run recorded no digest" if found.same else "other metrics"
    elif found.same_policy:
        said = f"the same digest {now[:DIGITS]}" + ("" if found.same else ", but other metrics")
    else:
        said = f"another digest, {now[:DIGITS]}, where the run recorded {then[:DIGITS]}"
    print(f"step {found.step}: {said}", flush=True)


def show_same(recorded: Recorded, steps: Sequence[Step], seconds: float) -> None:
    """After steps that all came out as they were recorded."""
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
    """What differs, the largest relative difference first, and what may be the reason."""
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
    """One line: with other settings, beside what was recorded."""
    names = (*(("reward/mean",) if rescored else ()), *BESIDE)
    pairs = [(name, taken.metrics.get(name), taken.step.metrics.get(name)) for name in names]
    told = [f"{name} {_number(now)} ({_number(then)})" for name, now, then in pairs if now is not None]
    print(f"step {taken.step.number}: {'  '.join(told)}", flush=True)


def show_far(step: int | None, bound: float) -> str:
    """How far the answer can be believed."""
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
    """Exit code: 0; 1 if something differs, or failed on the way; 2 if something given is wrong."""
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
    machine.sleeping_threads(config.cluster.cpus.learner)  # as many as in a run's learner
    if decides(changes) or asked.output is not None:
        return _what_if(asked, recorded, config, changes, steps, state)
    learner = Learner(config, state, as_recorded=not computes_elsewhere(changes))
    return asyncio.run(_again(asked, recorded, steps, learner))


async def _again(asked: ReplayRequest, recorded: Recorded, steps: Sequence[Step], learner: Learner) -> int:
    """The same settings, up to the first difference."""
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
    """Other settings, into a folder of their own."""
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
