"""gleaner against itself: generation that runs 0, 1 or 2 policy versions ahead of training, on the same two cores.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.async_vs_sync

Two tables: samples per second and idle time on the ragged workload, where --completion and --groups set how long
generation and training are beside each other; and what the demo learns in the same number of samples. Runs take turns,
repeat by repeat, so a ratio is of neighbours. Equal hardware: generation and training that take turns have both cores
each (0:2/2); those that run at once have one each (1:1/1). 0:1/1 holds one core back from the synchronous side.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, as_table, conditions, save
from benchmarks.system import system_plots
from benchmarks.system.system_run import BOTH, Mode, Record, parts_of, spread, wall_text
from benchmarks.system.system_vs_trl import by_system, take_turns
from benchmarks.system.workloads import add_ragged_options, demo_of_one, ragged


def speed_table(records: Sequence[Record], skip: int) -> str:
    """Rates, their ratios to the first mode's run of the same turn, and where the seconds go."""
    first, rows = {(r.dtype, r.seed): r for r in reversed(records)}, []
    for (system, dtype), own in by_system(records).items():
        ratios = [r.rate(skip) / first[dtype, r.seed].rate(skip) for r in own]
        idle = [spread([100 * r.mean(skip, f"{role}_idle") / r.mean(skip, "seconds") for r in own], ".0f")
                for role in ("generator", "learner")]  # fmt: skip
        parts = parts_of(own, skip, ("seconds", "generate", "train", "overlap", "push"))
        rows.append([system, dtype, spread([r.rate(skip) for r in own]), f"{spread(ratios)} x", *idle, *parts])
    header = ["system", "type", "samples/s", "against the first", "generator idle %", "learner idle %", "s per step",
              "generate", "train", "both", "push"]  # fmt: skip
    return as_table(header, rows)


def learning_table(records: Sequence[Record], skip: int) -> str:
    rows = []
    for (system, _), own in by_system(records).items():
        final = [record.accuracy[-1][1] for record in own]
        each = ", ".join(f"{accuracy:.3f}" for accuracy in final)
        times = spread([r.curve()[-1][0] for r in own], ".1f"), spread([r.wall_s for r in own], ".0f")
        rate = spread([r.rate(skip) for r in own], ".1f")
        rows.append([system, f"{sum(final) / len(final):.3f}", each, rate, *times])
    return as_table(["system", "last accuracy, mean", "by seed", "samples/s", "s of training", "s in all"], rows)


def report(
    speed: Sequence[Record], learning: Sequence[Record], told: dict[str, Any], options: argparse.Namespace
) -> str:
    cells = learning_table(learning, options.skip) if learning else "Not run."
    return (
        "# Asynchronous against synchronous\n\n"
        f"{speed_table(speed, options.skip)}\n\n"
        "The ragged workload of `benchmarks/system/workloads.py`: a Llama of 25M random weights, prompts of 200 to 400 "
        f"tokens, {options.groups} groups of {options.generations} completions a step, each token the last with "
        f"probability {options.end_rate:g}, at most {options.completion} tokens. Median (least - most) of "
        f"{options.repeats} runs, which took turns; {options.steps} steps after {options.skip} to warm up. "
        "Parts are seconds of a step.\n\n"
        f"{cells}\n\n"
        f"`configs/local_cpu.yaml` with one generator, {options.demo_steps} steps, seeds 0 to {options.seeds - 1}, "
        f"200 held-out problems every {options.every} steps: the same number of samples in every run.\n\n"
        f"Conditions: {wall_text(told, [*speed, *learning])}\n"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_ragged_options(parser)
    parser.add_argument(
        "--modes", type=Mode.parse, nargs="+", help="STALENESS:GENERATOR/LEARNER cores[:continue][+OVERSAMPLE]"
    )
    parser.add_argument("--repeats", type=int, default=3, help="ragged: runs of each mode")
    parser.add_argument("--seeds", type=int, default=3, help="demo: runs of each mode; 0 leaves the demo out")
    parser.add_argument("--demo-steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="demo: steps between evaluations")
    parser.add_argument("--limit", type=float, default=7200, help="seconds after which a run has failed")
    parser.add_argument("--name", help="of the result; else async_vs_sync_COMPLETION")
    options = parser.parse_args()
    options.modes = options.modes or [Mode(0, 2, 2), Mode(1, 1, 1), Mode(2, 1, 1)]
    if options.every <= 1 + max(mode.staleness for mode in options.modes):
        parser.error(f"--every must leave steps without an evaluation or a gain from one, got {options.every}")
    options.with_trl = False
    return options


def main() -> None:
    options, told, speed = parse(), conditions(BOTH), list[Record]()
    with tempfile.TemporaryDirectory() as folder:
        tree = ragged(Path(folder), options)
        for dtype in options.dtype:
            own = tree | {"model": tree["model"] | {"dtype": dtype}}
            speed += take_turns(own, range(options.repeats), options)
    learning = take_turns(demo_of_one(options.demo_steps, options.every), range(options.seeds), options)
    runs = {"ragged": [asdict(record) for record in speed], "demo": [asdict(record) for record in learning]}
    name = options.name or f"async_vs_sync_{options.completion}"
    save(name, {"conditions": told, "runs": runs}, report(speed, learning, told, options))
    system_plots.both(speed, learning, options, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
