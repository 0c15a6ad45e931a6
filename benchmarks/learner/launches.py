"""What a step of the learner asks of a card: operations to start, bytes to move, products. Counted on torch's meta
device by the code that trains, without a card.

    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.launches            the rows of the result
    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.launches Llama-3.2-1B --base nf4 --budget 6536
    git worktree add build/before 44d996ef && PYTHONPATH=. .venv/bin/python -m benchmarks.learner.launches \\
        --beside build/before                                           with the counts of another commit's code

An operation counts if it is not a view: on a card each is a kernel or more. Its bytes are those of its inputs and
outputs. Roofline: what the products need at the card's rate (cluster.memory.plan.CARDS), or what the bytes need,
whichever is longer, operation by operation. Beside it, what a CPU needs to start the operations one by one: where that
is longer, launches bind, and CUDA graphs would pay.

The gated delta rule is what the learner takes: functions of torch, or, with --fla, the kernel of
flash-linear-attention where that is installed (pip install 'gleaner-rl[hybrid]'). It has no meta form, so it is counted
by what its source (fla/ops/gated_delta_rule/chunk.py) launches and computes, about; its calls are the learner's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from benchmarks.common import as_table, conditions, parser_of, save, under
from cluster.memory.plan import named
from cluster.memory.shape import shape_of
from learner.config.settings import LearnerConfig, LoraConfig
from learner.tools.meta_run import footprint
from learner.trainer.trainer import Trainer

GROUPS, GENERATIONS, PROMPT, COMPLETION = 8, 8, 256, 786
TOGETHER = 48  # tensors of a list that one of torch's multi-tensor kernels takes, about
LAUNCH = 5.0  # us of a CPU to start an operation, as in benchmarks/results/roofline.md; 3 to 6 are usual
MADE = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "_local_scalar_dense", "is_same_size")

LEGEND = (
    f"s, launches: at {LAUNCH:.0f} us an operation, which is assumed and not measured. Above a quotient of 1 a step "
    "waits for launches, and CUDA graphs of micro-batches would pay. Qwen3.5-4B has three layers of the gated delta "
    "rule to one of attention: with functions of torch, chunk by chunk, and (fla) with the kernel of "
    "flash-linear-attention, which is counted by its source."
)


class Case(NamedTuple):
    """shape: a name of the table or a folder with a config.json. fla: whether the gated delta rule is its kernel."""

    shape: str
    base: str
    checkpointing: Any
    budget: int
    fla: bool = False


CASES = (
    Case("Llama-3.2-1B", "none", "none", 8192), Case("Llama-3.2-1B", "none", "none", 16384),
    Case("Llama-3.2-1B", "nf4", "none", 8192), Case("Llama-3.1-8B", "none", "none", 8192),
    Case("Llama-3.2-1B", "nf4", "none", 16384), Case("Llama-3.1-8B", "nf4", 24, 2048),
    Case("Llama-3.1-8B", "nf4", "full", 6536), Case("Qwen3-4B", "none", "none", 8192),
    Case("Qwen3.5-4B", "none", 16, 6536), Case("Qwen3.5-4B", "none", "none", 8192),
    Case("Qwen3.5-4B", "none", "none", 8192, fla=True),
)  # fmt: skip


class Count(TorchDispatchMode):
    """Counts the operations of a step while `on`. launches, moved (bytes), products (operations): by name."""

    def __init__(self, flops: float, bandwidth: float) -> None:
        super().__init__()
        self.on = False
        self.launches: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.products = self.seconds = 0.0
        self._flops, self._bandwidth = flops, bandwidth

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if self.on and self._starts(op):
            self._take(op, args, kwargs or {}, result)
        return result

    @staticmethod
    def _starts(op: Any) -> bool:
        """Whether the operation is more than a view of its input, or memory without content."""
        if op.overloadpacket.__name__ in MADE:
            return False
        returned = [one.alias_info for one in op._schema.returns]
        return not returned or any(alias is None or alias.is_write for alias in returned)

    def _take(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = op.overloadpacket.__name__
        if name == "gemm_4bit":  # of bitsandbytes: packed numbers, so its formula is ours
            products = 2 * result.numel() * args[0].shape[-1]
        else:
            formula = flop_registry.get(op.overloadpacket)
            products = formula(*args, **kwargs, out_val=result) if formula else 0
        listed = len(args[0]) if name.startswith("_foreach") else 1
        self.add(name, -(-listed // TOGETHER), bytes_of(args, kwargs, result), products)

    def add(self, name: str, launches: int, moved: int, products: float) -> None:
        self.launches[name] += launches
        self.moved[name] += moved
        self.products += products
        self.seconds += max(products / self._flops, moved / self._bandwidth)


def bytes_of(*values: Any) -> int:
    """Of all tensors in the values, each counted once."""
    tensors = {id(one): one for one in tree_iter(values) if isinstance(one, Tensor)}
    return sum(one.numel() * one.element_size() for one in tensors.values())


# What the kernel of flash-linear-attention launches. Forward: two norms of keys and queries, sums of decays, K K^T, the
# inverse of its triangle, w and u, states, outputs. Backward: w, u and states again, slopes of values, of states, of
# queries and keys, and of the inverse, two sums, decays, and the two norms.
KERNELS, KERNELS_BACK, CHUNK = 8, 11, 64


def _delta_rule(count: Count) -> Callable[..., tuple[Tensor, Tensor]]:
    """Counts calls of transformers' torch_chunk_gated_delta_rule as that kernel, and answers with empty tensors."""

    def work(query: Tensor, value: Tensor) -> tuple[float, int]:
        """Products of a forward pass, and bytes of the states before each chunk."""
        rows, tokens, heads, keys = query.shape
        values = value.shape[-1]
        products = 2 * CHUNK * (3 * keys + 2 * values) + 6 * keys * values  # of a token and head
        state = rows * heads * -(-tokens // CHUNK) * keys * values * query.element_size()
        return rows * tokens * heads * products, state

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
            ctx.save_for_backward(*inputs)
            query, key, value, _, _, state = inputs
            found = torch.empty_like(value), torch.empty_like(state)
            products, states = work(query, value)
            if count.on:  # w, u and the values' corrections are written and read
                between = 2 * bytes_of(key) + 4 * bytes_of(value) + 2 * states
                count.add("fla forward", KERNELS, bytes_of(inputs, found) + between, products)
            return found

        @staticmethod
        def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
            inputs = ctx.saved_tensors
            found = tuple(map(torch.empty_like, inputs))
            products, states = work(inputs[0], inputs[2])
            between = 4 * bytes_of(inputs[1]) + 6 * bytes_of(inputs[2]) + 4 * states
            if count.on:
                moved = bytes_of(inputs, slopes, found) + between
                count.add("fla backward", KERNELS_BACK, moved, 3 * products)
            return found

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        if initial_state is None:
            initial_state = torch.empty(len(key), key.shape[2], key.shape[3], value.shape[3], device=key.device)
        found: tuple[Tensor, Tensor] = Rule.apply(query, key, value, g, beta, initial_state)
        return found

    return rule


def counted(case: Case, card: str) -> Count:
    """The counts of a step of 8 groups of 8 completions of 786 tokens. Raises ValueError as `footprint` does."""
    (kind,) = named(card)
    count, step = Count(kind.flops, kind.bandwidth), Trainer._step
    learner = LearnerConfig(
        groups_per_step=GROUPS,
        token_budget=case.budget,
        checkpointing=case.checkpointing,
        lora=LoraConfig(rank=16, alpha=32),
    )

    def counting(self: Trainer, *args: Any) -> Any:
        count.on = True
        try:
            return step(self, *args)
        finally:
            count.on = False

    # Prompts that differ: equal ones would be one group.
    groups = [(PROMPT - i, [COMPLETION] * GENERATIONS) for i in range(GROUPS)]
    name = "transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule"
    with (
        count,
        patch.object(Trainer, "_step", counting),
        patch(name, _delta_rule(count)) if case.fla else nullcontext(),
    ):
        footprint(shape_of(case.shape), learner, groups, base=case.base)
    return count


def numbers(case: Case, card: str, most: int) -> dict[str, Any]:
    """What is told of a case; `most`: operations that are named."""
    count = counted(case, card)
    return {"operations": count.launches.total(), "GB": count.moved.total() / 1e9, "TFLOP": count.products / 1e12,
            "seconds": count.seconds, "names": count.launches.most_common(most)}  # fmt: skip


def numbers_of(checkout: Path, case: Case, card: str) -> dict[str, Any]:
    """The same by the code of another commit, in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    with tempfile.TemporaryDirectory() as folder:  # its table need not know the shape
        (Path(folder) / "config.json").write_text(json.dumps(shape_of(case.shape).to_config()))
        told = [folder, "--base", case.base, "--checkpointing", str(case.checkpointing), "--budget", str(case.budget)]
        command = [sys.executable, __file__, *told, *(["--fla"] if case.fla else []), "--card", card, "--json"]
        done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "shape", nargs="?", help="a name of the table, or a folder with a config.json; else the rows of the result"
    )
    parser.add_argument("--base", choices=["none", "nf4"], default="none")
    parser.add_argument("--checkpointing", default="none", help="none, full, or the number of layers")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--fla", action="store_true", help="the gated delta rule by flash-linear-attention's kernel")
    parser.add_argument("--card", default="h100")
    parser.add_argument("--most", type=int, default=12, help="operations that are named")
    parser.add_argument("--beside", type=Path, help="a checkout of another commit, whose code counts, too")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options, rows = parse(), []
    kept = int(options.checkpointing) if options.checkpointing.isdigit() else options.checkpointing
    cases = CASES if options.shape is None else (Case(options.shape, options.base, kept, options.budget, options.fla),)
    if options.json:
        print(json.dumps(numbers(cases[0], options.card, options.most)))
        return
    told = conditions()
    for case in cases:
        count = numbers(case, options.card, options.most)
        before = None if options.beside is None else numbers_of(options.beside, case, options.card)
        rows.append(_row(case, [count] if before is None else [before, count]))
        print(" | ".join(rows[-1]), *(f"\n    {name} {n}" for name, n in count["names"]), flush=True)
    header = ["model", "base", "checkpointing", "tokens", "operations", "GB", "TFLOP", "s, roofline", "s, launches",
              "launches / roofline"]  # fmt: skip
    if options.shape is None:
        lengths = f"{GROUPS} groups of {GENERATIONS} completions of {COMPLETION} tokens, prompts of up to {PROMPT}"
        text = (
            f"# Operations of a step of the learner\n\n{as_table(header, rows)}\n\nLoRA r = 16, bfloat16, {lengths}; "
            f"card: {options.card}. {_commit(options.beside)}\n\n{LEGEND}\n\n"
            f"Conditions: {under(told, 'counted on the meta device')}"
        )
        save("launches", {"conditions": told, "rows": rows}, text)


def _row(case: Case, counts: list[dict[str, Any]]) -> list[str]:
    """A row of the table. counts: of the code before, if asked for, and of this code."""
    told = [one | {"launches": one["operations"] * LAUNCH / 1e6} for one in counts]
    told = [one | {"quotient": one["launches"] / one["seconds"]} for one in told]
    parts = {"operations": ",", "GB": ".0f", "TFLOP": ".0f", "seconds": ".2f", "launches": ".2f", "quotient": ".2f"}
    own = [case.shape + ", fla" * case.fla, case.base, str(case.checkpointing), str(case.budget)]
    return [*own, *(" -> ".join(f"{one[key]:{how}}" for one in told) for key, how in parts.items())]


def _commit(checkout: Path | None) -> str:
    if checkout is None:
        return ""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"Before the arrow: commit {name}."


if __name__ == "__main__":
    main()
