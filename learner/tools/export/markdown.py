"""Pieces of Markdown that hold whatever they are given."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells of one line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(one) for one in row) + " |" for row in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def fenced(text: str, language: str = "") -> str:
    """A block of code, whatever it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
