"""Does PPO learn the demo? Its model, problems, rewards and steps, with a value model; in groups, without any, and with
a learned reward model in the place of the rule.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.ppo_demo [--seeds 0 1 2]

One run after the other, each as a user starts it. The reward model is made first, as docs/rewards.md says.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.system_run import command, spread
from benchmarks.system.workloads import ROOT, demo_of_one

PPO: dict[str, Any] = {"algorithm": "ppo", "value": {"learning_rate": 1e-3}}
WAYS: dict[str, tuple[dict[str, Any], int, int]] = {  # settings of the learner, problems of a step, completions of each
    "PPO, 8 problems x 8 completions": (PPO, 8, 8),
    "PPO, 64 problems x 1 completion": (PPO, 64, 1),
    "PPO, 8 x 8, learned reward model": (PPO, 8, 8),
}
SUMS = 3000  # that the model's own answers to are compared for the reward model
LAST = 10  # steps whose mean is reported of the value's metrics


def reward_model(folder: Path) -> tuple[Path, str]:
    """Pairs of the model's own answers, and a reward model of them -> its folder, accuracy on held-out pairs."""
    pairs, judge = folder / "pairs.jsonl", folder / "judge"
    subprocess.run(
        [sys.executable, "-m", "examples.arithmetic_pairs", str(pairs), "--sums", str(SUMS)], check=True, cwd=ROOT
    )
    train = ["reward-model", "train", str(pairs), "--model", "examples/tiny-arithmetic", "--out", str(judge)]
    how = ["--dtype", "float32", "--learning-rate", "1e-3", "--epochs", "3"]
    said = subprocess.run(
        [sys.executable, "-m", "learner.tools.cli", *train, *how], check=True, cwd=ROOT, text=True, capture_output=True
    ).stdout
    return judge, re.findall(r"held-out accuracy ([\d.]+)", said)[0]


def learned(way: str, judge: Path, seed: int, *, steps: int, limit_s: float) -> dict[str, Any]:
    """Held-out accuracy by step, seconds from the command to the end, and what the value told."""
    settings, problems, completions = WAYS[way]
    tree = demo_of_one(steps, every=10)
    if "reward model" in way:  # the rule says what held-out accuracy is, and nothing is trained on it
        tree["rewards"] = [{"use": f"adapter:{judge}"}, {"use": "reasoning_gym", "weight": 0}]
        tree["data"]["eval"]["reward"] = "reasoning_gym"
    tree["learner"] |= settings | {"groups_per_step": problems}
    tree["rollout"]["num_generations"] = completions
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        started = time.monotonic()
        command(
            tree | {"name": "run", "output_dir": folder, "seed": seed}, ["-m", "learner.main", "--config"], [], limit_s
        )
        seconds = time.monotonic() - started
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    told = {
        name: sum(line[name] for line in lines[-LAST:]) / LAST
        for name in ("value/explained_variance", "value/loss", "value/mean", "reward/mean")
    }
    return {"way": way, "seed": seed, "accuracy": accuracy, "seconds": seconds, "last": told}


def report(found: list[dict[str, Any]], steps: int, of_pairs: str, measured: str) -> str:
    rows = []
    for way in dict.fromkeys(one["way"] for one in found):
        own = [one for one in found if one["way"] == way]
        ends = [one["accuracy"][-1][1] for one in own]
        gains = [end - one["accuracy"][0][1] for end, one in zip(ends, own, strict=True)]
        explained = [one["last"]["value/explained_variance"] for one in own]
        rows.append([
            way, ", ".join(str(one["seed"]) for one in own),
            spread([one["accuracy"][0][1] for one in own], ".3f"), spread(ends, ".3f"), f"+{min(gains):.3f}",
            spread(explained), f"{max(one['seconds'] for one in own):.0f}",
        ])  # fmt: skip
    header = [
        "", "seeds", "accuracy before", f"after {steps} steps", "least gain", f"explained variance, last {LAST} steps",
        "most seconds, from the command to the end",
    ]  # fmt: skip
    return (
        f"# PPO on the demo\n\n{as_table(header, rows)}\n\nMedian (least - most) over the seeds, "
        "200 held-out problems. learner.value.learning_rate=1e-3, ten times the default: the model is tiny. All "
        f"else is configs/local_cpu.yaml with one generator. The reward model is right on {of_pairs} of the held-out "
        f"pairs, which are of the model's own answers to {SUMS} sums.\n\n{measured}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--limit", type=float, default=900, help="seconds for one run")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    found = []
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        judge, of_pairs = reward_model(Path(folder))
        print(f"reward model: {of_pairs} of held-out pairs", flush=True)
        for way, seed in product(WAYS, options.seeds):
            found.append(learned(way, judge, seed, steps=options.steps, limit_s=options.limit))
            print(way, seed, found[-1]["accuracy"][-1], f"{found[-1]['seconds']:.0f} s", flush=True)
    measured = under(told, "Seconds are wall time, one run at a time")
    save(
        "ppo_demo",
        {"conditions": told, "held_out_pairs": of_pairs, "runs": found},
        report(found, options.steps, of_pairs, measured),
    )


if __name__ == "__main__":
    main()
