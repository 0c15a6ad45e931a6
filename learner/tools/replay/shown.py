"""A replay in a terminal."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from learner.driver.console import escaped
from learner.driver.record import POLICIES
from learner.tools.replay.recorded import Recorded, Step
from learner.tools.replay.same import Compared
from learner.tools.replay.taking import Taken

DIGITS = 12  # of a digest
BESIDE = ("loss/total", "loss/grad_norm", "policy/mismatch_k3", "policy/mismatch_max", "policy/clip_fraction")
MOST = 12  # metrics that are shown beside each other


def step(found: Compared) -> None:
    """One line."""
    then, now = found.digests
    if then is None:
        said = "the same metrics; the run recorded no digest" if found.same else "other metrics"
    elif found.same_policy:
        said = f"the same digest {now[:DIGITS]}" + ("" if found.same else ", but other metrics")
    else:
        said = f"another digest, {now[:DIGITS]}, where the run recorded {then[:DIGITS]}"
    print(f"step {found.step}: {said}", flush=True)


def same(recorded: Recorded, steps: Sequence[Step], seconds: float) -> None:
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


def difference(recorded: Recorded, found: Compared) -> None:
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


def other(taken: Taken, *, rescored: bool) -> None:
    """One line: with other settings, beside what was recorded."""
    names = (*(("reward/mean",) if rescored else ()), *BESIDE)
    pairs = [(name, taken.metrics.get(name), taken.step.metrics.get(name)) for name in names]
    told = [f"{name} {_number(now)} ({_number(then)})" for name, now, then in pairs if now is not None]
    print(f"step {taken.step.number}: {'  '.join(told)}", flush=True)


def far(step: int | None, bound: float) -> str:
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
