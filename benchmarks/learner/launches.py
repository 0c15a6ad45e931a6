"""What a step of the learner asks of a card: operations to start, bytes to move, products. Counted on torch's meta
device by the code that trains, without a card.

    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.launches            the rows of the result
    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.launches Llama-3.2-1B --base nf4 --budget 6536
    git worktree add build/before 44d996ef && PYTHONPATH=. .venv/bin/python -m benchmarks.learner.launches \\
        --beside build/before                                           with the counts of another commit's code

An operation counts if it is not a view: on a card each is a kernel or more. Its bytes are those of its inputs and
outputs. Roofline: what the products need at the card's rate (cluster.memory.plan.CARDS), or what the bytes need,
whichever is longer, operation by operation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from benchmarks.common import as_table, conditions, parser_of, save, under
from cluster.memory.plan import named
from cluster.memory.shape import SHAPES
from learner.config.settings import LearnerConfig, LoraConfig
from learner.tools.meta_run import footprint
from learner.trainer.trainer import Trainer

GROUPS, GENERATIONS, PROMPT, COMPLETION = 8, 8, 256, 786
TOGETHER = 48  # tensors of a list that one of torch's multi-tensor kernels takes, about
MADE = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "_local_scalar_dense", "is_same_size")


class Case(NamedTuple):
    shape: str
    base: str
    checkpointing: Any
    budget: int


CASES = (
    Case("Llama-3.2-1B", "none", "none", 8192), Case("Llama-3.2-1B", "none", "none", 16384),
    Case("Llama-3.2-1B", "nf4", "none", 8192), Case("Llama-3.1-8B", "none", "none", 8192),
    Case("Llama-3.2-1B", "nf4", "none", 16384), Case("Llama-3.1-8B", "nf4", 24, 2048),
    Case("Llama-3.1-8B", "nf4", "full", 6536), Case("Qwen3-4B", "none", "none", 8192),
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
        tensors = {id(one): one for one in tree_iter((args, kwargs, result)) if isinstance(one, Tensor)}
        moved = sum(one.numel() * one.element_size() for one in tensors.values())
        if name == "gemm_4bit":  # of bitsandbytes: packed numbers, so its formula is ours
            products = 2 * result.numel() * args[0].shape[-1]
        else:
            formula = flop_registry.get(op.overloadpacket)
            products = formula(*args, **kwargs, out_val=result) if formula else 0
        listed = len(args[0]) if name.startswith("_foreach") else 1
        self.launches[name] += -(-listed // TOGETHER)
        self.moved[name] += moved
        self.products += products
        self.seconds += max(products / self._flops, moved / self._bandwidth)


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

    groups = [(PROMPT, [COMPLETION] * GENERATIONS)] * GROUPS
    with count, patch.object(Trainer, "_step", counting):
        footprint(SHAPES[case.shape], learner, groups, base=case.base)
    return count


def numbers(case: Case, card: str, most: int) -> dict[str, Any]:
    """What is told of a case; `most`: operations that are named."""
    count = counted(case, card)
    return {"operations": count.launches.total(), "GB": count.moved.total() / 1e9, "TFLOP": count.products / 1e12,
            "seconds": count.seconds, "names": count.launches.most_common(most)}  # fmt: skip


def numbers_of(checkout: Path, case: Case, card: str) -> dict[str, Any]:
    """The same by the code of another commit, in a process of its own."""
    told = [case.shape, "--base", case.base, "--checkpointing", str(case.checkpointing), "--budget", str(case.budget)]
    command = [sys.executable, __file__, *told, "--card", card, "--json"]
    env = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("shape", nargs="?", choices=list(SHAPES), help="else the rows of the result")
    parser.add_argument("--base", choices=["none", "nf4"], default="none")
    parser.add_argument("--checkpointing", default="none", help="none, full, or the number of layers")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--card", default="h100")
    parser.add_argument("--most", type=int, default=12, help="operations that are named")
    parser.add_argument("--beside", type=Path, help="a checkout of another commit, whose code counts, too")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options, rows = parse(), []
    kept = int(options.checkpointing) if options.checkpointing.isdigit() else options.checkpointing
    cases = CASES if options.shape is None else (Case(options.shape, options.base, kept, options.budget),)
    if options.json:
        print(json.dumps(numbers(cases[0], options.card, options.most)))
        return
    told = conditions()
    for case in cases:
        count = numbers(case, options.card, options.most)
        before = None if options.beside is None else numbers_of(options.beside, case, options.card)
        both = [count] if before is None else [before, count]
        own = [case.shape, case.base, str(case.checkpointing), str(case.budget)]
        parts = {"operations": ",", "GB": ".0f", "TFLOP": ".0f", "seconds": ".2f"}
        rows.append([*own, *(" -> ".join(f"{one[key]:{how}}" for one in both) for key, how in parts.items())])
        print(" | ".join(rows[-1]), *(f"\n    {name} {n}" for name, n in count["names"]), flush=True)
    header = ["model", "base", "checkpointing", "tokens", "operations", "GB", "TFLOP", "s, roofline"]
    if options.shape is None:
        lengths = f"{GROUPS} groups of {GENERATIONS} completions of {COMPLETION} tokens, prompts of {PROMPT}"
        text = (
            f"# Operations of a step of the learner\n\n{as_table(header, rows)}\n\nLoRA r = 16, bfloat16, {lengths}; "
            f"card: {options.card}. {_commit(options.beside)}\n\n"
            f"Conditions: {under(told, 'counted on the meta device')}"
        )
        save("launches", {"conditions": told, "rows": rows}, text)


def _commit(checkout: Path | None) -> str:
    if checkout is None:
        return ""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"Before the arrow: commit {name}."


if __name__ == "__main__":
    main()
