"""A step of QLoRA on a card: PEFT's own layers against fused ones (learner.model.lora), and where its time goes.

    PYTHONPATH=. python -m benchmarks.gpu.qlora --shape Llama-3.2-1B Llama-3.1-8B
    PYTHONPATH=. python -m benchmarks.gpu.qlora --device cpu --tiny                   the rehearsal

Random weights of the real shapes; 4 groups of 4 completions of 786 tokens with prompts of 256, micro-batches of one
group, every layer computed again. Two trainers take turns in one process. busy: the share of a step in which the card
computes, by torch's profiler, which makes the step itself slower. kernels: those that take most of that time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pyarrow as pa
import torch
from peft.tuners.lora import LoraLayer
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import as_table
from benchmarks.gpu.learner import TINY
from benchmarks.gpu.model import group, make_trainer, utilisation
from benchmarks.gpu.rows import Found, folder_for, told_of
from cluster.memory.shape import SHAPES, Shape
from learner.config.settings import LearnerConfig
from learner.model import lora
from learner.trainer.trainer import Trainer

GROUPS, GENERATIONS, MOST = 4, 4, 14


def trainer_of(shape: Shape, device: str, budget: int, completion: int, *, fused: bool) -> Trainer:
    learner = LearnerConfig.model_validate({"checkpointing": "full", "token_budget": budget})
    with ExitStack() as stack:
        if not fused:
            stack.enter_context(mock.patch.object(lora, "_is_plain", return_value=False))
        trainer = make_trainer(shape, learner, device, base="nf4", completion=completion)
    layers = [module for module in trainer._policy._lm.modules() if isinstance(module, LoraLayer)]
    assert all(("forward" in vars(layer)) == fused for layer in layers), "layers of the other kind"
    return trainer


def timed(trainer: Trainer, groups: list[pa.Table], device: str) -> float:
    started = time.perf_counter()
    trainer._step(groups)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def profiled(trainer: Trainer, groups: list[pa.Table]) -> Found:
    """Microseconds of each kernel in one step, and how many were launched."""
    with profile(activities=[ProfilerActivity.CUDA]) as done:
        seconds = timed(trainer, groups, "cuda")
    kernels: Counter[str] = Counter()
    launched = 0
    for event in done.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernels[event.name[:90]] += event.time_range.elapsed_us()
            launched += 1
    return {
        "seconds": seconds,
        "busy": sum(kernels.values()) / 1e6 / seconds,
        "launched": launched,
        "kernels": kernels.most_common(MOST),
    }


def measure(shape: Shape, device: str, repeats: int) -> Found:
    prompt, completion = (16, 24) if shape is TINY else (256, 786)
    budget = prompt + GENERATIONS * completion
    trainers = {way: trainer_of(shape, device, budget, completion, fused=way == "fused") for way in ("PEFT", "fused")}
    groups = [group(i, prompt, [completion] * GENERATIONS, shape.vocab) for i in range(GROUPS)]
    seconds: dict[str, list[float]] = {way: [] for way in trainers}
    for turn in range(repeats + 2):
        for way, trainer in trainers.items():
            found = timed(trainer, groups, device)
            if turn >= 2:
                seconds[way].append(found)
    result: Found = {"shape": shape.name, "tokens": GROUPS * budget, "seconds": seconds}
    for way, trainer in trainers.items():
        spent = utilisation(shape, GROUPS * budget, median(seconds[way]), full=False, device=device)
        result[way] = {**spent, **(profiled(trainer, groups) if device == "cuda" else {})}
    return result


def report(rows: list[Found], told: dict[str, Any]) -> str:
    cells, kernels = [], ""
    for row in rows:
        for way, seconds in row["seconds"].items():
            one = row[way]
            shares = [f"{one[key]:.0%}" if one.get(key) is not None else "" for key in ("mfu", "busy")]
            spread = f"{median(seconds):.3f} ({min(seconds):.3f} - {max(seconds):.3f})"
            cells.append([row["shape"], way, str(row["tokens"]), spread, *shares, str(one.get("launched", ""))])
            if "kernels" in one:
                lines = [[f"`{name}`", f"{us / 1e3:.1f}"] for name, us in one["kernels"]]
                kernels += f"{row['shape']}, {way}:\n\n{as_table(['kernel', 'ms'], lines)}\n\n"
    table = as_table(["model", "layers", "tokens", "s / step", "MFU", "busy", "launched"], cells)
    return f"## A step of QLoRA\n\n{table}\n\n{kernels}Conditions: {json.dumps(told)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", nargs="+", default=["Llama-3.2-1B"], choices=sorted(SHAPES))
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1M weights, to rehearse")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="of the results")
    options = parser.parse_args()
    folder = options.folder or folder_for(options.device, options.tiny)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = [TINY] if options.tiny else [SHAPES[name] for name in options.shape]
    rows = [measure(shape, options.device, options.repeats) for shape in shapes]
    told = told_of(options.device)
    (folder / "qlora.json").write_text(json.dumps({"rows": rows, "conditions": told}, indent=1) + "\n")
    text = report(rows, told)
    (folder / "qlora.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
