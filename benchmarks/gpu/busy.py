"""Checklist B: how much of a learner's step the card computes, by tokens of a micro-batch.

The card's share is the time of its kernels, by torch's profiler in one step of its own, over the median wall time of
the steps before it: far below 1, the host's launches bind and larger micro-batches are faster per token.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.model import group, make_trainer, steps, utilisation
from benchmarks.gpu.rows import Found, Row
from cluster.memory.shape import SHAPES, Shape
from learner.config.settings import LearnerConfig

BUDGETS = (4096, 8192, 16384, 32768)
PROMPT, COMPLETION, GENERATIONS, GROUPS = 256, 512, 8, 8
SHOWN = 25  # kinds of kernels


def rows(tiny: Shape | None) -> list[Row]:
    one_b = SHAPES["Llama-3.2-1B"] if tiny is None else tiny
    return [Row(f"b-busy-{budget}", partial(busy, one_b, budget)) for budget in (BUDGETS if tiny is None else (64,))]


def busy(shape: Shape, budget: int, device: str) -> Found:
    """One optimizer step on eight groups of eight completions of equal length."""
    learner = LearnerConfig.model_validate({"checkpointing": "none", "token_budget": budget})
    short = budget // 8 if budget < COMPLETION else COMPLETION
    trainer = make_trainer(shape, learner, device, completion=short)
    groups = [group(seed, PROMPT, [short] * GENERATIONS, shape.vocab) for seed in range(GROUPS)]
    found = steps(trainer, groups, 6, device)
    activities = [ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]
    with profile(activities=activities) as watched:
        trainer._step(groups)
    kernels: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in watched.key_averages():
        taken = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        kernels[event.key] += taken / 1e3
        launches[event.key] += event.count
    tokens = GROUPS * (PROMPT + GENERATIONS * (short - 1))
    computed: Any = sum(kernels.values())
    return {
        "policy": "none",
        "tokens": tokens,
        "tokens_per_s": tokens / found["step_seconds"],
        "card_share": computed / 1e3 / found["step_seconds"],
        "kernels": sum(launches.values()),
        "milliseconds_by_kernel": {
            name[:120]: [round(ms, 3), launches[name]] for name, ms in kernels.most_common(SHOWN)
        },
        **found,
        **utilisation(shape, tokens, found["step_seconds"], full=False, device=device),
    }
