"""Checklist A: the learner's peak on a card, for five sizes and six methods, beside the memory model's prediction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.model import group, make_trainer, steps, utilisation
from benchmarks.gpu.rows import Found, Row
from benchmarks.learner.published_memory import FIVE, GRPO_TABLE, LENGTHS
from cluster.memory import learner as learner_memory
from cluster.memory import shape as units
from cluster.memory.learner import Learning, Micro
from cluster.memory.plan import Plan, Wish, Workload, plan
from cluster.memory.shape import GB, SHAPES, Shape
from learner.config.settings import LearnerConfig

GROUPS = 4  # per step, a micro-batch each, as in the published table
COUNT = 8  # steps: the peak is that of one, and each row costs seconds of a lent card
METHODS: dict[str, Learning] = {
    "full": Learning(mode="full", checkpointing="none"),
    "full-rounded": Learning(mode="full", optimizer="adamw_rounded", checkpointing="none"),
    "full-8bit": Learning(mode="full", optimizer="adamw_8bit", checkpointing="none"),
    "full-8bit-ckpt": Learning(mode="full", optimizer="adamw_8bit", checkpointing="full"),
    "lora": Learning(checkpointing="none"),
    "lora-auto": Learning(checkpointing="full"),  # what the planner chooses for the card takes the place of `full`
    "qlora": Learning(base="nf4", checkpointing="full"),
}
ROWS_OF_PUBLISHED = dict(zip(("full-rounded", "full-8bit", "full-8bit-ckpt", "lora"), GRPO_TABLE.values(), strict=True))


def rows(tiny: Shape | None) -> list[Row]:
    """The small models first: they say most per minute."""
    shapes = {name: SHAPES[name] for name in FIVE} if tiny is None else {tiny.name: tiny}
    lengths = LENGTHS if tiny is None else Workload(generations=4, prompt=16, completion=24)
    many = "Llama-3.2-1B" if tiny is None else tiny.name
    found = [
        Row(f"a-{name}-{method}", partial(measure, shape, method, lengths, COUNT if tiny is None else 2))
        for name, shape in shapes.items()
        for method in METHODS
    ]
    more = [
        Row(f"a-{many}-lora-g{count}", partial(measure, shapes[many], "lora", replace(lengths, generations=count), 5))
        for count in (4, 8, 16, 64)
    ]
    return [*more, *found]


def measure(shape: Shape, method: str, lengths: Workload, count: int, device: str) -> Found:
    """The token budget is one group of four, however many completions there are."""
    budget = replace(lengths, generations=4).group
    learning = _settled(shape, method, lengths, budget, device)
    settings: dict[str, Any] = {
        "mode": learning.mode,
        "checkpointing": learning.checkpointing,
        "token_budget": budget,
        "optimizer": {"kind": learning.optimizer},
    }
    if learning.mode == "full":
        settings["learning_rate"] = 1e-6
    learner = LearnerConfig.model_validate(settings)
    micro = Micro.of(lengths.prompt, lengths.completion, lengths.generations, budget)
    parts = learner_memory.learner_bytes(shape, learning, micro)
    trainer = make_trainer(shape, learner, device, base=learning.base, completion=lengths.completion)
    groups = [
        group(i, lengths.prompt, [lengths.completion] * lengths.generations, shape.vocab)
        for i in range(GROUPS if lengths.generations == 4 else 1)
    ]
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = steps(trainer, groups, count, device)
    tokens = len(groups) * lengths.group
    return {
        "shape": shape.name,
        "method": method,
        "generations": lengths.generations,
        "checkpointing": learning.checkpointing,
        "predicted": units.total(parts) - parts["context"] - parts["fragmentation"],
        "parts": parts,
        **found,
        **utilisation(shape, tokens, found["step_seconds"], full=learning.mode == "full", device=device),
    }


def _settled(shape: Shape, method: str, lengths: Workload, budget: int, device: str) -> Learning:
    learning = METHODS[method]
    if method != "lora-auto":
        return learning
    total = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 2**34
    chosen = plan(shape, total, lengths, Wish(base="none", token_budget=budget, layouts=("separate",)))
    return replace(learning, checkpointing=chosen.checkpointing) if isinstance(chosen, Plan) else learning


def table(found: dict[str, Found]) -> tuple[list[str], list[list[str]]]:
    """GB without the CUDA context: allocated / reserved / predicted, and the published row."""
    header = ["row", "allocated", "reserved", "predicted", "allocated / predicted", "published", "s / step", "MFU"]
    lines = []
    for name, one in found.items():
        if one["status"] != "ok":
            lines.append([name, one["status"], *[""] * 6])
            continue
        same = one["generations"] == 4 and one["shape"] in FIVE
        published = ROWS_OF_PUBLISHED.get(one["method"]) if same else None
        lines.append(
            [
                name, _gb(one["allocated"]) + (" (budget halved)" if one["oom_retries"] else ""), _gb(one["reserved"]),
                _gb(one["predicted"]), f"{one['allocated'] / one['predicted']:.2f}",
                "" if published is None else str(published[FIVE.index(one["shape"])] or "> 80"),
                f"{one['step_seconds']:.3f}", "" if one["mfu"] is None else f"{one['mfu']:.0%}",
            ]
        )  # fmt: skip
    return header, lines


def _gb(count: float | None) -> str:
    return "" if count is None else f"{count / GB:.2f}"
