"""What the memory model says, in three tables: beside what others have published, of PPO's four roles, and beside the
step that trains, run on tensors without content.

    python -m benchmarks.learner.memory_tables published      # writes the result and its tables
    python -m benchmarks.learner.memory_tables four_roles     # writes the result, and the table into docs/ppo.md
    PYTHONPATH=. OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.learner.memory_tables peaks [--models NAME ...]

published   A row is theirs in settings and arrangement, and ours in arithmetic: cluster.memory says what a step takes,
            and what their code holds otherwise than ours (weights in float32, several adapters, copies for a
            distributed run) is added term by term as their source has it, at the commit that is named. Nothing is
            fitted to a measurement. Where settings or arrangement are not the same or not known, the row says so and no
            comparison is claimed.
four_roles  PPO's four roles on one 7B and one card of 80 GB: as four models, and as adapters on one base.
peaks       The learner's peak for every shape of the table, LENGTHS, one prompt's completions a micro-batch. Adapter of
            rank 16 on all linear layers, bfloat16. Two groups, so that the second micro-batch meets the gradients of
            the first.
"""

import gc
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import LEARNER_PACKAGES, RESULTS, ROOT, as_table, conditions, cpu_seconds, parser_of, save, under
from cluster.memory.generator import Serving, cache_bytes, generator_bytes, kv_token_bytes
from cluster.memory.learner import FRAGMENTATION, Learning, Micro, learner_bytes, learner_static, step_bytes
from cluster.memory.plan import USABLE, Workload
from cluster.memory.shape import CONTEXT, GB, SHAPES, Parts, Shape, total
from learner.config.settings import LearnerConfig
from learner.driver import memory

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Place:
    """Of a table in a document: `begin` is a line before it, `end` one after it."""

    document: Path
    begin: str
    end: str

    def text(self) -> str:
        return self.document.read_text().partition(self.begin)[2].partition(self.end)[0]

    def fill(self, table: str) -> None:
        text = self.document.read_text()
        self.document.write_text(
            re.sub(f"{self.begin}.*{self.end}", lambda _: f"{self.begin}{table}{self.end}", text, flags=re.DOTALL)
        )
        print(table)


PUBLISHED = Place(
    RESULTS / "published_memory.md", "<!-- made by benchmarks.learner.memory_tables published -->\n", "<!-- end -->"
)
FOUR_ROLES = Place(
    ROOT / "docs" / "ppo.md",
    "<!-- made by benchmarks.learner.memory_tables four_roles -->\n",
    "<!-- end of four roles -->",
)

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


def published() -> list[Row]:
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


def published_report(found: Sequence[Row]) -> str:
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


SHAPE, CARD = SHAPES["Qwen2.5-7B"], "80"  # GB as sold
PROMPT, COMPLETION, TOKENS, SEQUENCES = 512, 512, 4096, 64  # of a micro-batch; decoded at once
BASE = 2 * SHAPE.params
TRAINED = ("adapters", "gradients", "optimizer")
STEP = ("checkpoints", "activations", "live", "update", "fragmentation")


@dataclass(frozen=True, slots=True)
class Arrangement:
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


def four_roles() -> list[Arrangement]:
    micro = Micro.of(PROMPT, COMPLETION, 1, TOKENS)
    whole, lora, one = (
        learner_bytes(SHAPE, learning, micro)
        for learning in (Learning(mode="full"), Learning(), Learning(frozen_ranks=(16,), value_rank=16))
    )
    return [
        Arrangement("four models, policy and value trained as a whole (AdamW)", 5, whole, models=2, adapters=0),
        Arrangement("four models, LoRA on policy and value", 5, lora, models=2),
        Arrangement("one base for the four roles, one for the generator (`memory.layout: auto`)", 2, one),
        Arrangement("one base for all five (`memory.layout: shared`)", 1, one),
    ]


def four_roles_report() -> str:
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
    for row in four_roles():
        cells = [f"{row.bases} x {BASE / GB:.1f}", *(f"{size / GB:.1f}" for size in list(row.parts.values())[1:])]
        fits = "yes" if total(row.parts) <= usable else "no"
        lines.append(f"| {row.what} | {' | '.join(cells)} | **{total(row.parts) / GB:.1f}** | {fits} |")
    return "\n".join(lines) + "\n"


METHODS: dict[str, Learning] = {
    "full, AdamW": Learning(mode="full", checkpointing="none"),
    "full, AdamW rounded": Learning(mode="full", optimizer="adamw_rounded", checkpointing="none"),
    "full, 8-bit Adam": Learning(mode="full", optimizer="adamw_8bit", checkpointing="none"),
    "full, 8-bit Adam, all twice": Learning(mode="full", optimizer="adamw_8bit", checkpointing="full"),
    "LoRA": Learning(checkpointing="none"),
    "LoRA, MLPs twice": Learning(checkpointing="mlp"),
    "LoRA, all twice": Learning(checkpointing="full"),
    "QLoRA, all twice": Learning(base="nf4", checkpointing="full"),
}


def peak_of(shape: Shape, learning: Learning) -> dict[str, Any]:
    """Bytes: of the fake run (none for 8-bit optimizers, whose kernels take no tensors without content), and of the
    memory model, both with context and fragmentation."""
    micro = Micro.of(LENGTHS.prompt, LENGTHS.completion, LENGTHS.generations, LENGTHS.group)
    result: dict[str, Any] = {"model": total(learner_bytes(shape, learning, micro)), "fake": None}
    if learning.optimizer.endswith("8bit"):
        return result
    from learner.tools.meta_run import footprint  # here: it needs torch, and others import the tables of this module

    settings: dict[str, Any] = {
        "mode": learning.mode, "checkpointing": learning.checkpointing, "token_budget": LENGTHS.group,
        "optimizer": {"kind": learning.optimizer},
    }  # fmt: skip
    groups = [(LENGTHS.prompt, [LENGTHS.completion] * LENGTHS.generations)] * 2

    def run() -> None:
        found = footprint(shape, LearnerConfig.model_validate(settings), groups, base=learning.base)
        result["footprint"] = asdict(found)
        result["fake"] = round(found.peak + FRAGMENTATION * found.dynamic + CONTEXT)

    result["cpu_seconds"] = round(cpu_seconds(run), 1)
    return result


def cell(one: dict[str, Any]) -> str:
    return f"{one['fake'] / GB:.1f}" if one["fake"] else f"({one['model'] / GB:.1f})"


def peaks_report(found: dict[str, dict[str, Any]]) -> str:
    rows = [[name, f"{SHAPES[name].params / 1e9:.2f}", *map(cell, methods.values())] for name, methods in found.items()]
    ours = [["gleaner: " + m, *(cell(found[name][m]) for name in FIVE if name in found)] for m in METHODS]
    theirs = [
        ["published: " + name, *("-" if size is None else str(size) for size in sizes)]
        for name, sizes in GRPO_TABLE.items()
    ]
    runs = [one for methods in found.values() for one in methods.values() if one["fake"]]
    apart = max(abs(one["model"] / one["fake"] - 1) for one in runs)
    slowest = max(one["cpu_seconds"] for one in runs)
    beside = as_table(["GB", *FIVE], theirs + ours) + "\n\n" if all(name in found for name in FIVE) else ""
    return (
        f"# The learner's peak, G = {LENGTHS.generations}, prompt {LENGTHS.prompt}, completion {LENGTHS.completion}\n\n"
        f"{beside}- = out of 80 GB. The published rows are of another learner by another measure, generation by "
        "transformers in the same process included; ours are the learner's tensors as its step allocates them, with "
        f"{CONTEXT / GB:.1f} GB for the CUDA context and {FRAGMENTATION:.0%} of the step for fragmentation, which are "
        "estimates; vLLM comes on top (`gleaner plan`). (In brackets: by the memory model alone.)\n\n"
        f"{as_table(['model', 'billions', *METHODS], rows)}\n\n"
        "Numbers without brackets are from a run of learner.trainer.trainer.Trainer on tensors without content "
        "(learner.tools.meta_run), without weights or a GPU; the memory model that the planner uses is at most "
        f"{apart:.1%} from them. The slowest took {slowest:.0f} CPU-seconds. Nothing here was measured on a card."
    )


def peaks(models: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)
    told, found = conditions(LEARNER_PACKAGES), dict[str, dict[str, Any]]()
    for name in models:
        found[name] = {}
        for method, learning in METHODS.items():
            found[name][method] = peak_of(SHAPES[name], learning)
            print(name, method, cell(found[name][method]), flush=True)
            gc.collect()
    text = f"{peaks_report(found)}\n\nConditions: {under(told, 'CPU time of one thread, bfloat16')}"
    save("memory_table", {"conditions": told, "peaks": found}, text)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("table", choices=("published", "four_roles", "peaks"))
    parser.add_argument("--models", nargs="+", default=list(SHAPES), help="peaks: of these")
    options = parser.parse_args()
    if options.table == "peaks":
        peaks(options.models)
    elif options.table == "published":
        found = published()
        told = {"rows": [asdict(row) for row in found], "grpo_table": grpo_cells(), "generations": by_generations()}
        (RESULTS / "published_memory.json").write_text(json.dumps(told, indent=2) + "\n")
        PUBLISHED.fill(published_report(found))
    else:
        parts = {row.what: row.parts for row in four_roles()}
        (RESULTS / "four_roles.json").write_text(json.dumps(parts, indent=2) + "\n")
        FOUR_ROLES.fill(four_roles_report())


if __name__ == "__main__":
    main()
