"""What the tiny model learns of a tool and of a game through the whole system, by seed: configs/tools_cpu.yaml, which
`make demo-tools` runs, and configs/guessing_cpu.yaml.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.several_turns [--seeds 0 1 2]

Runs go side by side, since what they learn does not depend on the clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.system_run import command
from benchmarks.system.workloads import ROOT, Tree
from cluster.reading import read_yaml
from rollout import ledger

WORKLOADS = ("tools", "no_tool", "guessing")


def tree_of(workload: str) -> Tree:
    """The configuration. Without the tool the model is only evaluated, and not told of one."""
    tree = read_yaml(ROOT / "configs" / ("guessing_cpu.yaml" if workload == "guessing" else "tools_cpu.yaml"))
    tree["model"]["path"] = str(ROOT / tree["model"]["path"])
    tree["trackers"] = []
    if workload == "no_tool":
        del tree["env"]
        tree |= {"steps": 1, "checkpoint": {"every": 1}}
    return tree


def right_calls(rows: pa.Table) -> float:
    """Share of trajectories in which the tool said the answer: tool, JSON and expression were right."""
    said = zip(rows.column("problem").to_pylist(), rows.column("messages").to_pylist(), strict=True)
    return sum(
        any(one["role"] == "tool" and one["content"] == json.loads(problem)["columns"]["answer"] for one in messages)
        for problem, messages in ((problem, json.loads(text)) for problem, text in said)
    ) / len(rows)


def learned(workload: str, seed: int, *, limit_s: float) -> dict[str, Any]:
    """Held-out numbers by step, and of each step's samples the share with a right call. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        more = {"name": "run", "output_dir": folder, "seed": seed}
        command(tree_of(workload) | more, ["-m", "learner.main", "--config"], [], limit_s)
        run = Path(folder) / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [ledger.read(path) for path in ledger.steps(run / "rollouts")] if workload == "tools" else []
    evaluated = [line for line in lines if "eval/accuracy" in line]
    kept = ("step", "eval/accuracy", "eval/turns", "eval/calls", "eval/found", "eval/errors")
    told = {
        "workload": workload,
        "seed": seed,
        "evaluations": [{key: line[key] for key in kept if key in line} for line in evaluated],
        "right_calls": [right_calls(rows) for rows in steps],
        "seconds": lines[-1]["at"] - lines[0]["at"],
    }
    print(json.dumps(told), flush=True)
    return told


def report(found: list[dict[str, Any]], measured: str) -> str:
    """A table for each configuration that was run."""
    by = {(one["workload"], one["seed"]): one for one in found}
    products, games = [], []
    for (workload, seed), one in by.items():
        first, last = one["evaluations"][0], one["evaluations"][-1]
        if workload == "tools":
            alone = by.get(("no_tool", seed))
            without = "" if alone is None else f"{alone['evaluations'][0]['eval/accuracy']:.3f}"
            accuracy, right = [f"{at['eval/accuracy']:.3f}" for at in (first, last)], one["right_calls"]
            products.append([str(seed), without, *accuracy, f"{right[0]:.2f}", f"{right[-1]:.2f}"])
        elif workload == "guessing":
            told = [f"{at[name]:.2f}" for name in ("eval/turns", "eval/found") for at in (first, last)]
            games.append([str(seed), *told])
    calls = ["right calls, first step", "right calls, last step"]
    header = ["seed", "accuracy without tool", "with it, at the start", "at the end", *calls]
    text = "# A tool and a game: what is learned in several turns\n\n"
    if products:
        text += (
            f"{as_table(header, products)}\n\nProducts of factors of two to four digits (`make demo-tools`); accuracy "
            "greedy on 200 held-out problems; right calls: the share of the 64 sampled trajectories of a step in which "
            "the tool said the answer.\n\n"
        )
    if games:
        header = ["seed", "turns at the start", "at the end", "found at the start", "at the end"]
        text += (
            f"{as_table(header, games)}\n\nGuessing a number from 1 to 15 in at most 8 turns "
            "(`configs/guessing_cpu.yaml`), greedy, each number once; halving takes 3.27.\n\n"
        )
    return f"{text}{measured}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--beside", type=int, default=2, help="runs at once")
    parser.add_argument("--limit", type=float, default=1500, help="seconds for one run")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    asked = list(product(options.workloads, options.seeds))
    with ThreadPoolExecutor(options.beside) as pool:
        found = list(pool.map(lambda one: learned(*one, limit_s=options.limit), asked))
    measured = under(told, "What is compared does not depend on the clock")
    save("several_turns", {"conditions": told, "runs": found}, report(found, measured))


if __name__ == "__main__":
    main()
