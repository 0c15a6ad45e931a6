"""What others have published of their memory, beside the plan's terms at their settings.

A row is theirs in settings and arrangement, and ours in arithmetic: cluster.memory says what a step takes, and what
their code holds otherwise than ours (weights in float32, several adapters, copies for a distributed run) is added term
by term as their source has it, at the commit that is named. Nothing is fitted to a measurement. Where settings or
arrangement are not the same or not known, the row says so and no comparison is claimed.

    python -m benchmarks.learner.published_memory     # writes the result, and the table into docs/memory.md
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from cluster.memory.generator import Serving, generator_bytes, kv_token_bytes
from cluster.memory.learner import FRAGMENTATION, Learning, Micro, learner_bytes, learner_static, step_bytes
from cluster.memory.plan import Workload
from cluster.memory.shape import GB, SHAPES, Parts, Shape, total

GIB = 2**30
ROOT = Path(__file__).parents[2]
DOCUMENT, RESULT = ROOT / "docs" / "memory.md", ROOT / "benchmarks" / "results" / "published_memory.json"
BEGIN, END = "<!-- made by benchmarks.learner.published_memory -->\n", "<!-- end -->"

LENGTHS = Workload(generations=4, prompt=256, completion=786)
FIVE = ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-14B")
# Oxen-AI/GRPO-With-Cargo-Feedback, images/memory-usage.png: G = 4, prompt 256, completion 786, one prompt a
# micro-batch; GB as nvidia-smi shows them, by the models of FIVE, None where it ran out of 80. Another learner by
# another measure: TRL of early 2025 with whole padded groups and all logits, and generate() in the same process.
GRPO_TABLE: dict[str, tuple[int | None, ...]] = {
    "full fine-tune, AdamW": (25, 38, 58, None, None),
    "+ 8-bit Adam": (16, 26, 52, None, None),
    "+ 8-bit Adam + checkpointing": (15, 24, 41, 72, None),
    "LoRA (q, k, o, up, down)": (13, 16, 32, 58, 69),
}
MANY, COUNTS = "Llama-3.2-1B", (4, 8, 16, 32, 64)  # completions of a problem
# With what ours is compared: the same weights trained, the same recomputation.
SAME: dict[str, Learning] = {
    "full fine-tune, AdamW": Learning(mode="full", optimizer="adamw_rounded", checkpointing="none"),
    "+ 8-bit Adam": Learning(mode="full", optimizer="adamw_8bit", checkpointing="none"),
    "+ 8-bit Adam + checkpointing": Learning(mode="full", optimizer="adamw_8bit", checkpointing="full"),
    "LoRA (q, k, o, up, down)": Learning(checkpointing="none"),
}
# benchmarks/results/BENCHMARKS.md of 7 February 2026, code at b0cabb979; unsloth.ai/blog/grpo, 20 February 2025
PRIME_RL, UNSLOTH = "prime-rl", "Unsloth"


@dataclass(frozen=True, slots=True)
class Row:
    """One published number, and beside it the plan of a learner whose norms and MLPs are transformers' own, as theirs
    are, and of ours. `apart`: why plan and number are not of the same thing; '': they are."""

    source: str
    what: str
    published: float  # bytes
    plans: tuple[Parts, Parts]
    apart: str = ""

    @property
    def difference(self) -> float:
        """Of the plan from what was published, as a share of it."""
        return total(self.planned) / self.published - 1

    @property
    def planned(self) -> Parts:
        return self.plans[0]


def rows() -> list[Row]:
    return [*_prime_rl(), *_unsloth()]


def _prime_rl() -> list[Row]:
    """One H100, recomputation of every layer, one packed sequence a micro-batch; torch.cuda.max_memory_reserved."""
    measured = [
        ("Qwen3-0.6B", "full", 16384, False, 12.5), ("Qwen3-0.6B", "full", 65536, False, 19.6),
        ("Qwen3-0.6B", "full", 65536, True, 16.1), ("Qwen3-0.6B", "lora", 16384, False, 5.1),
        ("Qwen3-0.6B", "lora", 65536, False, 11.5), ("Qwen3-0.6B", "lora", 65536, True, 7.9),
        ("Qwen3-4B", "lora", 16384, False, 23.3), ("Qwen3-4B", "lora", 16384, True, 20.6),
        ("Qwen3-4B", "lora", 65536, False, 42.0), ("Qwen3-4B", "lora", 65536, True, 31.1),
    ]  # fmt: skip
    return [
        Row(
            PRIME_RL, f"{name}, {'LoRA r 16' if mode == 'lora' else mode}, {tokens // 1024}k tokens"
            f"{', boundaries in host memory' if offload else ''}",
            gib * GIB,
            both(partial(_as_prime_rl, SHAPES[name], mode == "full", tokens, offload)),
        )
        for name, mode, tokens, offload, gib in measured
    ]  # fmt: skip


def both(plan: Callable[[bool], Parts]) -> tuple[Parts, Parts]:
    """Of a learner without fused operations, and with."""
    return plan(False), plan(True)


def _as_prime_rl(shape: Shape, full: bool, tokens: int, offload: bool, fused: bool) -> Parts:
    """What prime-rl's trainer holds on one card.

    FSDP2 with float32 parameters (`optimization_dtype`), which are cast to bfloat16 as they are used: of a tied model
      the embedding stays cast, since it is of the root group, and two layers are, one of them prefetched (model.py).
    Full: float32 gradients and AdamW's two float32 states. LoRA: its benchmark makes room for four adapters
      (--max-concurrent-runs 4), float32 weights and gradients of each; with made-up data none of them has a run, so
      there are no optimizer states.
    The step is ours: boundaries of all layers and one layer at work; its head keeps no logits either.
    """
    learning = Learning(mode="full" if full else "lora", checkpointing="full", offload=offload, fused=fused)
    step = step_bytes(shape, learning, Micro(tokens, tokens, tokens))
    layer = shape.linear_params // shape.layers
    cast = 2 * shape.vocab * shape.hidden + 2 * 2 * layer
    trained = 12 * shape.params if full else 4 * 8 * shape.lora_params(16)
    fragmentation = round(FRAGMENTATION * total(step))
    return {"weights": 4 * shape.params, "cast": cast, "trained": trained, **step, "fragmentation": fragmentation}


def _unsloth() -> list[Row]:
    """Llama 3.1 8B, 20K tokens, 8 generations in one micro-batch: parts that they calculate, in GiB (as their logits
    are). What goes into that of training, and the adapter's rank, they do not say; here all of the learner, and 16."""
    shape, tokens = SHAPES["Llama-3.1-8B"], 20 * 1024
    micro = Micro(8 * tokens, 8 * tokens, 8 * tokens)

    def training(fused: bool) -> Parts:
        learning = Learning(base="nf4", checkpointing="full", offload=True, fused=fused)
        return learner_static(shape, learning) | step_bytes(shape, learning, micro)

    cache = {"kv_cache": tokens * kv_token_bytes(shape, "bfloat16")}
    head = "not the same: it has 9.8 GiB for the loss, where this head keeps one tile of logits"
    small = SHAPES["Qwen2.5-1.5B"]
    serving = Serving(base="nf4", sequences=8, kv_bytes=8 * 456 * kv_token_bytes(small, "bfloat16"), adapters=1)
    held = generator_bytes(small, serving).items()
    one_copy = {f"generator: {name}": size for name, size in held if name != "weights"}

    def little(fused: bool) -> Parts:
        return learner_bytes(small, Learning(base="nf4", fused=fused), Micro.of(256, 200, 8, 455)) | one_copy

    lengths = "not the same: lengths, generations and cache are not said; here 256 + 200 tokens, G = 8, one base"
    long = "Llama-3.1-8B in 4 bits, 8 x 20k tokens, boundaries in host memory: training"
    return [
        Row(UNSLOTH, long, 42 * GIB, both(training)),
        Row(UNSLOTH, "the same: KV cache of one sequence of 20k tokens", 2.5 * GIB, (cache, cache)),
        Row(UNSLOTH, "the same: sum", 54.3 * GIB, both(lambda fused: training(fused) | cache), head),
        Row(UNSLOTH, "Qwen2.5-1.5B in 4 bits, `just 5GB VRAM`", 5 * GB, both(little), lengths),
    ]


def grpo_cells() -> dict[str, list[tuple[int | None, int]]]:
    """By method and model of FIVE: (GB published, bytes of our learner alone), the same weights trained."""
    micro = Micro.of(LENGTHS.prompt, LENGTHS.completion, LENGTHS.generations, LENGTHS.group)
    ours = {
        method: [total(learner_bytes(SHAPES[name], learning, micro)) for name in FIVE]
        for method, learning in SAME.items()
    }
    return {method: list(zip(sizes, ours[method], strict=True)) for method, sizes in GRPO_TABLE.items()}


def by_generations() -> dict[str, list[int]]:
    """Bytes of the 1B's LoRA learner for COUNTS completions of a problem, by recomputation and micro-batch."""
    found = {}
    ways = {"every layer kept": Learning(checkpointing="none"), "every layer twice": Learning(checkpointing="full")}
    for words, learning in ways.items():
        works = [replace(LENGTHS, generations=count) for count in COUNTS]
        for micro, budgets in (
            (f"{LENGTHS.group} tokens", [LENGTHS.group] * len(COUNTS)),
            ("a whole group", [work.group for work in works]),
        ):
            batches = [
                Micro.of(work.prompt, work.completion, work.generations, budget)
                for work, budget in zip(works, budgets, strict=True)
            ]
            found[f"{words}, micro-batch of {micro}"] = [
                total(learner_bytes(SHAPES[MANY], learning, batch)) for batch in batches
            ]
    return found


def report(found: Sequence[Row]) -> str:
    """Markdown: rows beside the plan, or what sets them apart; the published table; more and more completions."""
    lines = ["| published | by | GiB | plan, GiB | plan is | with our kernels |", "| --- " * 6 + "|"]
    lines += [
        f"| {row.what} | {row.source} | {row.published / GIB:.1f} | {total(row.planned) / GIB:.1f} | "
        f"{row.apart or f'{row.difference:+.1%}'} | {total(row.plans[1]) / GIB:.1f} |"
        for row in found
    ]
    lines += ["", f"| GB, published / learner alone | {' | '.join(FIVE)} |", "| --- " * 6 + "|"]
    for method, cells in grpo_cells().items():
        texts = [f"{'> 80' if size is None else size} / {own / GB:.1f}" for size, own in cells]
        lines.append(f"| {method} | {' | '.join(texts)} |")
    lines += ["", f"| GB of {MANY} with LoRA, `num_generations` | {' | '.join(map(str, COUNTS))} |"]
    lines.append("| --- " * (1 + len(COUNTS)) + "|")
    for words, sizes in by_generations().items():
        lines.append(f"| {words} | {' | '.join(f'{size / GB:.1f}' for size in sizes)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the result and the document's table."""
    found = rows()
    told = {"rows": [asdict(row) for row in found], "grpo_table": grpo_cells(), "generations": by_generations()}
    RESULT.write_text(json.dumps(told, indent=2) + "\n")
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{report(found)}{END}", text, flags=re.DOTALL))
    print(report(found))


if __name__ == "__main__":
    main()
