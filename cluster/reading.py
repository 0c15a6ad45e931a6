"""Files that somebody else may have made: read within bounds, and only where they are regular files.

A run folder travels: it is unpacked, copied, shared. A name in it may be a FIFO, at which an open waits for ever, or a
link to /dev/zero, which never ends; a text may be nested so deeply, or be so long, that to read it ends the process.
What is read here ends soon, takes no more memory than it is allowed, and what is wrong is one sentence.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MIB = 2**20
MOST = 64 * MIB  # bytes of a text that is read whole
LONGEST = 16 * MIB  # of a line
BLOCK = 4 * MIB  # that are read at once
MAX_DEPTH = 200  # of nested lists and mappings; json itself stops at about a thousand, in either direction
KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a link",
}  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")


class Unreadable(ValueError):
    """A file that is not taken; the text names it and says why."""


def no_regular_file(path: Path) -> str | None:
    """What is wrong with a path that is to be written: something else than a regular file is there, or a link."""
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return None
    return None if kind == stat.S_IFREG else f"{path} must be a regular file, and is {KINDS.get(kind, 'none')}"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, or a link to one, open for reading. Raises FileNotFoundError, and Unreadable for anything else
    that is in its place, or that may not be read."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)  # before it is opened: to open a device may do something
        if kind != stat.S_IFREG:
            raise Unreadable(f"{path} must be a regular file, and is {KINDS.get(kind, 'none')}")
        # Without waiting: between the two calls somebody may put a FIFO there, and some files of /proc wait, too.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror})") from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Unreadable(f"{path} must be a regular file")
        yield file


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """All of it. Raises FileNotFoundError and Unreadable: it is no regular file, or longer than `most`."""
    parts, left = [], most + 1
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            left = 0
        while left and (part := _read(file, path, min(left, BLOCK))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise Unreadable(f"{path} must have at most {most / MIB:g} MiB, and has more")
    return b"".join(parts)


def read_text(path: Path, most: int = MOST) -> str:
    """All of it, which must be UTF-8. Raises as read_bytes."""
    return _decoded(read_bytes(path, most), path)


def _decoded(found: bytes, path: Path) -> str:
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise Unreadable(f"{path} must be UTF-8 text, got the byte 0x{byte:02x} at {error.start}") from None


def read_given(path: Path, most: int = MOST) -> str:
    """The text of a file that may be a pipe, up to its end: one that whoever started this process has opened for it.
    Raises OSError, and Unreadable: it is longer than `most`, or no UTF-8."""
    with path.open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise Unreadable(f"{path} must have at most {most / MIB:g} MiB, and has more")
    return _decoded(found, path)


def read_json(path: Path, most: int = MOST) -> Any:
    """The value of a JSON file. Raises as read_text, and Unreadable for what is no JSON, or nested too deep."""
    return json_value(read_text(path, most), str(path))


def read_mapping(path: Path, most: int = MOST) -> dict[str, Any]:
    """The same of a file that holds one JSON object."""
    found = read_json(path, most)
    if not isinstance(found, dict):
        raise Unreadable(f"{path} must hold a mapping, got {type(found).__name__}")
    return found


def json_value(text: str | bytes, what: str) -> Any:
    """The value of a JSON text, in which NaN and Infinity are numbers. Raises Unreadable, which calls it `what`."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise Unreadable(f"{what} must be nested at most {MAX_DEPTH} deep") from None
    except ValueError as error:  # among them a whole number of thousands of digits
        raise Unreadable(f"{what} must be JSON: {' '.join(str(error).split())[:200]}") from None
    if (
        text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    ) > MAX_DEPTH:
        _check_depth(found, what)
    return found


def _check_depth(tree: Any, what: str) -> None:
    level, depth = [tree], 0
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise Unreadable(f"{what} must be nested at most {MAX_DEPTH} deep")
        nested = [one for one in level if isinstance(one, dict | list)]
        level = [item for one in nested for item in (one.values() if isinstance(one, dict) else one)]


def lines(path: Path, longest: int = LONGEST) -> Iterator[tuple[int, bytes]]:
    """Where each line begins, and the line without its end; the last one may be cut off. No more than a block and a
    line are in memory. Raises FileNotFoundError, and Unreadable for no regular file, or a line longer than that."""
    with opened(path) as file:
        rest, begins, number = b"", 0, 1
        while part := _read(file, path, BLOCK):
            found = (rest + part).split(b"\n")
            rest = found.pop()
            for line in found:
                yield begins, line
                begins += len(line) + 1
            number += len(found)
            if len(rest) > longest:
                raise Unreadable(f"{path}: line {number} must have at most {longest / MIB:g} MiB, and has more")
        if rest:
            yield begins, rest


def _read(file: BinaryIO, path: Path, count: int) -> bytes:
    try:
        found = file.read(count)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror})") from None
    if found is None:
        raise Unreadable(f"{path} must be a regular file, and is one that waits")
    return found


def printable(name: object) -> str:
    """A path as a page or a terminal may have it: a byte of a file's name that is no UTF-8 cannot be written there."""
    return _SURROGATE.sub("\ufffd", str(name))
