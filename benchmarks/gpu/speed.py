"""Checklist B: attention over packed rows, the head's variants, checkpointing policies, packed against padded."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.model import group, make_trainer, steps, utilisation
from benchmarks.gpu.rows import Found, Missing, Row
from benchmarks.learner.head_op import Case, by_liger, by_logprobs, make_case, naive_logprobs
from cluster.memory.plan import Workload
from cluster.memory.shape import SHAPES, Shape
from learner.batch.layout import Layout, Segment
from learner.config.settings import LearnerConfig
from learner.model.attention import SEGMENTS, VARLEN, kernels
from learner.model.logprob import policy_logprobs

RAGGED = (786, 700, 512, 400, 256, 128, 64, 16)  # completions of a group


def rows(tiny: Shape | None) -> list[Row]:
    one_b = SHAPES["Llama-3.2-1B"] if tiny is None else tiny
    shapes = [one_b, SHAPES["Qwen2.5-3B"], SHAPES["Qwen2.5-14B"]] if tiny is None else [tiny]
    scale = 1 if tiny is None else 16
    lengths = [(256, RAGGED), (1024, (140,) * 8)] if tiny is None else [(16, (24, 9, 2))]
    attention = [
        Row(f"b-attention-{shape.name}-p{prompt}", partial(attend, shape, prompt, completions, 20 // scale + 1))
        for shape in shapes
        for prompt, completions in lengths
    ]
    head = [Row(f"b-head-{way}", partial(head_op, one_b, way, 4096 // scale, 20 // scale + 1)) for way in HEADS]
    policies: list[Any] = ["none", "mlp", "full", one_b.layers // 2]
    work = Workload(8, 256, 786) if tiny is None else Workload(8, 16, 24)
    learned = [
        Row(f"b-step-{name}-{policy}", partial(step, one_b, work, policy, packed, 10 // scale + 1))
        for name, packed in (("packed", True), ("padded", False))
        for policy in (policies if packed else ["full"])
    ]
    return [*attention, *head, *learned]


def milliseconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """Median of wall times, after two to warm up."""
    taken = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken[2:])) * 1e3


def _layout(prompt: int, completions: tuple[int, ...]) -> Layout:
    segments, start = [Segment(0, prompt)], prompt
    for length in completions:
        segments.append(Segment(start, start + length, 0, prompt))
        start += length
    return Layout(segments)


def attend(shape: Shape, prompt: int, completions: tuple[int, ...], repeats: int, device: str) -> Found:
    """Output and gradients of each kernel that may run here against the per-segment loop in float32, then times."""
    from transformers import AttentionInterface

    torch.manual_seed(0)
    layout, count = _layout(prompt, completions), prompt + sum(completions)
    wide = [(1, heads, count, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    tensors = [torch.randn(size, device=device, dtype=torch.bfloat16) for size in wide]
    slope = torch.randn(1, count, shape.heads, shape.head_dim, device=device, dtype=torch.bfloat16)
    interface: Any = AttentionInterface()

    def run(name: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        output, _ = interface[name](torch.nn.Module(), *leaves, None, packed_layout=layout)
        return [output.detach(), *torch.autograd.grad(output, leaves, slope.to(dtype))]

    wanted = run(SEGMENTS, torch.float32)
    found: Found = {"tokens": count, "shape": shape.name, "available": kernels(torch.device(device), torch.bfloat16)}
    for name in found["available"]:
        got = run(name, torch.bfloat16)
        errors = [float((one.float() - right).norm() / right.norm()) for one, right in zip(got, wanted, strict=True)]
        found[name] = {
            "errors": dict(zip(("output", "query", "key", "value"), errors, strict=True)),
            "ms": milliseconds(partial(run, name, torch.bfloat16), repeats, device),
        }
    if VARLEN in found:
        found["loop / varlen"] = found[SEGMENTS]["ms"] / found[VARLEN]["ms"]
    return found


def _tiled(tokens: int, vocab: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda hidden, head, targets: policy_logprobs(
        hidden, head, targets, 0.9, token_tile=tokens, vocab_tile=vocab
    )[0]


HEADS: dict[str, Callable[[], Callable[[Case, Tensor], None]]] = {
    "naive": lambda: by_logprobs(naive_logprobs),
    "gleaner": lambda: by_logprobs(_tiled(512, 8192)),
    "gleaner-2048x8192": lambda: by_logprobs(_tiled(2048, 8192)),
    "gleaner-2048x32768": lambda: by_logprobs(_tiled(2048, 32768)),
    "liger": lambda: by_liger,
}


def head_op(shape: Shape, way: str, tokens: int, repeats: int, device: str) -> Found:
    """Forward and backward of a clipped loss over `tokens` states of a frozen head, bfloat16; the error is that of
    d loss / d hidden against the naive op in float32."""
    if way == "liger" and find_spec("liger_kernel") is None:
        raise Missing("liger-kernel is not installed")
    exact = make_case(tokens // 8 * 8, shape.hidden, shape.vocab)
    on_device = [getattr(exact, name).to(device) for name in ("hidden", "head", "targets", "behavior", "advantages")]
    exact = Case(*on_device)
    hidden = exact.hidden.clone().requires_grad_()
    by_logprobs(naive_logprobs)(exact, hidden)
    assert hidden.grad is not None
    wanted, hidden = hidden.grad, hidden.detach().bfloat16().requires_grad_()
    case = Case(hidden, exact.head.bfloat16(), *on_device[2:])
    del exact, on_device
    work = HEADS[way]()
    work(case, hidden)
    assert hidden.grad is not None
    error = float((hidden.grad.float() - wanted).norm() / wanted.norm())
    peak = None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work(case, hidden)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    taken = milliseconds(lambda: work(case, hidden), repeats, device)
    return {"way": way, "tokens": tokens, "vocab": shape.vocab, "error": error, "peak": peak, "ms": taken}


def step(shape: Shape, work: Workload, policy: Any, packed: bool, count: int, device: str) -> Found:
    """One optimizer step on four ragged groups; FLOPs count the tokens that are real, each prompt once per group."""
    learner = LearnerConfig.model_validate({"checkpointing": policy, "token_budget": max(work.group, 8192)})
    trainer = make_trainer(shape, learner, device, completion=work.completion, packed=packed)
    lengths = [max(2, work.completion * length // RAGGED[0]) for length in RAGGED]
    found = steps(trainer, [group(i, work.prompt, lengths, shape.vocab) for i in range(4)], count, device)
    tokens = 4 * (work.prompt + sum(lengths) - len(lengths))
    rate = utilisation(shape, tokens, found["step_seconds"], full=False, device=device)
    return {"policy": policy, "tokens": tokens, "tokens_per_s": tokens / found["step_seconds"], **found, **rate}


def table(found: dict[str, Found]) -> tuple[list[str], list[list[str]]]:
    header = ["row", "ms", "error", "peak GB", "tokens / s", "MFU", "remark"]
    lines = []
    for name, one in found.items():
        if one["status"] != "ok":
            lines.append([name, one["status"], *[""] * 5])
        elif "available" in one:
            for kernel in one["available"]:
                error = max(one[kernel]["errors"].values())
                lines.append([f"{name} {kernel}", f"{one[kernel]['ms']:.2f}", f"{error:.1e}", *[""] * 4])
        elif "way" in one:
            peak = "" if one["peak"] is None else f"{one['peak'] / 1e9:.2f}"
            lines.append([name, f"{one['ms']:.2f}", f"{one['error']:.1e}", peak, "", "", ""])
        else:
            mfu = "" if one["mfu"] is None else f"{one['mfu']:.0%}"
            told = "" if one["packed"] else "padded"
            if "card_share" in one:
                told = f"the card computes {one['card_share']:.0%} of the time, {one['kernels']} kernels"
            cells = [f"{one['step_seconds'] * 1e3:.0f}", "", f"{one['allocated'] / 1e9:.2f}"]
            lines.append([name, *cells, f"{one['tokens_per_s']:.0f}", mfu, told])
    return header, lines
