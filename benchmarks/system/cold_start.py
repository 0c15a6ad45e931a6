"""Cold start: seconds from `python -m learner.main` to the first completed group and the first step, by part.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.cold_start [--repeats 3] [key=value ...]

Runs the demo for two steps (benchmarks/system/cold_start_run.py marks the moments from outside). Processes start side
by side, so the parts of generator and learner overlap. The machine's file cache is as warm as the run before left it;
the first of the runs is told apart.
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

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.cold_start_run import VARIABLE

PROGRAM = "from benchmarks.system.cold_start_run import main; main()"
BEGIN = "driver: python is started"


def run(config: str, overrides: list[str]) -> dict[str, float]:
    """Mark -> seconds since the start of the command, in order of time."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks"
        changes = [f"output_dir={folder}", "name=cold", "steps=2", "data.eval.every=0", "trackers=[]", *overrides]
        begin = time.time()
        subprocess.run(
            [sys.executable, "-c", PROGRAM, "--config", config, *changes],
            check=True, env=os.environ | {VARIABLE: str(file)},
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


def report(runs: list[dict[str, float]], told: dict[str, object], config: str) -> str:
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
        f"\n\nMedians of {len(later)} runs after a first one. generator and learner start side by side.\n\n"
        f"Conditions: {under(told, 'Wall time')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/local_cpu.yaml")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    runs = [run(options.config, options.overrides) for _ in range(options.repeats + 1)]
    save("cold_start", {"conditions": told, "runs": runs}, report(runs, told, options.config))


if __name__ == "__main__":
    main()
