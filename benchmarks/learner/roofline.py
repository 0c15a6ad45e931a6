"""The learner's step taken apart: operations, work and bytes moved by part, and the time they would take at least.

The step runs on tensors without content (learner.tools.meta_run), as on a card or as on this CPU, and every operation
that would be launched is counted (benchmarks/learner/op_counter.py). An operation takes the longer of its work at the
rate that large products reach, and its bytes at the rate that large copies reach; nothing overlaps, nothing stays in a
cache, and launching is free. "ideal" is the products alone, with everything else fused into them.

    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.roofline --against REVISION

The same for the ragged 25M workload on one core of this machine, beside the measured step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.commits import checked_out, short
from benchmarks.common import as_table, conditions, save, under
from benchmarks.learner.op_counter import Op, OpCounter
from benchmarks.learner.ragged_step import LearnerConfig, read_groups
from benchmarks.learner.step_against_commit import side, write_inputs
from benchmarks.system.workloads import ROOT
from cluster.memory.shape import SHAPES, Shape
from learner.model import logprob
from learner.tools import meta_run
from learner.trainer.trainer import Trainer

# Of the data sheet, what large products and copies reach: on an H100 600 TFLOP/s and 2.6 TB/s.
SHARE_OF_FLOPS, SHARE_OF_BYTES = 0.61, 0.78
LAUNCH_S = 5e-6  # that a launch from Python takes a CPU at least; a card that is done sooner waits


class Card(NamedTuple):
    """From the maker's data sheet: bfloat16 with float32 sums, without sparsity."""

    name: str
    flops: float
    bytes: float

    def reached(self) -> Rates:
        return Rates(SHARE_OF_FLOPS * self.flops, SHARE_OF_BYTES * self.bytes)


class Rates(NamedTuple):
    flops: float
    bytes: float

    def seconds(self, op: Op) -> float:
        return max(op.flops / self.flops, op.bytes / self.bytes)


CARDS = (Card("H100 SXM", 989e12, 3.35e12), Card("A100 80GB", 312e12, 2.04e12), Card("RTX 4090", 165e12, 1.01e12))
RAGGED = Shape("ragged 25M", "llama", 384, 1024, 12, 6, 2, 64, 8004, tied=False)


class Case(NamedTuple):
    shape: str
    dtype: str
    checkpointing: str
    groups: list[tuple[int, list[int]]]  # tokens of a prompt and of its completions
    cuda: bool
    base: str = "none"


def count(case: Case) -> list[tuple[Op, int]]:
    """The operations of a step, and how often each is launched."""
    counter, plain = OpCounter(), Trainer._step

    def counted(trainer: Trainer, *args: Any) -> Any:
        with counter.entered():
            return plain(trainer, *args)

    shape = RAGGED if case.shape == RAGGED.name else SHAPES[case.shape]
    settings = LearnerConfig.model_validate({"checkpointing": case.checkpointing, "token_budget": 8192})
    with mock.patch.object(Trainer, "_step", counted), mock.patch.object(logprob, "_product", _float32_product):
        meta_run.footprint(shape, settings, case.groups, dtype=case.dtype, base=case.base, cuda=case.cuda)
    return list(counter.ops.items())


def _float32_product(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    """As on a card, from 16 bits to 32 in one operation. Before b7ce86a no tensor without content said that it is on
    one."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype != torch.float32 else a @ b


def count_in(root: Path, case: Case) -> list[tuple[Op, int]]:
    """By the code of a commit, in a process of its own. What that commit lacks of the benchmarks is taken from here."""
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "benchmarks.learner.roofline", "--count", json.dumps(case)]
    told = subprocess.run(command, env=environment, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [(Op(*op), times) for op, times in json.loads(told.splitlines()[-1])]


def own_rates() -> Rates:
    """Of one core of this machine, in products of the ragged model's size and copies of 64 MiB."""
    from learner.trainer.float32_products import choose_library  # here: earlier commits, which are counted, have none

    choose_library()
    a, b, big = torch.randn(8192, 384), torch.randn(384, 1024), torch.randn(2**24)
    flops = 2.0 * a.numel() * b.shape[1] / min(_seconds(lambda: a @ b) for _ in range(10))
    return Rates(flops, 2.0 * big.numel() * 4 / min(_seconds(big.clone) for _ in range(10)))


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def by_part(ops: list[tuple[Op, int]], rates: Rates) -> dict[str, list[float]]:
    """Part -> launches, bytes, work, seconds; and of all parts, with the ideal's seconds in place of the bytes."""
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for op, times in ops:
        for place, value in enumerate((1, op.bytes, op.flops, rates.seconds(op))):
            parts[op.part][place] += times * value
    return parts


def table(parts: list[dict[str, list[float]]], revision: str) -> str:
    rows = []
    before, now = parts
    nothing = [0.0] * 4
    for part in sorted(before.keys() | now.keys(), key=lambda part: -before.get(part, nothing)[3]):
        rows.append([part, *_cells(before.get(part, nothing), now.get(part, nothing))])
    rows.append(["**sum**", *_cells(_total(before), _total(now))])
    header = ["part", f"launches, {revision}", "now", "GB moved", "now", "TFLOP", "now", "ms", "now"]
    return as_table(header, rows)


def _cells(before: list[float], now: list[float]) -> list[str]:
    pairs = list(zip(before, now, strict=True))
    forms = ((1.0, ".0f"), (1e9, ".1f"), (1e12, ".2f"), (1e-3, ".0f"))
    return [format(value / unit, form) for pair, (unit, form) in zip(pairs, forms, strict=True) for value in pair]


def _total(parts: dict[str, list[float]]) -> list[float]:
    return [sum(column) for column in zip(*parts.values(), strict=True)]


def on_cards(counted: list[list[tuple[Op, int]]], revision: str) -> str:
    rows = []
    for card in CARDS:
        before, now = (_total(by_part(ops, card.reached())) for ops in counted)
        ideal = now[2] / card.reached().flops
        rows.append([
            card.name, f"{before[3]:.2f}", f"{now[3]:.2f}", f"{ideal:.2f}", f"{ideal / before[3]:.0%}",
            f"{ideal / now[3]:.0%}", f"{LAUNCH_S * before[0]:.2f}", f"{LAUNCH_S * now[0]:.2f}",
        ])  # fmt: skip
    header = ["card", f"s, {revision}", "s now", "ideal", f"share of it, {revision}", "now", "s of launches", "now"]
    return as_table(header, rows)


def on_this_cpu(roots: tuple[Path, Path], revision: str, turns: int) -> tuple[str, dict[str, Any]]:
    """float32, one core: what the parts should take, beside the measured step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        groups = [
            (len(table["prompt_ids"][0]), [len(ids) for ids in table["completion_ids"]])
            for table in read_groups(folder)
        ]
        counted = [count_in(root, Case(RAGGED.name, "float32", "none", groups, cuda=False)) for root in roots]
        core = max(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        rates = own_rates()
        with side(roots[0], folder, "float32", core) as before, side(roots[1], folder, "float32", core) as now:
            seconds = [[own.ask("step") for own in (before, now)] for _ in range(turns + 1)][1:]
    measured = [min(column) for column in zip(*seconds, strict=True)]
    parts = [by_part(ops, rates) for ops in counted]
    rooflines = [_total(part)[3] for part in parts]
    ideal = _total(parts[1])[2] / rates.flops
    text = (
        f"{table(parts, revision)}\n\nRates measured: {rates.flops / 1e9:.0f} GFLOP/s, {rates.bytes / 1e9:.1f} GB/s. "
        f"Measured step: {measured[0]:.2f} CPU-s at {revision} (roofline {rooflines[0]:.2f}), {measured[1]:.2f} now "
        f"(roofline {rooflines[1]:.2f}, ideal {ideal:.2f})."
    )
    return text, {"rates": rates, "measured": measured, "roofline": rooflines, "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", help="the commit that is compared with")
    parser.add_argument("--checkpointing", nargs="+", default=["none"], choices=["none", "mlp", "full"])
    parser.add_argument("--turns", type=int, default=3, help="steps that are timed on this CPU; 0 leaves it out")
    parser.add_argument("--count", help=argparse.SUPPRESS)  # a case: what count_in asks of a process
    options = parser.parse_args()
    if options.count:
        print(json.dumps(count(Case(*json.loads(options.count)))))
        return
    told = conditions()
    revision = short(options.against)
    sections: list[str] = []
    content: dict[str, Any] = {}
    with checked_out(revision) as before:
        for checkpointing in options.checkpointing:
            case = Case("Llama-3.2-1B", "bfloat16", checkpointing, [(256 - i, [800] * 16) for i in range(8)], cuda=True)
            counted = [count_in(root, case) for root in (before, ROOT)]
            parts = [by_part(ops, CARDS[0].reached()) for ops in counted]
            content[checkpointing] = parts
            sections.append(
                f"## Llama-3.2-1B, 8 groups of 16 x 800 tokens, bfloat16, checkpointing: {checkpointing}\n\n"
                f"{table(parts, revision)}\n\nms: on {CARDS[0].name}.\n\n{on_cards(counted, revision)}"
            )
        if options.turns:
            own, content["cpu"] = on_this_cpu((before, ROOT), revision, options.turns)
            sections.append(f"## The ragged 25M workload in float32, one core of this machine\n\n{own}")
    text = (
        "# Roofline of the learner's step\n\n" + "\n\n".join(sections) + "\n\n"
        f"An operation takes the longer of work and bytes at {SHARE_OF_FLOPS:.0%} and {SHARE_OF_BYTES:.0%} of the data "
        "sheet, none overlap, nothing stays in a cache. Ideal: the products alone. **No card was there**: these are "
        f"counts, and times that follow from them. s of launches: at {LAUNCH_S * 1e6:.0f} us each, what a CPU needs to "
        f"launch them one by one.\n\nConditions: {under(told, 'operations counted on tensors without content')}\n"
    )
    save("roofline", {"conditions": told, "revision": revision, **content}, text)


if __name__ == "__main__":
    main()
