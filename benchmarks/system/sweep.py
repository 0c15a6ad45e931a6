"""Several runs on one generator and one learner (gleaner sweep), beside one run: seconds of a run's step, and memory.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.sweep

Every run is synchronous, each role has a core. In each turn one run alone and sweeps of K runs, which differ in their
seeds, follow each other on a workload. Seconds of a run's step: the time in which all runs of a sweep are under way,
over the steps that they finish in it. Memory: the most that all processes of the command held at a moment, with shared
pages counted once (PSS), Ray's included.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.common import as_table, conditions, parser_of, save, spread, under
from benchmarks.system.system_run import (
    BOTH,
    ON_CPUS,
    Tree,
    about_ragged,
    add_ragged_options,
    command,
    demo_of_one,
    ragged,
    real,
    rows,
)

LIMIT_S, LOOK_S = 3000.0, 0.5
WORKLOADS = {"ragged": [1, 2], "real": [1, 2], "demo": [1, 4]}  # how many runs, where --runs does not say it


@dataclass
class Measured:
    """workload, runs: what was run. step_s: seconds of a run's step. peak: bytes."""

    workload: str
    runs: int
    step_s: float
    peak: int


class Watch:
    """peak: the most bytes (PSS) that the processes below this one held together."""

    def __init__(self) -> None:
        self.peak = 0
        self._end = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            self.peak = max(self.peak, sum(map(_pss, psutil.Process().children(recursive=True))))


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has ended meanwhile
        return 0


def measured(name: str, tree: Tree, runs: int, skip: int) -> Measured:
    """One run alone, or a sweep over so many seeds."""
    watch = Watch()
    cpus = ON_CPUS["cluster"] | {"cpus": {"generator": 1, "learner": 1}}
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder, watch.watching():
        own = tree | {"name": "run", "output_dir": folder, "max_staleness": 0, "cluster": cpus}
        if runs == 1:
            command(own, ["-m", "learner.main", "--config"], [], LIMIT_S)
            folders = [Path(folder) / "run"]
        else:
            seeds = ",".join(map(str, range(runs)))
            command(own, ["-m", "learner.tools.cli", "sweep"], [f"seed={seeds}"], LIMIT_S)
            folders = [Path(folder) / "run" / f"seed-{seed}" for seed in range(runs)]
        ends = [[float(row["at"]) for row in rows(one) if row["step"] >= skip] for one in folders]
    begin, end = max(each[0] for each in ends), min(each[-1] for each in ends)
    steps = sum(begin < at <= end for each in ends for at in each)
    return Measured(name, runs, (end - begin) / steps, watch.peak)


def workloads(options: argparse.Namespace, folder: Path) -> dict[str, tuple[str, Tree, int]]:
    """Of each workload its kind, its configuration, and how many of its first steps do not count."""
    found: dict[str, tuple[str, Tree, int]] = {}
    if "ragged" in options.workloads:
        tree = ragged(folder, options)
        found["ragged 25M, float32"] = "ragged", tree | {"model": tree["model"] | {"dtype": "float32"}}, options.skip
    if "real" in options.workloads:
        for dtype in options.dtype:
            found[f"SmolLM2-135M, {dtype}"] = "real", real(options.steps + options.skip, dtype), options.skip
    if "demo" in options.workloads:
        found["demo"] = "demo", demo_of_one(20, 0), 5
    return found


def main() -> None:
    parser = parser_of(__doc__)
    add_ragged_options(parser)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--runs", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    told = conditions(BOTH)
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="gleaner-sweep-") as folder:
        for name, (kind, tree, skip) in workloads(options, Path(folder)).items():
            for _ in range(options.repeats):
                for runs in options.runs or WORKLOADS[kind]:
                    found.append(measured(name, tree, runs, skip))
                    print(found[-1], flush=True)
    text = (
        f"# Runs side by side on one generator and one learner\n\n{table(found)}\n\nEach run is synchronous; one core "
        "for each role. Steps: of a run, while all runs are under way. A ratio is within one turn. Memory: of all "
        f"processes, Ray's included, shared pages once. Ragged: {about_ragged(options)}\n\n"
        f"Conditions: {under(told, 'Wall time')}\n"
    )
    save("sweep", {"conditions": told, "measured": [asdict(one) for one in found]}, text)


def table(found: list[Measured]) -> str:
    """A line for each workload and number of runs."""
    lines = []
    for name, runs in dict.fromkeys((one.workload, one.runs) for one in found):
        own = [one for one in found if (one.workload, one.runs) == (name, runs)]
        alone = [one for one in found if (one.workload, one.runs) == (name, 1)]
        ratios = [each.step_s / one.step_s for each, one in zip(own, alone, strict=True)] if alone else []
        memory = [each.peak / one.peak for each, one in zip(own, alone, strict=True)] if alone else []
        lines.append([
            name, str(runs), spread([one.step_s for one in own], ".2f"), spread(ratios, ".2f"),
            spread([one.peak / 2**30 for one in own], ".2f"), spread(memory, ".2f"),
        ])  # fmt: skip
    return as_table(["workload", "runs", "s a run's step", "of one run's", "GiB", "of one run's"], lines)


if __name__ == "__main__":
    main()
