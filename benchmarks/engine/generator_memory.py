"""A generator's memory over a long run on a CPU, beside its plan: what grows after the start, and where it ends.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.generator_memory [--workloads demo ragged] [--steps 60]

A workload is a whole run as a user starts it. demo: configs/local_cpu.yaml with one generator, which gets the
adapters of a 0.4M model. merged: the same with whole weights pushed (learner.push: merged).
ragged: a 25M model in float32, long completions of all lengths.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.system_run import command
from benchmarks.system.workloads import Tree, add_ragged_options, demo_of_one, ragged

MB = 10**6
SHOWN = (1, 10, 30, 60, 120, 250, 500, 1000, 2000, 5000, 10000)  # steps


def measured(tree: Tree, limit_s: float) -> dict[str, Any]:
    """The plan of a generator by part, and its peak after each step, in bytes."""
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        command(tree | {"name": "run", "output_dir": folder}, ["-m", "learner.main", "--config"], [], limit_s)
        run = Path(folder) / "run"
        planned = json.loads((run / "plan.json").read_text())["generator"]["parts"]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    peaks = {line["step"]: line["memory/generator_peak"] for line in lines if "memory/generator_peak" in line}
    return {"planned": planned, "peaks": peaks}


def report(found: dict[str, dict[str, Any]], measured_how: str) -> str:
    rows = []
    for name, one in found.items():
        planned, peaks = sum(one["planned"].values()), one["peaks"]
        last = max(peaks)
        shown = [str(round(peaks[step] / MB)) if step in peaks else "" for step in SHOWN if step <= last]
        shown += [""] * (len(SHOWN) - len(shown))
        rows.append([name, str(round(planned / MB)), *shown, str(last), f"{peaks[last] / planned - 1:+.0%}"])
    header = ["run", "planned, MB", *(f"step {step}" for step in SHOWN), "last step", "last against plan"]
    return (
        f"# A generator's peak resident memory over a long run on a CPU, MB\n\n{as_table(header, rows)}\n\n"
        f"{measured_how}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_ragged_options(parser)
    parser.add_argument("--workloads", nargs="+", choices=("demo", "merged", "ragged"), default=["demo", "ragged"])
    parser.add_argument("--demo-steps", type=int, default=500)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one run")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads:
            if name == "ragged":
                tree = ragged(Path(folder), options) | {"checkpoint": {"every": 1000}}
                tree["model"]["dtype"] = options.dtype[0]
            else:
                tree = demo_of_one(options.demo_steps, every=0)
                tree["learner"] |= {"push": "merged"} if name == "merged" else {}
            found[name] = measured(tree, options.limit)
            print(name, sum(found[name]["planned"].values()), list(found[name]["peaks"].items())[-1], flush=True)
    save("generator_memory", {"conditions": told, "runs": found}, report(found, under(told, "Peaks of whole runs")))


if __name__ == "__main__":
    main()
