"""Does a whole model learn as well without float32 masters? The demo, learner.mode full in bfloat16, by optimizer.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.without_masters [--seeds 0 1 2] [--rate 1e-4]

Runs go side by side, since what they learn does not depend on the clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.system_run import command, spread
from benchmarks.system.workloads import demo_of_one

KINDS = ("adamw", "adamw_rounded", "adamw_8bit")
BYTES = {"adamw": 20, "adamw_rounded": 12, "adamw_8bit": 6}  # a weight
LAST = 3  # evaluations at the end that count, since one of 200 problems is off by 0.02


def learned(kind: str, seed: int, *, rate: float, steps: int, limit_s: float) -> dict[str, Any]:
    """Held-out accuracy by step, and the mean reward of the last quarter of the steps."""
    tree = demo_of_one(steps, every=10)
    tree["model"]["dtype"] = "bfloat16"
    tree["learner"] |= {"mode": "full", "learning_rate": rate, "optimizer": {"kind": kind}}
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        more = {"name": "run", "output_dir": folder, "seed": seed}
        command(tree | more, ["-m", "learner.main", "--config"], [], limit_s)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if line["step"] > steps * 3 / 4]
    accuracy = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    return {"kind": kind, "seed": seed, "accuracy": accuracy, "reward": mean(rewards)}


def report(found: list[dict[str, Any]], rate: float, steps: int, measured: str) -> str:
    rows = []
    for kind in KINDS:
        own = [one for one in found if one["kind"] == kind]
        first = [one["accuracy"][0][1] for one in own]
        last = [mean(score for _, score in one["accuracy"][-LAST:]) for one in own]
        rewards = spread([one["reward"] for one in own], ".3f")
        rows.append([kind, str(BYTES[kind]), spread(first, ".3f"), spread(last, ".3f"), rewards])
    header = ["optimizer", "bytes a weight", "accuracy before", f"mean of the last {LAST}", "reward at the end"]
    return (
        f"# The demo as full fine-tuning in bfloat16, with and without float32 masters\n\n{as_table(header, rows)}\n\n"
        f"Median (least - most) over {len(found) // len(KINDS)} seeds; {steps} steps at a learning rate of {rate:g}, "
        f"evaluated on 200 held-out problems.\n\n{measured}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--beside", type=int, default=2, help="runs at once")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one run")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    run = partial(learned, rate=options.rate, steps=options.steps, limit_s=options.limit)
    asked = list(product(KINDS, options.seeds))
    with ThreadPoolExecutor(options.beside) as pool:
        found = list(pool.map(lambda one: run(*one), asked))
    measured = under(told, "What is compared does not depend on the clock")
    save("without_masters", {"conditions": told, "runs": found}, report(found, options.rate, options.steps, measured))


if __name__ == "__main__":
    main()
