"""Cold start: seconds from `python -m learner.main` to the first completed group and the first step, by part.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.cold_start [--repeats 3] [--against REVISION] [key=value ...]

Runs the demo for two steps (cold_start_main.py and cold_start_run.py beside it mark the moments from outside).
Processes start side by side, so the parts of generator and learner overlap. The machine's file cache is as warm as the
run before left it; the first of the runs is told apart. With --against an earlier commit, checked out into a temporary
folder and run in this environment, takes turns with this one: how fast a machine is today changes both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.commits import checked_out, short
from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.cold_start_main import VARIABLE
from benchmarks.system.system_run import spread
from benchmarks.system.workloads import ROOT

# The module that marks the moments, now and in earlier commits.
MODULES = ("benchmarks.system.cold_start_main", "benchmarks.system.cold_start_run", "benchmarks.cold_start_run")
BEGIN, SAMPLE, STEP, END = (
    "driver: python is started", "generator: first group done", "driver: first step logged", "driver: run over"
)  # fmt: skip


def run(config: str, overrides: list[str], root: Path = ROOT) -> dict[str, float]:
    """Mark -> seconds since the start of the command, in order of time. root: of the commit that is run."""
    module = next(name for name in MODULES if (root / f"{name.replace('.', '/')}.py").exists())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks"
        changes = [f"output_dir={folder}", "name=cold", "steps=2", "data.eval.every=0", "trackers=[]", *overrides]
        begin = time.time()
        subprocess.run(
            [sys.executable, "-c", f"from {module} import main; main()", "--config", config, *changes],
            check=True, cwd=root, env=os.environ | {VARIABLE: str(file), "PYTHONPATH": str(root)},
        )  # fmt: skip
        marks = {BEGIN: 0.0}
        for line in file.read_text().splitlines():
            at, _, name = line.partition("\t")
            marks.setdefault(name, float(at) - begin)
    return dict(sorted(marks.items(), key=lambda item: item[1]))


def steps_of(marks: dict[str, float]) -> dict[str, float]:
    """Seconds of each mark since the one before it in the same process."""
    before: dict[str, float] = {}
    took = {}
    for name, at in marks.items():
        process = name.partition(":")[0]
        took[name] = at - before.get(process, at)
        before[process] = at
    return took


def compared(runs: list[dict[str, float]], earlier: list[dict[str, float]], revision: str) -> str:
    """What both commits tell, and the ratio of each turn."""
    rows = []
    for mark in (SAMPLE, STEP, END):
        now, before = ([marks[mark] for marks in several[1:]] for several in (runs, earlier))
        ratios = [a / b for a, b in zip(now, before, strict=True)]
        rows.append([mark, spread(before, ".2f"), spread(now, ".2f"), spread(ratios, ".2f")])
    table = as_table(["moment", f"{revision}, s", "now, s", "now over before"], rows)
    turns = f"Median (least - most) of {len(runs) - 1} turns after a first one, each commit with its own configuration."
    return f"\n\n{table}\n\n{turns}"


def report(runs: list[dict[str, float]], told: dict[str, object], config: str, beside: str) -> str:
    later = runs[1:] or runs
    parts = [steps_of(marks) for marks in runs]
    order = sorted(runs[0], key=lambda name: median(marks[name] for marks in later))
    rows = [
        [
            name,
            f"{median(marks[name] for marks in later):.2f}",
            f"{median(took[name] for took in parts[1:] or parts):.2f}",
            f"{runs[0][name]:.2f}",
        ]
        for name in order
    ]
    return (
        f"# Cold start of {config}, by part\n\n"
        f"{as_table(['moment', 's since the command', 's since the mark before it, same process', 'first run'], rows)}"
        f"\n\nMedians of {len(later)} runs after a first one. generator and learner start side by side.{beside}\n\n"
        f"Conditions: {under(told, 'Wall time')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/local_cpu.yaml")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", metavar="REVISION", help="an earlier commit, in turns with this one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    runs, beside = [], ""
    if options.against is None:
        runs = [run(options.config, options.overrides) for _ in range(options.repeats + 1)]
    else:
        revision, earlier = short(options.against), []
        with checked_out(revision) as before:
            for _ in range(options.repeats + 1):
                earlier.append(run(options.config, options.overrides, before))
                runs.append(run(options.config, options.overrides))
        beside = compared(runs, earlier, revision)
    save("cold_start", {"conditions": told, "runs": runs}, report(runs, told, options.config, beside))


if __name__ == "__main__":
    main()
