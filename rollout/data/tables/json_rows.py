"""Rows of JSON, line by line or in one array: exact whole numbers of any size, a line number for what is wrong, and
nothing recursive."""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from rollout.data.tables.rows import MAX_DEPTH, ProblemsError, Row, checked

PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
BOM = b"\xef\xbb\xbf"  # what some editors put before UTF-8
SPACE = re.compile(r"[ \t\n\r]*")  # of JSON

_DECODE = json.JSONDecoder().raw_decode


def opened(file: Path, packing: str) -> Any:
    """A file, unpacked, as bytes. packing: a key of PACKED, or nothing."""
    opener: Callable[..., Any] = PACKED.get(packing, open)
    return opener(file, "rb")


def json_rows(file: Path, packing: str, named: str, *, lines: bool, field: str | None = None) -> Iterator[Row]:
    """A file that is one object over several lines, all of whose values are lists of one length, holds columns.

    Args:
        named: the key of the configuration and the file, for messages.
        lines: it holds an object a line for certain; else it may be an array.
        field: of the one object that the file is, where in it the rows lie.

    Raises ProblemsError: it cannot be read.
    """
    number = 1
    try:
        with opened(file, packing) as stream:
            if field is not None or (not lines and _begins_array(stream)):
                whole = stream.read().removeprefix(BOM).decode("utf-8")
                yield from _entries(whole, named) if field is None else _in_field(whole, field, named)
                return
            for number, line in enumerate(stream, start=1):
                if text := line.strip().removeprefix(BOM).lstrip():
                    if number == 1 and not lines and (columns := _columns(text, stream)) is not None:
                        yield from _listed(columns, named)
                        return
                    yield _row(text, named, number)
    except UnicodeDecodeError as error:
        wrong = f"0x{error.object[error.start]:02x}"
        raise ProblemsError(f"{named} line {number} must be UTF-8, got the byte {wrong}; save it as UTF-8") from None
    except RecursionError:
        raise ProblemsError(f"{named} line {number} is nested too deep; take levels out") from None
    except (ValueError, EOFError, OSError) as error:  # OSError: no gzip file, though its name says so
        if isinstance(error, ProblemsError):
            raise
        plain = f"{error.msg} character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        said = " ".join(plain.split())[:200]
        raise ProblemsError(f"{named} line {number} cannot be read: {said}; correct it") from None


def _begins_array(stream: Any) -> bool:
    return bool(stream.peek(16).removeprefix(BOM).lstrip()[:1] == b"[")


def _row(text: bytes, named: str, number: int) -> Row:
    decoded = text.decode()
    row, end = _DECODE(decoded)
    if end != len(decoded):
        row = json.loads(decoded)  # which says that there is more
    # Without an escape no half of a surrogate pair can be in it; brackets bound the depth.
    if type(row) is dict and b"\\u" not in text and text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
        return row
    return checked(row, f"{named} line {number}")


def _entries(whole: str, named: str) -> Iterator[Row]:
    """Of an array, one after the other: as objects they would take ten times the memory of their text."""
    at, entry = SPACE.match(whole, whole.index("[") + 1).end(), 0  # type: ignore[union-attr]
    if whole[at : at + 1] != "]":
        while True:
            entry += 1
            try:
                value, end = _DECODE(whole, at)
            except json.JSONDecodeError:
                json.loads(whole)  # whose error says where
                raise
            yield checked(value, f"{named} entry {entry}")
            at = SPACE.match(whole, end).end()  # type: ignore[union-attr]
            if whole[at : at + 1] != ",":
                break
            at = SPACE.match(whole, at + 1).end()  # type: ignore[union-attr]
    if SPACE.fullmatch(whole, at + 1) is None or whole[at : at + 1] != "]":
        json.loads(whole)  # likewise


def _in_field(whole: str, field: str, named: str) -> Iterator[Row]:
    content = json.loads(whole)
    if not isinstance(content, dict) or field not in content:
        there = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise ProblemsError(f"{named} must hold {field!r} (data.args: field), got {there[:200]}; correct data.args")
    found = content[field]
    return _listed(found, named)


def _columns(first: bytes, stream: IO[bytes]) -> dict[str, list[Any]] | None:
    """Of a file that is one object over several lines: lists of one length. None of any other."""
    try:
        json.loads(first.decode())
        return None
    except (ValueError, RecursionError):
        place = stream.tell()
    try:
        found = json.loads(first.decode() + "\n" + stream.read().decode())
    except (ValueError, RecursionError):
        found = None
    stream.seek(place)
    if not isinstance(found, dict) or not found or not all(isinstance(one, list) for one in found.values()):
        return None
    return found if len({len(one) for one in found.values()}) == 1 else None


def _listed(found: Any, named: str) -> Iterator[Row]:
    """Rows in a list, or in lists of their columns."""
    if isinstance(found, dict) and found and all(isinstance(one, list) for one in found.values()):
        found = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    if not isinstance(found, list):
        raise ProblemsError(f"{named} must hold a list of rows, got {type(found).__name__}; correct it, or data.args")
    for entry, value in enumerate(found, start=1):
        yield checked(value, f"{named} entry {entry}")
