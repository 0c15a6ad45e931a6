"""The learner's step on the ragged workload (benchmarks/system/workloads.py), in a process that takes orders.

A folder holds model, adapter (no part of it zero) and batch: 8 groups of 8 completions, 200-400 tokens of prompt,
lengths that end by chance at 256 at the latest, random tokens, recorded with the policy's logprobs in float64.

    python -m benchmarks.learner.ragged_step FOLDER DTYPE

A line of standard input is an order, a line of standard output its answer in JSON: "step" takes one, and gives its
CPU-seconds; "peak" takes one, and gives the most bytes of new tensors; "gradient FILE" writes that of the last step.

It imports no more than what earlier commits have, too, so that PYTHONPATH says which commit is measured.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from learner.config import ModelConfig
from learner.trainer import trainer as of_this_commit

Trainer: Any = of_this_commit.Trainer
LearnerConfig: Any = vars(of_this_commit)["LearnerConfig"]  # its own module has moved since

LONGEST = 256  # tokens of a completion
LOSS = {"kind": "dapo", "ratio": "clip", "advantage": "group"}


def read_groups(folder: Path) -> list[pa.Table]:
    files = sorted(folder.glob("group-*.arrow"))
    return [pa.ipc.open_file(file).read_all() for file in files]


class Step:
    def __init__(self, folder: Path, dtype: Any) -> None:
        self.groups = read_groups(folder)
        self.library = _choose_library()
        self.trainer = Trainer(
            ModelConfig(path=str(folder / "model"), adapter=str(folder / "adapter"), dtype=dtype),
            LearnerConfig.model_validate({"learning_rate": 1e-6, "loss": LOSS, "optimizer": {"max_grad_norm": 1e9}}),
            temperature=1.0,
            max_completion_length=LONGEST,
            total_steps=1000,
            seed=0,
            device="cpu",
        )

    def step(self) -> float:
        """CPU-seconds of what Trainer.step does in its own thread."""
        started = time.process_time()
        self.trainer._step(self.groups)
        return time.process_time() - started

    def gradient(self) -> dict[str, Tensor]:
        """Of the last step."""
        masters = self.trainer._policy.masters.items()
        return {name: weight.grad.clone() for name, weight in masters if weight.grad is not None}

    def peak(self) -> int:
        """Most bytes of new tensors in a step."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            self.step()
        held = highest = 0
        found: Any = run.profiler.kineto_results
        for event in sorted((e for e in found.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            held += event.nbytes()
            highest = max(highest, held)
        return highest


def _choose_library() -> str:
    """As the learner's process does at its start; earlier commits had nothing to choose."""
    try:
        from learner.trainer.float32_products import choose_library
    except ImportError:
        return "torch's default"
    return "oneDNN" if choose_library() else "torch's default"


def main() -> None:
    torch.set_num_threads(1)
    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    own = Step(folder, dtype)
    print(json.dumps({"library": own.library}), flush=True)
    for order in map(str.split, sys.stdin):
        answer: Any = None
        if order[0] == "step":
            answer = own.step()
        elif order[0] == "peak":
            answer = own.peak()
        else:
            torch.save(own.gradient(), order[1])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
