"""PPO's four roles on one 7B and one card of 80 GB: as four models, and as adapters on one base. By the memory model.

python -m benchmarks.learner.four_roles     # writes the result, and the table into docs/memory.md
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.memory.generator import Serving, cache_bytes, generator_bytes
from cluster.memory.learner import Learning, Micro, learner_bytes
from cluster.memory.plan import USABLE
from cluster.memory.shape import GB, SHAPES, Parts, total
from learner.driver import memory

ROOT = Path(__file__).parents[2]
DOCUMENT, RESULT = ROOT / "docs" / "memory.md", ROOT / "benchmarks" / "results" / "four_roles.json"
BEGIN, END = "<!-- made by benchmarks.learner.four_roles -->\n", "<!-- end of four roles -->"

SHAPE, CARD = SHAPES["Qwen2.5-7B"], "80"  # GB as sold
PROMPT, COMPLETION, TOKENS, SEQUENCES = 512, 512, 4096, 64  # of a micro-batch; decoded at once
BASE = 2 * SHAPE.params
TRAINED = ("adapters", "gradients", "optimizer")
STEP = ("checkpoints", "activations", "live", "update", "fragmentation")


@dataclass(frozen=True, slots=True)
class Row:
    """bases: copies of it, the generator's included."""

    what: str
    bases: int
    learner: Parts
    models: int = 1  # trained in the way of `learner`
    adapters: int = 2  # that the generator holds

    @property
    def parts(self) -> Parts:
        """Bytes by column of the table."""
        kv = cache_bytes(SHAPE, "bfloat16", PROMPT + COMPLETION, SEQUENCES, cuda=True)
        serving = Serving(adapters=self.adapters, sequences=SEQUENCES, kv_bytes=kv, longest=PROMPT + COMPLETION)
        generator = generator_bytes(SHAPE, serving)
        return {
            "bases": self.bases * BASE,
            "trained": self.models * sum(self.learner[name] for name in TRAINED),
            "step": sum(self.learner[name] for name in STEP),
            "generator": total(generator) - generator["weights"] - generator["context"],
            "contexts": self.learner["context"] + generator["context"],
        }


def rows() -> list[Row]:
    micro = Micro.of(PROMPT, COMPLETION, 1, TOKENS)
    whole, lora, one = (
        learner_bytes(SHAPE, learning, micro)
        for learning in (Learning(mode="full"), Learning(), Learning(frozen_ranks=(16,), value_rank=16))
    )
    return [
        Row("four models, policy and value trained as a whole (AdamW)", 5, whole, models=2, adapters=0),
        Row("four models, LoRA on policy and value", 5, lora, models=2),
        Row("one base for the four roles, one for the generator (`memory.layout: auto`)", 2, one),
        Row("one base for all five (`memory.layout: shared`)", 1, one),
    ]


def report() -> str:
    """Markdown."""
    usable = USABLE * memory.card_size(CARD).bytes
    trained, rest = (
        "trained: masters, gradients, moments",
        "generator: KV cache, adapters, workspace, graphs, fragments",
    )
    lines = [
        f"| GB | copies of the base | {trained} | a step | {rest} | contexts | **sum** | fits {usable / GB:.0f} |",
        "| --- " * 8 + "|",
    ]
    for row in rows():
        cells = [f"{row.bases} x {BASE / GB:.1f}", *(f"{size / GB:.1f}" for size in list(row.parts.values())[1:])]
        fits = "yes" if total(row.parts) <= usable else "no"
        lines.append(f"| {row.what} | {' | '.join(cells)} | **{total(row.parts) / GB:.1f}** | {fits} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the result and the document's table."""
    RESULT.write_text(json.dumps({row.what: row.parts for row in rows()}, indent=2) + "\n")
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{report()}{END}", text, flags=re.DOTALL))
    print(report())


if __name__ == "__main__":
    main()
