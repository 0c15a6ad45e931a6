"""A replay in a terminal."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from learner.driver.step_record import POLICIES
from learner.tools.replay.recorded import Recorded, Step
from learner.tools.replay.same import Compared

DIGITS = 12  # of a digest
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
        table.add_row(name, "none" if then is None else f"{then:.9g}", f"{now:.9g}")
    if rows:
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True)
        console.print(table)
    if len(rows) > MOST:
        print(f"and {len(rows) - MOST} more")
    print(
        f"step {found.step} is the first that differs: its rollouts were changed, or its settings when the run was "
        "resumed, or it was computed with something else (docs/replay.md)"
    )
    if (policy := recorded.policies.get(found.step)) is not None:
        print(f"the run computed with {', '.join(f'{k} {v}' for k, v in policy.arithmetic._asdict().items())}")


def _relative(then: float | None, now: float) -> float:
    return float("inf") if then is None else abs(now - then) / max(abs(then), abs(now), 1e-30)
