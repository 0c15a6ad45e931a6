"""How long the steps of the demo take when they are taken again without generating, beside the run itself.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.replay [--repeats 3]

In turns: the demo (configs/local_cpu.yaml, its last checkpoint only), then `gleaner replay` of it, each from the
command to the end of its process. Every policy must have the run's digest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.system_run import command, spread
from benchmarks.system.workloads import demo

LEARNING = ("time/train", "time/push_export")  # a step's seconds that a replay has, too


def turn(steps: int, limit_s: float) -> dict[str, float]:
    """Seconds of a run and of its replay, and those of the run in which its learner worked."""
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        started = time.perf_counter()
        more = {"name": "run", "output_dir": folder}
        command(demo(steps, every=10) | more, ["-m", "learner.main", "--config"], [], limit_s)
        took = time.perf_counter() - started
        run = Path(folder) / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        words = [sys.executable, "-m", "learner.tools.cli", "replay", str(run), "--json"]
        started = time.perf_counter()
        told = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=limit_s).stdout)
        replayed = time.perf_counter() - started
        assert told["same"], told
        assert told["to"] == steps, told
    learning = sum(line.get(name, 0.0) for line in lines for name in LEARNING)
    return {"run": took, "learner": learning, "replay": replayed, "share": replayed / took}


def report(turns: list[dict[str, float]], steps: int, measured: str) -> str:
    rows = [
        ["the run", spread([one["run"] for one in turns], ".1f")],
        ["of which its learner worked", spread([one["learner"] for one in turns], ".1f")],
        ["the replay", spread([one["replay"] for one in turns], ".1f")],
        ["the replay, as a share of the run", spread([one["share"] for one in turns])],
    ]
    return (
        f"# The demo's {steps} steps, taken again\n\n{as_table(['', 'seconds'], rows)}\n\nMedian (least - most) of "
        f"{len(turns)} turns, from the command to the end of its process. Every policy of the replay had the digest "
        f"that the run recorded.\n\n{measured}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--limit", type=float, default=600, help="seconds for a run, and for its replay")
    options = parser.parse_args()
    told: dict[str, Any] = conditions(ENGINE_PACKAGES)
    turns = [turn(options.steps, options.limit) for _ in range(options.repeats)]
    text = report(turns, options.steps, under(told, "Wall time, on cores that did other work as well"))
    save("replay", {"conditions": told, "turns": turns}, text)


if __name__ == "__main__":
    main()
