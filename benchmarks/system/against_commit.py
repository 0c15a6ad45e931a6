"""The code as it is against an earlier commit: seconds per step and the learner's peak of whole runs, side by side.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.against_commit REVISION

The earlier commit is checked out into a temporary folder and runs in this environment. Both run at the same time, each
on half of the cores, and change halves turn by turn: a machine whose speed changes by a third within minutes changes it
for both. Synchronous, so that a step is generation and training one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.commits import checked_out, short
from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.system_run import command, spread
from benchmarks.system.workloads import ROOT, Tree, add_ragged_options, demo_of_one, ragged


class Figures(NamedTuple):
    """Of one run: seconds per step, and the most that its learner held (MiB)."""

    seconds: float
    peak: float


def figures(root: Path, tree: Tree, skip: int, limit_s: float, cores: Sequence[int]) -> Figures:
    """Seconds: median over the steps after the first `skip`, less what an evaluation or a checkpoint took."""
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        command(
            tree | {"name": "run", "output_dir": folder}, ["-m", "learner.main", "--config"], [], limit_s, root, cores
        )
        lines: Iterator[dict[str, float]] = map(
            json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        )
        steps = [line for line in lines if line["step"] > skip]
    return Figures(
        median(line["time/step"] - line["time/evaluate"] - line["time/checkpoint"] for line in steps),
        max(line["memory/learner_peak"] for line in steps) / 2**20,
    )


def report(found: dict[str, list[tuple[Figures, Figures]]], revision: str, measured: str) -> str:
    rows = []
    for workload, turns in found.items():
        for index, (unit, form) in enumerate([("seconds per step", ".3f"), ("learner's peak, MiB", ".1f")]):
            before, after = ([turn[side][index] for turn in turns] for side in (0, 1))
            ratios = [b / a for a, b in zip(before, after, strict=True)]
            rows.append([workload, unit, spread(before, form), spread(after, form), spread(ratios, ".3f")])
    table = as_table(["workload", "figure", revision, "now", "now over before"], rows)
    return f"# Whole runs against an earlier commit\n\n{table}\n\nMedian (least - most) of the turns. {measured}\n"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    add_ragged_options(parser)
    parser.add_argument("--workloads", nargs="+", choices=["demo", "ragged"], default=["demo", "ragged"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--demo-steps", type=int, default=40)
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a run has failed")
    return parser.parse_args(argv)


def main() -> None:
    options, told, cores = parse(), conditions(ENGINE_PACKAGES), sorted(os.sched_getaffinity(0))
    revision = short(options.revision)
    found: dict[str, list[tuple[Figures, Figures]]] = {}
    with tempfile.TemporaryDirectory() as folder, checked_out(revision) as before:
        for workload in options.workloads:
            tree = demo_of_one(options.demo_steps, every=0)
            if workload == "ragged":
                tree = ragged(Path(folder), options)
                tree["model"]["dtype"] = options.dtype[0]
            for turn in range(options.turns):
                halves = cores[: len(cores) // 2], cores[len(cores) // 2 :]
                with ThreadPoolExecutor(2) as pool:
                    both = [
                        pool.submit(figures, root, tree | {"seed": turn}, options.skip, options.limit, half)
                        for root, half in zip((before, ROOT), halves[:: 1 if turn % 2 else -1], strict=True)
                    ]
                    earlier, now = (one.result() for one in both)
                found.setdefault(workload, []).append((earlier, now))
                print(f"{workload}, turn {turn}: {earlier} before, {now} now", flush=True)
    text = report(
        found,
        revision,
        f"Conditions: {under(told, 'wall time of synchronous runs on half of the cores each, float32')}",
    )
    save("against_commit", {"conditions": told, "revision": revision, "turns": found}, text)


if __name__ == "__main__":
    main()
