"""The learner's peak for every shape of the table, from the fake run of the step that trains, and the published rows.

The published table is of another learner by another measure (H100, TRL with whole padded groups and generate() of
transformers, memory as nvidia-smi shows it): it stands beside ours to show what the sizes were. The same lengths:
G = 4, prompt 256, completion 786, all of full length; one prompt's completions are one micro-batch. Adapter of rank 16
on all linear layers, bfloat16. Two groups, so that the second micro-batch meets the gradients of the first.

    PYTHONPATH=. OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.learner.memory_table [--models NAME ...]
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common import as_table, as_text, conditions, cpu_seconds, save
from benchmarks.learner.published_memory import FIVE, GRPO_TABLE, LENGTHS
from cluster.memory.learner import FRAGMENTATION, Learning, Micro, learner_bytes
from cluster.memory.shape import CONTEXT, GB, SHAPES, Shape, total
from learner.config.settings import LearnerConfig

METHODS: dict[str, Learning] = {
    "full, AdamW": Learning(mode="full", checkpointing="none"),
    "full, AdamW rounded": Learning(mode="full", optimizer="adamw_rounded", checkpointing="none"),
    "full, 8-bit Adam": Learning(mode="full", optimizer="adamw_8bit", checkpointing="none"),
    "full, 8-bit Adam, all twice": Learning(mode="full", optimizer="adamw_8bit", checkpointing="full"),
    "LoRA": Learning(checkpointing="none"),
    "LoRA, MLPs twice": Learning(checkpointing="mlp"),
    "LoRA, all twice": Learning(checkpointing="full"),
    "QLoRA, all twice": Learning(base="nf4", checkpointing="full"),
}


def measure(shape: Shape, learning: Learning) -> dict[str, Any]:
    """Bytes: of the fake run (none for 8-bit optimizers, whose kernels take no tensors without content), and of the
    memory model, both with context and fragmentation."""
    micro = Micro.of(LENGTHS.prompt, LENGTHS.completion, LENGTHS.generations, LENGTHS.group)
    result: dict[str, Any] = {"model": total(learner_bytes(shape, learning, micro)), "fake": None}
    if learning.optimizer.endswith("8bit"):
        return result
    from learner.tools.meta_run import (
        footprint,  # here: it needs bitsandbytes, and others import the tables of this module
    )

    settings: dict[str, Any] = {
        "mode": learning.mode,
        "checkpointing": learning.checkpointing,
        "token_budget": LENGTHS.group,
    }
    settings["optimizer"] = {"kind": learning.optimizer}
    groups = [(LENGTHS.prompt, [LENGTHS.completion] * LENGTHS.generations)] * 2

    def run() -> None:
        found = footprint(shape, LearnerConfig.model_validate(settings), groups, base=learning.base)
        result["footprint"] = asdict(found)
        result["fake"] = round(found.peak + FRAGMENTATION * found.dynamic + CONTEXT)

    result["cpu_seconds"] = round(cpu_seconds(run), 1)
    return result


def cell(one: dict[str, Any]) -> str:
    return f"{one['fake'] / GB:.1f}" if one["fake"] else f"({one['model'] / GB:.1f})"


def report(found: dict[str, dict[str, Any]], told: dict[str, Any]) -> str:
    rows = [[name, f"{SHAPES[name].params / 1e9:.2f}", *map(cell, methods.values())] for name, methods in found.items()]
    ours = [["gleaner: " + m, *(cell(found[name][m]) for name in FIVE if name in found)] for m in METHODS]
    theirs = [
        ["published: " + name, *("-" if size is None else str(size) for size in sizes)]
        for name, sizes in GRPO_TABLE.items()
    ]
    runs = [one for methods in found.values() for one in methods.values() if one["fake"]]
    apart = max(abs(one["model"] / one["fake"] - 1) for one in runs)
    slowest = max(one["cpu_seconds"] for one in runs)
    beside = as_table(["GB", *FIVE], theirs + ours) + "\n\n" if all(name in found for name in FIVE) else ""
    return (
        f"# The learner's peak, G = {LENGTHS.generations}, prompt {LENGTHS.prompt}, completion {LENGTHS.completion}\n\n"
        f"{beside}- = out of 80 GB. The published rows are of another learner by another measure, generation by "
        "transformers in the same process included; ours are the learner's tensors as its step allocates them, with "
        f"{CONTEXT / GB:.1f} GB for the CUDA context and {FRAGMENTATION:.0%} of the step for fragmentation, which are "
        "estimates; vLLM comes on top (`gleaner plan`). (In brackets: by the memory model alone.)\n\n"
        f"{as_table(['model', 'billions', *METHODS], rows)}\n\n"
        "Numbers without brackets are from a run of learner.trainer.trainer.Trainer on tensors without content "
        "(learner.tools.meta_run), without weights or a GPU; the memory model that the planner uses is at most "
        f"{apart:.1%} from them. The slowest took {slowest:.0f} CPU-seconds. Nothing here was measured on a card.\n\n"
        f"Conditions: {as_text(told).replace('float32.', 'bfloat16.')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    told = conditions()
    found: dict[str, dict[str, Any]] = {}
    for name in options.models:
        found[name] = {}
        for method, learning in METHODS.items():
            found[name][method] = measure(SHAPES[name], learning)
            print(name, method, cell(found[name][method]), flush=True)
            gc.collect()
    save("memory_table", {"conditions": told, "peaks": found}, report(found, told))


if __name__ == "__main__":
    main()
