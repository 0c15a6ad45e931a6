"""The loss alone, from N logprobs to the N slopes that the model's backward pass starts with: now and before.

    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.loss_op REVISION

The earlier commit is checked out into a temporary folder, and a process of each calls its own code, a few calls in
turn: a machine whose speed changes changes it for both. A figure is the CPU time that four of five calls exceed, since
other work of the machine only adds to it. Peak: most bytes of new tensors at once, without the inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.commits import checked_out
from benchmarks.common import Peak, as_table, conditions, save, under

ROOT = Path(__file__).parents[2]
RATIOS = ("masked", "truncated", "sequence_mask", "gspo", "clip")
COMPLETION = 256  # tokens of each
CALLS = 10  # in turn
Ask = Callable[[int, str], dict[str, Any]]  # tokens, ratio -> CPU seconds of some calls, and their peak in bytes


def loss_call(tokens: int, ratio: str) -> Callable[[], object]:
    """The loss and its metrics, by the code of the present folder, of one micro-batch near the sampler."""
    from learner.algo.loss import metrics_of, token_loss
    from learner.batch.micro_batch import MicroBatch
    from learner.config.settings import LearnerConfig

    torch.manual_seed(0)
    zeros, completions = torch.zeros(tokens, dtype=torch.int64), tokens // COMPLETION
    behavior, entropy = torch.randn(tokens) - 2, torch.rand(tokens)
    logprobs = behavior + 0.2 * torch.randn(tokens)
    batch = MicroBatch(
        ids=zeros[None], index=zeros, targets=zeros, behavior=behavior, versions=zeros.int(),
        advantages=torch.randn(completions).repeat_interleave(COMPLETION),
        coefficients=torch.full((tokens,), 1 / tokens), lengths=torch.full((completions,), COMPLETION), places=zeros,
    )  # fmt: skip
    config = LearnerConfig.model_validate({"loss": {"ratio": ratio}}).loss

    def call() -> object:
        slopes, parts = token_loss(logprobs, entropy, batch, config, reference=None, version=0)
        return slopes, metrics_of([parts])

    return call


def answer() -> None:
    """One side: reads `tokens ratio` from stdin, a line each, and answers with what the calls took."""
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        if line not in calls:
            tokens, ratio = line.split()
            calls[line] = loss_call(int(tokens), ratio)
            for _ in range(CALLS):
                calls[line]()
        seconds = []
        for _ in range(CALLS):
            started = time.thread_time()
            calls[line]()
            seconds.append(time.thread_time() - started)
        with Peak() as peak:
            calls[line]()
        print(json.dumps({"seconds": seconds, "peak": peak.bytes}), flush=True)


@contextmanager
def side(folder: Path) -> Iterator[Ask]:
    """A process that calls the code of that folder."""
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, __file__, "--answer"], cwd=folder, env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def ask(tokens: int, ratio: str) -> dict[str, Any]:
            asked.write(f"{tokens} {ratio}\n")
            asked.flush()
            return dict(json.loads(told.readline()))

        yield ask
        asked.close()


def measured(before: Ask, now: Ask, tokens: int, ratio: str, turns: int) -> dict[str, Any]:
    """A row of the table."""
    answers = [(before(tokens, ratio), now(tokens, ratio)) for _ in range(turns)]
    sides = [[turn[i] for turn in answers] for i in (0, 1)]
    seconds = [sorted(s for one in found for s in one["seconds"])[turns * CALLS // 5] for found in sides]
    peaks = [found[0]["peak"] for found in sides]
    return {"tokens": tokens, "ratio": ratio, "seconds": seconds, "peaks": peaks}


def report(rows: list[dict[str, Any]], revision: str, how: str) -> str:
    cells = []
    for row in rows:
        before, now = row["seconds"]
        took = [f"{s * 1e6:.0f}" for s in row["seconds"]]
        peaks = [f"{size / 2**10:.0f}" for size in row["peaks"]]
        cells.append([f"{row['tokens']}", row["ratio"], *took, f"{now / before:.2f}", *peaks])
    header = ["N", "ratio", f"µs a call, {revision}", "now", "now over before", "peak KiB before", "now"]
    return (
        f"# The loss from N logprobs to N slopes and metrics\n\n{as_table(header, cells)}\n\n"
        "Before: formulas derived by hand. Now: autograd of the surrogate objective. To set beside it: the log-prob "
        "head takes 800 000 µs for 1024 tokens and a vocabulary of 32768 (head_op.md); the loss is less than 0.05 % of "
        f"that, before and now.\n\nConditions: {how}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    told = conditions(("torch",))
    with checked_out(options.revision) as folder, side(folder) as before, side(ROOT) as now:
        rows = [measured(before, now, n, ratio, options.turns) for n in options.tokens for ratio in RATIOS]
    how = under(told, f"CPU time of one thread, {CALLS} calls a turn, {options.turns} turns")
    save("loss_op", {"conditions": told, "rows": rows}, report(rows, options.revision, how))


if __name__ == "__main__":
    answer() if sys.argv[1:] == ["--answer"] else main()
