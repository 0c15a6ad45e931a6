"""LoRA on a base in 4 bits: PEFT's own forward passes against learner.model.lora.

    PYTHONPATH=. OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.learner.four_bits [--device cuda] [--tokens 512 2048]

Counted: the operations of a whole step on tensors without content, and the least time that they take on a card
(benchmarks/learner/roofline.py). Measured: forward and backward through a random model of two layers, 2048 wide, rank
16 on every linear layer. Both ways take turns in one process. On a CPU seconds are of CPU time; peaks are of tensors
held at once beside the model's own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from benchmarks.common import MIB, Peak, as_table, conditions, relative_error, save, under
from benchmarks.learner import roofline
from examples.random_model import VOCAB_SIZE, make_tiny_model
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model import lora
from learner.model.policy import Policy

WIDTH, LAYERS = 2048, 2
GROUPS = [(256 - i, [800] * 16) for i in range(4)]
STEPS = [("Llama-3.2-1B", "none", GROUPS), ("Llama-3.1-8B", "full", GROUPS)]


class Ways:
    """One policy, computed in either way."""

    def __init__(self, folder: Path, device: str, longest: int) -> None:
        path = make_tiny_model(
            folder, hidden_size=WIDTH, layers=LAYERS, heads=32, kv_heads=8, max_length=longest, family="Llama",
            initializer_range=0.02,
        )  # fmt: skip
        self.policy = Policy(
            ModelConfig(path=str(path), dtype="bfloat16", base="nf4"), LoraConfig(rank=16, alpha=32),
            checkpointing="none", seed=0, device=torch.device(device),
        )  # fmt: skip
        with torch.no_grad():
            for master in self.policy.masters.values():
                master.normal_(std=0.02)
        self.policy.sync()
        layers: list[Any] = [module for module in self.policy._lm.modules() if isinstance(module, LoraLayer)]
        self._fused = {layer: layer.forward for layer in layers}

    def choose(self, *, fused: bool) -> None:
        for layer, forward in self._fused.items():
            vars(layer).pop("forward", None)
            if fused:
                layer.forward = forward

    def work(self, ids: Tensor) -> Tensor:
        self.policy.clear_gradients()
        states = self.policy.hidden(ids)
        torch.autograd.backward(states, torch.ones_like(states))
        return states.detach()


def counted() -> list[tuple[str, list[dict[str, list[float]]]]]:
    """Of each model the parts of a step, by PEFT's layers and by fused ones."""
    found = []
    for name, checkpointing, groups in STEPS:
        case = roofline.Case(name, "bfloat16", checkpointing, groups, cuda=True, base="nf4")
        with mock.patch.object(lora, "_is_plain", return_value=False):
            peft = roofline.count(case)
        rates = roofline.CARDS[0].reached()
        parts = [roofline.by_part(ops, rates) for ops in (peft, roofline.count(case))]
        found.append((f"{name}, {len(groups)} groups of 16 x 800 tokens, checkpointing: {checkpointing}", parts))
    return found


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds, of CPU time on a CPU."""
    if device == "cpu":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_of(work: Callable[[], object], device: str) -> int:
    if device == "cpu":
        with Peak() as peak:
            work()
        return peak.bytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def measure(ways: Ways, tokens: int, device: str, repeats: int) -> dict[str, Any]:
    ids = torch.randint(0, VOCAB_SIZE, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    seconds: dict[str, list[float]] = {"PEFT": [], "fused": []}
    peaks, states = {}, {}
    for turn in range(repeats + 1):
        for way, found in seconds.items():
            ways.choose(fused=way == "fused")
            if turn == 0:  # the first of each is not timed
                states[way] = ways.work(ids)
                peaks[way] = peak_of(lambda: ways.work(ids), device)
            else:
                found.append(timed(lambda: ways.work(ids), device))
    apart = relative_error(states["fused"].float(), states["PEFT"].float())
    return {"tokens": tokens, "seconds": seconds, "peaks": peaks, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    told = conditions(("torch", "transformers", "peft", "bitsandbytes"))
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(Path(folder), options.device, max(options.tokens))
        found = [measure(ways, tokens, options.device, options.repeats) for tokens in options.tokens]
    rows = []
    for row in found:
        peft, fused = (median(row["seconds"][way]) for way in ("PEFT", "fused"))
        peaks = [f"{row['peaks'][way] / MIB:.0f}" for way in ("PEFT", "fused")]
        cells = [f"{peft:.3f}", f"{fused:.3f}", f"{fused / peft:.2f}", *peaks, f"{row['apart']:.1e}"]
        rows.append([str(row["tokens"]), *cells])
    header = ["tokens", "PEFT, s", "fused, s", "ratio", "PEFT, MiB", "fused, MiB", "states apart"]
    steps = counted()
    tables = "\n\n".join(f"{name}:\n\n{roofline.table(parts, 'PEFT')}" for name, parts in steps)
    text = (
        f"# LoRA on a base in 4 bits\n\n## Counted\n\n{tables}\n\nms: the least on an {roofline.CARDS[0].name}, from "
        f"counts (roofline.md says how). PEFT, then now.\n\n## Measured on {options.device}\n\n"
        f"{as_table(header, rows)}\n\nForward and backward of {LAYERS} layers, {WIDTH} wide; medians. "
        f"{under(told, 'CPU time' if options.device == 'cpu' else 'Wall time')}\n"
    )
    save(f"four_bits_{options.device}", {"conditions": told, "rows": found, "counted": steps}, text)


if __name__ == "__main__":
    main()
