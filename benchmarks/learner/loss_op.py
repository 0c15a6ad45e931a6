"""The loss alone, from N logprobs to the N slopes that the model's backward pass starts with: now and before.

    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.loss_op REVISION

The earlier commit is checked out into a temporary folder. Before and after take turns, each a process of one thread; a
figure is the median of all calls of all turns. Peak: most bytes of new tensors at once, inputs not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import Peak, as_table, conditions, save, under
from benchmarks.system.against_commit import checked_out

ROOT = Path(__file__).parents[2]
RATIOS = ("masked", "truncated", "sequence_mask", "gspo", "clip")
COMPLETION = 256  # tokens of each


def measure(tokens: int, calls: int) -> dict[str, Any]:
    """Seconds of each call and peak in bytes, by ratio, of the code in the present folder."""
    from learner.algo.loss import token_loss
    from learner.batch.micro_batch import MicroBatch
    from learner.learner_config import LearnerConfig

    torch.manual_seed(0)
    torch.set_num_threads(1)
    zeros, completions = torch.zeros(tokens, dtype=torch.int64), tokens // COMPLETION
    behavior, entropy = torch.randn(tokens) - 2, torch.rand(tokens)
    logprobs = behavior + 0.2 * torch.randn(tokens)
    advantages = torch.randn(completions).repeat_interleave(COMPLETION)
    batch = MicroBatch(
        ids=zeros[None], index=zeros, targets=zeros, behavior=behavior, versions=zeros.int(), advantages=advantages,
        coefficients=torch.full((tokens,), 1 / tokens), lengths=torch.full((completions,), COMPLETION), places=zeros,
    )  # fmt: skip
    found = {}
    for ratio in RATIOS:
        config = LearnerConfig.model_validate({"loss": {"ratio": ratio}}).loss

        def call(config: Any = config) -> object:
            return token_loss(logprobs, entropy, batch, config, reference=None, version=0)

        for _ in range(20):
            call()
        with Peak() as peak:
            call()
        seconds = []
        for _ in range(calls):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        found[ratio] = {"seconds": seconds, "peak": peak.bytes}
    return found


def side(folder: Path, tokens: int, calls: int) -> dict[str, Any]:
    """What `measure` finds of the code in that folder."""
    words = [sys.executable, __file__, "--measure", str(tokens), str(calls)]
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    told = subprocess.run(words, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(told.splitlines()[-1]))


def report(rows: list[dict[str, Any]], revision: str, measured: str) -> str:
    cells = []
    for row in rows:
        took = [f"{row[name] * 1e6:.0f}" for name in ("before", "after")]
        peaks = [f"{row[name] / 2**10:.0f}" for name in ("peak_before", "peak_after")]
        cells.append([f"{row['tokens']}", row["ratio"], *took, f"{row['after'] / row['before']:.2f}", *peaks])
    header = ["N", "ratio", f"µs a call, {revision}", "now", "now over before", "peak KiB before", "now"]
    return (
        f"# The loss from N logprobs to N slopes, against an earlier commit\n\n{as_table(header, cells)}\n\n"
        "Before: formulas derived by hand. Now: autograd of the surrogate objective. Median of all calls.\n\n"
        f"Conditions: {measured}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    told, rows = conditions(("torch",)), []
    with checked_out(options.revision) as before:
        for tokens in options.tokens:
            turns = [[side(folder, tokens, options.calls) for folder in (before, ROOT)] for _ in range(options.turns)]
            for ratio in RATIOS:
                old, new = ([turn[one][ratio] for turn in turns] for one in (0, 1))
                took = [median(s for turn in one for s in turn["seconds"]) for one in (old, new)]
                row = {"tokens": tokens, "ratio": ratio, "before": took[0], "after": took[1]}
                rows.append(row | {"peak_before": old[0]["peak"], "peak_after": new[0]["peak"]})
    measured = under(told, "wall time, one thread")
    save("loss_op", {"conditions": told, "rows": rows}, report(rows, options.revision, measured))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
