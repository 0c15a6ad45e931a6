"""The tables of docs/cards.md: which model fits which card, by the planner. python -m tests.card_page writes it."""

import re
from dataclasses import replace
from pathlib import Path

from cluster.memory.plan import USABLE, Wish, Workload
from cluster.memory.search import least
from cluster.memory.shape import GB, SHAPES, SPARSE, Shape
from learner.driver import memory
from learner.tools.plan import METHODS, longest, methods

DOCUMENT = Path(__file__).parents[1] / "docs" / "cards.md"
CARDS = {"8 GB": "8", "12 GB": "12", "16 GB": "16", "24 GB": "24", "40 GB": "40", "80 GB": "80"}
WORK = Workload(generations=8, prompt=256, completion=786, sequences=64, adapters=2)  # gleaner plan's own
WAYS: dict[str, Wish] = {
    "full": METHODS["full"],
    "LoRA": METHODS["LoRA + ckpt"],
    "LoRA, shared": replace(METHODS["LoRA + ckpt"], shared=True),
    "QLoRA": METHODS["QLoRA"],
    "QLoRA, shared": replace(METHODS["QLoRA"], shared=True),
}
# Of models with experts, which train adapters alone. gpt-oss-20b is in MXFP4 as it is published.
SPARSE_WAYS = {
    "LoRA": METHODS["LoRA + ckpt"],
    "QLoRA": METHODS["QLoRA"],
    "LoRA, FP8": METHODS["LoRA, FP8"],
    "LoRA, W4A16": METHODS["LoRA, W4A16"],
}
TABLE = re.compile(r"^\| model \| 8 GB .*?\n(?=\n)", re.DOTALL | re.MULTILINE)


SPARSE_TABLE = re.compile(r"^\| model \| billions .*?\n(?=\n)", re.DOTALL | re.MULTILINE)


# 8 completions; the least that both roles take, one base for both or two.
LONGEST = ("Llama-3.2-1B", "Qwen3-4B", "Llama-3.1-8B")
LONGEST_CARDS = ("12", "16", "24", "48", "80")
LONGEST_TABLE = re.compile(r"^\| model \| 12 GB .*?\n(?=\n)", re.DOTALL | re.MULTILINE)


def longest_table() -> str:
    """Tokens of the longest prompt and completion in thousands, by recomputation of all layers, and offloaded."""
    sizes = [memory.card_size(name).bytes for name in LONGEST_CARDS]
    lines = [f"| model | {' GB | '.join(LONGEST_CARDS)} GB |", f"|---|{'---|' * len(LONGEST_CARDS)}"]
    for name in LONGEST:
        shape, work = SHAPES[name], Workload(generations=8, prompt=1024, sequences=1, adapters=2)
        wishes = [Wish(base="nf4", checkpointing="full", shared=shared) for shared in (True, False)]
        cells = []
        for size in sizes:
            ways = (wishes, [replace(wish, offload=True) for wish in wishes])
            both = [(work.prompt + longest(shape, size, work, way)) / 1000 for way in ways]
            cells.append(f"{both[0]:.0f}k, {both[1]:.0f}k")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _first(needs: dict[str, int], card: int) -> str:
    return next((way for way, peak in needs.items() if peak <= USABLE * card), "-")


def _needs(shape: Shape) -> dict[str, int]:
    """Bytes that each way needs at least; they do not depend on the card."""
    return {way: least(shape, 2**40, WORK, wish).device_peak for way, wish in WAYS.items()}


def table() -> str:
    sizes = {name: memory.card_size(text).bytes for name, text in CARDS.items()}
    lines = [f"| model | {' | '.join(CARDS)} |", f"|---|{'---|' * len(CARDS)}"]
    for shape in SHAPES.values():
        needs = _needs(shape)
        lines.append(f"| {shape.name} | {' | '.join(_first(needs, size) for size in sizes.values())} |")
    return "\n".join(lines) + "\n"


def sparse_table() -> str:
    """GB that each way needs at least, with both roles on one card, and which of the cards of 24, 48 and 80 GB it
    fits."""
    cards = {name: memory.card_size(name).bytes for name in ("24", "48", "80")}
    lines = [f"| model | billions | {' | '.join(SPARSE_WAYS)} |", f"|---|---|{'---|' * len(SPARSE_WAYS)}"]
    for shape in SPARSE.values():
        cells = []
        for way, wish in SPARSE_WAYS.items():
            if way not in methods(shape, ppo=False, old=False) and wish.base != "none":
                cells.append("")
                continue
            peak = least(shape, 2**40, WORK, wish).device_peak
            fits = next((name for name, size in cards.items() if peak <= USABLE * size), None)
            cells.append(f"{peak / GB:.0f}: {f'{fits} GB' if fits else '-'}")
        sizes = f"{shape.params / 1e9:.1f}, {shape.active_params / 1e9:.1f}"
        name = shape.name if shape.stored is None else f"{shape.name} in {shape.stored.name}"
        lines.append(f"| {name} | {sizes} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = TABLE.sub(table(), DOCUMENT.read_text())
    text = SPARSE_TABLE.sub(sparse_table(), text)
    DOCUMENT.write_text(LONGEST_TABLE.sub(longest_table(), text))
