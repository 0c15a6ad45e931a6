"""Over-sampling: which first tokens of completions are trained on, by the length of the completion.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.oversample_by_length [--before FOLDER]

The demo with rollout.oversample, as it is here, and as it is in another checkout (FOLDER). A first token is trained on
unless the learner counted a token of its completion as too old: then everything up to there was prompt. How old that is
is not assumed: it is the bound at which the run's own policy/too_old_fraction comes out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from rollout import ledger
from rollout.schema import ragged

ROOT = Path(__file__).resolve().parent.parent
EDGES = (0, 10, 15, 20, 25, 30, 65)  # tokens of a completion, from the first to before the second
MOST = 64  # policy versions: beyond any bound


@dataclass(frozen=True)
class Run:
    """What one run trained on. Ages are policy versions between the sampling of a token and the training."""

    way: str
    seed: int
    oldest: int  # age of the oldest token
    oldest_trained: int  # of the oldest one that was trained on
    by_length: dict[int, list[int]]  # length -> completions, those whose first token was trained on
    accuracy: float  # held out, at the end


def run(way: str, checkout: Path, oversample: int, seed: int, options: argparse.Namespace) -> Run:
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        changed = {
            "name": "run", "output_dir": folder, "seed": seed, "steps": options.steps,
            "rollout.oversample": oversample, "data.eval.every": options.steps, "checkpoint.every": options.steps,
        }  # fmt: skip
        command = [sys.executable, "-m", "learner.main", "--config", "configs/local_cpu.yaml"]
        subprocess.run(
            [*command, *(f"{key}={value}" for key, value in changed.items())],
            check=True, cwd=checkout, timeout=options.limit, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(checkout)},
        )  # fmt: skip
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        tables = [ledger.read(path) for path in ledger.steps(Path(folder) / "run" / "rollouts")]
    # Ages of the tokens of each completion, step by step: step k is trained by policy version k - 1.
    ages = [[step - own for own in ragged(table, "token_versions")] for step, table in enumerate(tables)]
    too_old = [line["policy/too_old_fraction"] for line in lines if line["step"] > 0]
    bound, by_length = bound_of(ages, too_old), dict[int, list[int]]()
    rows = [own for step in ages for own in step]
    for own in rows:
        count = by_length.setdefault(len(own), [0, 0])
        count[0] += 1
        count[1] += int(own.max() <= bound)
    return Run(
        way=way,
        seed=seed,
        oldest=max(int(own.max()) for own in rows),
        oldest_trained=bound,
        by_length=dict(sorted(by_length.items())),
        accuracy=next(line["eval/accuracy"] for line in reversed(lines) if "eval/accuracy" in line),
    )


def bound_of(ages: Sequence[Sequence[Any]], too_old: Sequence[float]) -> int:
    """The least number of versions beyond which tokens were told to be too old, in every step."""
    for bound in range(MOST):
        shares = [float((np.concatenate(step) > bound).mean()) for step in ages]
        if np.allclose(shares, too_old, atol=1e-6):
            return bound
    raise ValueError("policy/too_old_fraction: fits no bound on the age of tokens")


def table(runs: Sequence[Run]) -> str:
    rows = []
    for way in dict.fromkeys(one.way for one in runs):
        own = [one for one in runs if one.way == way]
        cells = []
        for low, high in pairwise(EDGES):
            counts = [count for one in own for length, count in one.by_length.items() if low <= length < high]
            total, trained = (sum(count[i] for count in counts) for i in range(2))
            cells.append(f"{trained / total:.1%} of {total}" if total else "none")
        ages = [str(max(one.oldest for one in own)), str(max(one.oldest_trained for one in own))]
        scores = [one.accuracy for one in own]
        rows.append([way, *cells, *ages, f"{', '.join(f'{score:.3f}' for score in scores)} (mean {mean(scores):.3f})"])
    header = ["", *(f"{low}-{high - 1} tokens" for low, high in pairwise(EDGES))]
    return as_table([*header, "oldest token", "oldest trained on", "accuracy"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder of a checkout to compare with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--oversample", type=int, default=8)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a run")
    options = parser.parse_args()
    ways = {"no over-sampling": (ROOT, 0)}
    if options.before:
        ways["over-sampling, before"] = (options.before.resolve(), options.oversample)
    ways["over-sampling"] = (ROOT, options.oversample)
    told, runs = conditions(ENGINE_PACKAGES), []
    for seed in options.seeds:
        for way, (checkout, oversample) in ways.items():
            runs.append(run(way, checkout, oversample, seed, options))
            print(f"{way}, seed {seed}: accuracy {runs[-1].accuracy:.3f}", flush=True)
    text = (
        "# Over-sampling, and which completions are trained on from their first token\n\n"
        "Share of first tokens that were trained on, of so many completions, by their length; ages of tokens are in "
        "policy versions. The demo "
        f"(`configs/local_cpu.yaml`, max_staleness 0, 8 groups of 8 a step), {options.steps} steps, seeds "
        f"{', '.join(map(str, options.seeds))}; over-sampling: rollout.oversample={options.oversample}.\n\n"
        f"{table(runs)}\n\n"
        "Stragglers of over-sampling go on under the newest policy, so their first tokens are of an earlier one. "
        "Before, such tokens were left out of the loss. Now each is trained on with the ratio to the policy that "
        f"sampled it, and a batch waits for a group that would get too old.\n\n{under(told, 'Counts, no times')}"
    )
    content = {"conditions": told, "runs": [vars(one) for one in runs]}
    save("oversample_by_length", content, text)


if __name__ == "__main__":
    main()
