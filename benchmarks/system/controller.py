"""The controller's own cost from 1 to 64 rollout workers, without a model, Ray or a GPU
(benchmarks/system/fake_run.py).

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.controller [--workers 1 2 4 ...]

Real: Loop, Producer, Buffer, PolicySlot, Cursor, Timeline, ledger, metrics. Not there: Ray's share of a call (see
benchmarks.engine.pipes), generation, training. Controller milliseconds are CPU time of the whole process less what
workers and trainer spent in their own code (they copy a ready group and answer the probe), so timers of their waits
are in them. Ideal throughput is what the workers do when they never wait: at_once / seconds, summed over the workers.

A process that wakes up ten times a second finds its caches cold, and takes several times the CPU time for the same
work. Hence the workers are counted twice: with groups of the same seconds, so that 64 of them make 64 times the groups
of one, and with groups of the same rate, so that what grows with their number is seen apart from that. The stand-ins,
who do the same for every group, tell by their own time how cold it is.
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

import numpy as np

from benchmarks.common import ENGINE_PACKAGES, RESULTS, as_table, conditions, save, under
from benchmarks.system.fake_run import FakeRun

GROUPS_PER_STEP = 64
AT_ONCE = 2  # groups that a worker runs at a time; of 8 workers, each does the work of 8
RATE = 300.0  # groups/s of all workers together, where they are to have one
PAGE = resource.getpagesize()


@dataclass(slots=True)
class Mark:
    """The state of the process at the end of a step; what taking it costs lies between `cpu` and `cpu_after`."""

    wall: float
    cpu: float
    away: float
    groups: Counter[int]
    resident: int
    cpu_after: float

    @classmethod
    def of(cls, fake: FakeRun) -> Mark:
        wall, cpu, away = time.perf_counter(), time.process_time(), fake.away
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        return cls(wall, cpu, away.clock.seconds, away.groups.copy(), resident, time.process_time())


def measure(
    workers: Sequence[float], at_once: int, max_staleness: int, steps: int, trainer_seconds: float = 0.0,
    late: float | None = None, groups_per_step: int = GROUPS_PER_STEP,
) -> dict[str, Any]:  # fmt: skip
    """One run; `workers`: seconds of a group of each; `late`: the same of one that joins when the clock starts.

    The clock starts when what fills the buffer at the beginning is used up, and runs for `steps` optimizer steps.
    """
    warm = 2 * (1 + max_staleness)
    marks: dict[int, Mark] = {}

    def on_step(step: int) -> None:
        if step in (warm, warm + steps):
            marks[step] = Mark.of(fake)
        if step == warm and late is not None:
            fake.join(late)

    with tempfile.TemporaryDirectory() as folder:
        fake = FakeRun(
            Path(folder), workers, at_once, groups_per_step, max_staleness, warm + steps, on_step, trainer_seconds
        )
        asyncio.run(fake.run())
    first, last = marks[warm], marks[warm + steps]
    groups, wall = steps * groups_per_step, last.wall - first.wall
    done = last.groups - first.groups
    all_workers = [*workers] if late is None else [*workers, late]
    row = {
        "workers": len(all_workers),
        "max_staleness": max_staleness,
        "groups": groups,
        "seconds": wall,
        "groups_per_s": groups / wall,
        "ideal_groups_per_s": sum(at_once / seconds for seconds in all_workers),
        "controller_ms": 1e3 * (last.cpu - first.cpu_after - last.away + first.away) / groups,
        "away_ms": 1e3 * (last.away - first.away) / groups,
        "resident_growth_bytes": (last.resident - first.resident) / groups,
        "share_of_last_worker": done[len(all_workers) - 1] / max(done.total(), 1),
        "share_of_first_worker": done[0] / max(done.total(), 1),
    }
    print({key: round(value, 4) for key, value in row.items()}, flush=True)
    return row


def scaling(workers: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    return [measure([seconds] * count, AT_ONCE, 3, steps=max(4, min(16, 2 * count))) for count in workers]


def at_one_rate(workers: Sequence[int]) -> list[dict[str, Any]]:
    return [measure([count * AT_ONCE / RATE] * count, AT_ONCE, 3, steps=32) for count in workers]


def idle_ms_per_s(seconds: float) -> float:
    """CPU time of a run of 64 workers in which nothing happens: all are at work on their first groups."""

    async def wait() -> float:
        fake = FakeRun(Path(folder), [1e6] * 64, AT_ONCE, GROUPS_PER_STEP, 3, 1, lambda step: None)
        running = asyncio.create_task(fake.run())
        await asyncio.sleep(1.0)
        began = time.process_time()
        await asyncio.sleep(seconds)
        spent = time.process_time() - began
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return 1e3 * spent / seconds

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(wait())


def uneven(seconds: float) -> dict[str, dict[str, Any]]:
    """Eight workers, of which one is late; 64 that the learner holds up, half of the groups/s of 64; and 256."""
    quick, at_once = [2 * seconds] * 7, 8 * AT_ONCE
    found = {"8 workers alike": measure([*quick, quick[0]], at_once, 3, 16)}
    found["the last of 8 joins when the clock starts"] = measure(quick, at_once, 3, 16, late=quick[0])
    found["64 workers, the learner is slower than they"] = measure([seconds] * 64, AT_ONCE, 3, 16, 2 * seconds)
    lanes = GROUPS_PER_STEP * (1 + 3) // 64  # the slots that one of 64 workers holds at staleness 3
    found[f"64 workers, all {lanes} groups that one holds at once"] = measure([seconds * 2] * 64, lanes, 3, 16)
    found["256 workers, 256 groups a step"] = measure([seconds * 5] * 256, AT_ONCE, 3, 16, groups_per_step=256)
    return found


def picture(rows: Sequence[dict[str, Any]], same_rate: Sequence[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    cost, rate = figure.subplots(1, 2)
    counts = [row["workers"] for row in rows]
    cost.plot(counts, [row["controller_ms"] for row in rows], "o-", label="10 groups/s a worker")
    cost.plot(counts, [row["controller_ms"] for row in same_rate], "s-", label=f"{RATE:.0f} groups/s in all")
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
        name, f"{row['controller_ms']:.2f}", f"{row['away_ms']:.2f}", f"{row['groups_per_s']:.0f}",
        f"{row['ideal_groups_per_s']:.0f}", f"{row['groups_per_s'] / row['ideal_groups_per_s']:.2f}",
        f"{row['resident_growth_bytes'] / 1024:.1f}", f"{row['share_of_first_worker']:.1%}",
        f"{row['share_of_last_worker']:.1%}",
    ]  # fmt: skip


def spread(rows: Sequence[dict[str, Any]]) -> float:
    costs: list[float] = [row["controller_ms"] for row in rows]
    return max(costs) / min(costs)


def fit(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """CPU milliseconds per group, and per second beside that: least squares over the runs."""
    groups, seconds = (np.array([row[key] for row in rows], float) for key in ("groups", "seconds"))
    spent = groups * [row["controller_ms"] for row in rows]
    (per_group, per_second), *_ = np.linalg.lstsq(np.stack([groups, seconds], 1), spent)
    return float(per_group), float(per_second)


def report(
    rows: list[dict[str, Any]], same_rate: list[dict[str, Any]], others: dict[str, dict[str, Any]], idle: float,
    told: dict[str, Any],
) -> str:  # fmt: skip
    header = ["", "controller CPU-ms per group", "stand-ins' own", "groups/s", "ideal", "of ideal",
              "KiB grown per group", "share of first worker", "of last"]  # fmt: skip
    first, second = ([line(f"{row['workers']} workers", row) for row in found] for found in (rows, same_rate))
    per_group, per_second = fit(rows)
    return (
        f"# The controller, {rows[0]['workers']} to {rows[-1]['workers']} workers on no model\n\n"
        f"Workers with groups of one length; highest cost over lowest {spread(rows):.2f}:\n\n"
        f"{as_table(header, first)}\n\n"
        f"The same at one rate, {RATE:.0f} groups/s from all workers; highest over lowest {spread(same_rate):.2f}:\n\n"
        f"{as_table(header, second)}\n\n"
        f"Uneven runs:\n\n{as_table(header, [line(*other) for other in others.items()])}\n\n"
        f"A straight line through the first table: {per_group:.2f} ms per group and {per_second:.1f} ms per second. "
        f"But a run of 64 workers in which nothing happens takes {idle:.2f} ms per second. The rest is the price of "
        "waking up with cold caches: the stand-ins do the same work for every group.\n\n"
        f"A worker runs {AT_ONCE} groups at a time (of 8 in uneven runs: {8 * AT_ONCE}); {GROUPS_PER_STEP} groups a "
        "step and staleness 3 where nothing else is said. KiB grown: resident memory of the process from the first to "
        "the last measured step, by groups trained on.\n\n"
        f"Conditions: {under(told, 'CPU time, of this process alone')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=0.2, help="of a group in a worker")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    idle = idle_ms_per_s(10.0)
    rows, same_rate = scaling(options.workers, options.seconds), at_one_rate(options.workers)
    others = uneven(options.seconds)
    picture(rows, same_rate, RESULTS / "controller.png")
    content = {"conditions": told, "rows": rows, "same_rate": same_rate, "others": others, "idle_ms_per_s": idle}
    save("controller", content, report(rows, same_rate, others, idle, told))


if __name__ == "__main__":
    main()
