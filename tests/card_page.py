"""The table of docs/cards.md: which model fits which card, by the planner. python -m tests.card_page writes it."""

import re
from dataclasses import replace
from pathlib import Path

from cluster.memory.plan import USABLE, Wish, Workload, least
from cluster.memory.shape import SHAPES, Shape
from learner.driver import memory
from learner.tools.plan import METHODS

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
TABLE = re.compile(r"^\| model \| 8 GB .*?\n(?=\n)", re.DOTALL | re.MULTILINE)


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


if __name__ == "__main__":
    DOCUMENT.write_text(TABLE.sub(table(), DOCUMENT.read_text()))
