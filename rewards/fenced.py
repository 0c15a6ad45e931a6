"""The fenced blocks of a Markdown text, as CommonMark has them (spec.commonmark.org/0.31.2, fenced code blocks)."""

import re
import textwrap
from collections.abc import Iterator

_OPENS = re.compile(r"(`{3,}(?=[^`]*$)|~{3,})(.*)", re.DOTALL)  # an info string behind backquotes has none itself
_ITEM = re.compile(r"(?:[-*+]|[0-9]{1,9}[.)])(?= |$)")
_LANGUAGE = re.compile(r"[{.]*([\w+#-]+)")  # `python`, `{python}`, `{.python .numberLines}`, `python:file.py`
_DEEPER = 4  # columns, by which a line that is indented further is code of another kind, and no fence
_TAB = 4


def fenced(text: str) -> Iterator[tuple[str, str]]:
    """(language in lower case, '' without one; content) of each block. A block may stand in an item of a list; one that
    nothing closes goes on to the end of the text. Unlike CommonMark's it does not end with its item: models indent a
    fence and forget the code."""
    lines = iter(text.split("\n"))
    items: list[int] = []  # where the content of each list item begins that the line stands in
    for line in lines:
        at, rest = _in_items(line.rstrip(), items)
        opened = _OPENS.fullmatch(rest)
        if opened is None or at - _inner(items) >= _DEEPER:
            continue
        inside = []
        for inner in lines:
            if _closes(inner, opened[1], _inner(items)):
                break
            inside.append(_less(inner, at))
        info = opened[2].strip()
        language = _LANGUAGE.match(info)
        yield (language[1] if language else info).lower(), _to_the_margin("".join(f"{one}\n" for one in inside))


def _in_items(line: str, items: list[int]) -> tuple[int, str]:
    """The column at which the line's text begins, behind the markers of list items, and that text; `items` are made
    those that hold it."""
    rest = line.lstrip(" \t")
    at = _columns(line[: len(line) - len(rest)])
    if rest:
        items[:] = [begin for begin in items if begin <= at]
    while (marker := _ITEM.match(rest)) and at - _inner(items) < _DEEPER:
        behind = rest[marker.end() :].lstrip(" ")
        at += len(rest) - len(behind) if behind else marker.end() + 1
        items.append(at)
        rest = behind
    return at, rest


def _inner(items: list[int]) -> int:
    return items[-1] if items else 0


def _closes(line: str, fence: str, margin: int) -> bool:
    """Whether it ends the block that `fence` opened, in an item of a list whose content begins at `margin`."""
    text = line.strip(" \t\r")
    indent = _columns(line[: len(line) - len(line.lstrip(" \t"))])
    return len(text) >= len(fence) and not text.strip(fence[0]) and indent - margin < _DEEPER


def _columns(space: str) -> int:
    return len(space.expandtabs(_TAB))


def _less(line: str, columns: int) -> str:
    """Without that many columns of white space at its beginning, or without what there is."""
    end = 0
    while end < len(line) and line[end] in " \t" and _columns(line[:end]) < columns:
        end += 1
    return line[end:]


def _to_the_margin(block: str) -> str:
    """Dedented if its first line is indented: dedent also empties lines of spaces, which texts in the code may have."""
    return textwrap.dedent(block) if block.lstrip("\n")[:1] in (" ", "\t") else block
