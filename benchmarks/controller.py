"""The controller's own cost from 1 to 64 rollout workers, without a model, Ray or a GPU (benchmarks/fake_house.py).

    PYTHONPATH=. .venv/bin/python -m benchmarks.controller [--workers 1 2 4 ...]

Real: Loop, Producer, Buffer, Latest, Cursor, Timeline, ledger, metrics. Not there: Ray's share of a call (see
benchmarks.pipes), generation, training. Controller milliseconds are CPU time of the whole process less what workers and
trainer spent in their own code (they copy a ready group and answer the probe), so timers of their waits are in them.
Ideal throughput is what the workers do when they never wait: at_once / seconds, summed over the workers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, RESULTS, as_table, conditions, save, under
from benchmarks.fake_house import House

GROUPS_PER_STEP = 64
AT_ONCE = 2  # groups that a worker runs at a time; of 8 workers, each does the work of 8
SLOW = 10.0
PAGE = resource.getpagesize()


@dataclass(slots=True)
class Mark:
    """The state of the process at the end of a step."""

    wall: float
    cpu: float
    away: float
    resident: int
    groups: Counter[int]

    @classmethod
    def of(cls, house: House) -> Mark:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        away = house.away
        return cls(time.perf_counter(), time.process_time(), away.clock.seconds, resident, away.groups.copy())


def measure(
    workers: Sequence[float], at_once: int, max_staleness: int, steps: int, trainer_seconds: float = 0.0,
    late: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One run; `workers`: seconds of a group of each; `late`: the same of one that joins when the clock starts.

    The clock starts when what fills the buffer at the beginning is used up, and runs for `steps` optimizer steps.
    """
    warm = 2 * (1 + max_staleness)
    marks: dict[int, Mark] = {}

    def on_step(step: int) -> None:
        if step in (warm, warm + steps):
            marks[step] = Mark.of(house)
        if step == warm and late is not None:
            house.join(late)

    with tempfile.TemporaryDirectory() as folder:
        house = House(
            Path(folder), workers, at_once, GROUPS_PER_STEP, max_staleness, warm + steps, on_step, trainer_seconds
        )
        asyncio.run(house.run())
    first, last = marks[warm], marks[warm + steps]
    groups, wall = steps * GROUPS_PER_STEP, last.wall - first.wall
    done = last.groups - first.groups
    all_workers = [*workers] if late is None else [*workers, late]
    row = {
        "workers": len(all_workers),
        "max_staleness": max_staleness,
        "groups": groups,
        "seconds": wall,
        "groups_per_s": groups / wall,
        "ideal_groups_per_s": sum(at_once / seconds for seconds in all_workers),
        "controller_ms": 1e3 * (last.cpu - first.cpu - last.away + first.away) / groups,
        "away_ms": 1e3 * (last.away - first.away) / groups,
        "resident_growth_bytes": (last.resident - first.resident) / groups,
        "share_of_last_worker": done[len(all_workers) - 1] / max(done.total(), 1),
        "share_of_first_worker": done[0] / max(done.total(), 1),
    }
    print({key: round(value, 4) for key, value in row.items()}, flush=True)
    return row


def scaling(workers: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    return [measure([seconds] * count, AT_ONCE, 3, steps=max(4, min(16, 2 * count))) for count in workers]


def uneven(seconds: float) -> dict[str, dict[str, Any]]:
    """Eight workers, of which one is slow, or late; and 64 that the learner holds up. Half of the groups/s of 64."""
    quick, at_once = [2 * seconds] * 7, 8 * AT_ONCE
    found = {"8 workers alike": measure([*quick, quick[0]], at_once, 3, 16)}
    for staleness in (1, 3, 7):
        name = f"the first of 8 is {SLOW:g} times slower, staleness {staleness}"
        found[name] = measure([SLOW * quick[0], *quick], at_once, staleness, 2 * (1 + staleness))
    found["the last of 8 joins when the clock starts"] = measure(quick, at_once, 3, 16, late=quick[0])
    found["64 workers, the learner is slower than they"] = measure([seconds] * 64, AT_ONCE, 3, 16, 2 * seconds)
    return found


def picture(rows: Sequence[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    cost, rate = figure.subplots(1, 2)
    counts = [row["workers"] for row in rows]
    cost.plot(counts, [row["controller_ms"] for row in rows], "o-", label="controller")
    cost.axhline(1.0, color="black", linestyle="--", label="bound")
    cost.set(xscale="log", xlabel="rollout workers", ylabel="CPU milliseconds per group", ylim=(0, None))
    rate.plot(counts, [row["groups_per_s"] for row in rows], "o-", label="measured")
    rate.plot(counts, [row["ideal_groups_per_s"] for row in rows], "k--", label="workers never wait")
    rate.set(xscale="log", yscale="log", xlabel="rollout workers", ylabel="groups per second")
    for axes in (cost, rate):
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.legend()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(file, dpi=140)


def line(name: str, row: dict[str, Any]) -> list[str]:
    return [
        name, f"{row['controller_ms']:.2f}", f"{row['groups_per_s']:.0f}", f"{row['ideal_groups_per_s']:.0f}",
        f"{row['groups_per_s'] / row['ideal_groups_per_s']:.2f}", f"{row['resident_growth_bytes'] / 1024:.1f}",
        f"{row['share_of_first_worker']:.1%}", f"{row['share_of_last_worker']:.1%}",
    ]  # fmt: skip


def report(rows: list[dict[str, Any]], others: dict[str, dict[str, Any]], told: dict[str, Any]) -> str:
    header = ["", "controller CPU-ms per group", "groups/s", "ideal", "of ideal", "KiB grown per group",
              "share of first worker", "of last"]  # fmt: skip
    lines = [line(f"{row['workers']} workers", row) for row in rows] + [line(*other) for other in others.items()]
    costs = [row["controller_ms"] for row in rows]
    return (
        f"# The controller, {rows[0]['workers']} to {rows[-1]['workers']} workers on no model\n\n"
        f"{as_table(header, lines)}\n\n"
        f"Highest cost over lowest: {max(costs) / min(costs):.2f}. A worker runs {AT_ONCE} groups at a time (of 8: "
        f"{8 * AT_ONCE}); {GROUPS_PER_STEP} groups a step, staleness 3 where nothing else is said. "
        "KiB grown: resident memory of the process from the first to the last measured step, by groups trained on.\n\n"
        f"Conditions: {under(told, 'CPU time, of this process alone')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=0.2, help="of a group in a worker")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    rows = scaling(options.workers, options.seconds)
    others = uneven(options.seconds)
    picture(rows, RESULTS / "controller.png")
    save("controller", {"conditions": told, "rows": rows, "others": others}, report(rows, others, told))


if __name__ == "__main__":
    main()
