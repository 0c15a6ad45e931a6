"""The loss alone, from N logprobs to the N slopes that the model's backward pass starts with: now and before.

    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.loss_op REVISION

The earlier commit is checked out into a temporary folder. Before and now run at the same time, a process of one thread
on a core each, and change cores turn by turn. A figure is CPU time that four of five calls exceed, since other work of
the machine only adds to it; median (least - most) of the turns. Peak: most bytes of new tensors at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Peak, as_table, conditions, save, under
from benchmarks.system.against_commit import checked_out
from benchmarks.system.system_run import spread

ROOT = Path(__file__).parents[2]
RATIOS = ("masked", "truncated", "sequence_mask", "gspo", "clip")
COMPLETION = 256  # tokens of each


def measure(tokens: int, calls: int) -> dict[str, Any]:
    """CPU seconds of a call and peak in bytes, by ratio, of the code in the present folder."""
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
            started = time.thread_time()
            call()
            seconds.append(time.thread_time() - started)
        found[ratio] = {"seconds": sorted(seconds)[calls // 5], "peak": peak.bytes}
    return found


def side(folder: Path, core: int, tokens: int, calls: int) -> dict[str, Any]:
    """What `measure` finds of the code in that folder."""
    words = ["taskset", "-c", str(core), sys.executable, __file__, "--measure", str(tokens), str(calls)]
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    told = subprocess.run(words, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(told.splitlines()[-1]))


def turn(before: Path, number: int, tokens: int, calls: int) -> list[dict[str, Any]]:
    """Before and now, side by side."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ThreadPoolExecutor(2) as both:
        pairs = zip((before, ROOT), cores if number % 2 else cores[::-1], strict=True)
        return list(both.map(lambda pair: side(*pair, tokens, calls), pairs))


def report(rows: list[dict[str, Any]], revision: str, measured: str) -> str:
    cells = []
    for row in rows:
        took = [spread([s * 1e6 for s in row[name]], ".0f") for name in ("before", "now")]
        ratio = spread([now / before for before, now in zip(row["before"], row["now"], strict=True)])
        cells.append([f"{row['tokens']}", row["ratio"], *took, ratio, *(f"{b / 2**10:.0f}" for b in row["peaks"])])
    header = ["N", "ratio", f"µs a call, {revision}", "now", "now over before", "peak KiB before", "now"]
    return (
        f"# The loss from N logprobs to N slopes, against an earlier commit\n\n{as_table(header, cells)}\n\n"
        "Before: formulas derived by hand. Now: autograd of the surrogate objective. Median (least - most) of the "
        "turns. To set beside it: the log-prob head alone takes 800 000 µs for 1024 tokens of a vocabulary of 32768 "
        f"(head_op.md).\n\nConditions: {measured}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--calls", type=int, default=1000)
    options = parser.parse_args()
    told, rows = conditions(("torch",)), []
    with checked_out(options.revision) as before:
        for tokens in options.tokens:
            turns = [turn(before, number, tokens, options.calls) for number in range(options.turns)]
            for ratio in RATIOS:
                old, now = ([sides[i][ratio] for sides in turns] for i in (0, 1))
                times = {"before": [one["seconds"] for one in old], "now": [one["seconds"] for one in now]}
                rows.append({"tokens": tokens, "ratio": ratio, "peaks": [old[0]["peak"], now[0]["peak"]]} | times)
    measured = under(told, "CPU time of one thread, four of five calls take longer")
    save("loss_op", {"conditions": told, "rows": rows}, report(rows, options.revision, measured))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
