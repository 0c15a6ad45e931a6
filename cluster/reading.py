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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from cluster.errors import WrongInput

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


def no_regular_file(path: Path) -> str | None:
    """What is wrong with a path that is to be written: something else than a regular file is there, or a link."""
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return None
    return None if kind == stat.S_IFREG else f"{path} must be a regular file, and is {KINDS.get(kind, 'none')}"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, or a link to one, open for reading. Raises FileNotFoundError, and WrongInput for anything else
    that is in its place, or that may not be read."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)  # before it is opened: to open a device may do something
        if kind != stat.S_IFREG:
            raise WrongInput(f"{path} must be a regular file, and is {KINDS.get(kind, 'none')}")
        # Without waiting: between the two calls somebody may put a FIFO there, and some files of /proc wait, too.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except OSError as error:
        raise WrongInput(f"{path} cannot be read ({error.strerror})") from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WrongInput(f"{path} must be a regular file")
        yield file


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """All of it. Raises FileNotFoundError and WrongInput: it is no regular file, or longer than `most`."""
    parts, left = [], most + 1
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            left = 0
        while left and (part := _read(file, path, min(left, BLOCK))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise WrongInput(f"{path} must have at most {most / MIB:g} MiB, and has more")
    return b"".join(parts)


def read_text(path: Path, most: int = MOST) -> str:
    """All of it, which must be UTF-8. Raises as read_bytes."""
    return _decoded(read_bytes(path, most), path)


def _decoded(found: bytes, path: Path) -> str:
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise WrongInput(f"{path} must be UTF-8 text, got the byte 0x{byte:02x} at {error.start}") from None


def read_given(path: Path, most: int = MOST) -> str:
    """The text of a file that may be a pipe, up to its end: one that whoever started this process has opened for it.
    Raises OSError, and WrongInput: it is longer than `most`, or no UTF-8."""
    with path.open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise WrongInput(f"{path} must have at most {most / MIB:g} MiB, and has more")
    return _decoded(found, path)


def read_json(path: Path, most: int = MOST) -> Any:
    """The value of a JSON file. Raises as read_text, and WrongInput for what is no JSON, or nested too deep."""
    return json_value(read_text(path, most), str(path))


def read_mapping(path: Path, most: int = MOST) -> dict[str, Any]:
    """The same of a file that holds one JSON object."""
    found = read_json(path, most)
    if not isinstance(found, dict):
        raise WrongInput(f"{path} must hold a mapping, got {type(found).__name__}")
    return found


def json_value(text: str | bytes, what: str) -> Any:
    """The value of a JSON text, in which NaN and Infinity are numbers. Raises WrongInput, which calls it `what`."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise WrongInput(f"{what} must be nested at most {MAX_DEPTH} deep") from None
    except ValueError as error:  # among them a whole number of thousands of digits
        raise WrongInput(f"{what} must be JSON: {' '.join(str(error).split())[:200]}") from None
    if (
        text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    ) > MAX_DEPTH:
        _check_depth(found, what)
    return found


def _check_depth(tree: Any, what: str) -> None:
    level, depth = [tree], 0
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise WrongInput(f"{what} must be nested at most {MAX_DEPTH} deep")
        nested = [one for one in level if isinstance(one, dict | list)]
        level = [item for one in nested for item in (one.values() if isinstance(one, dict) else one)]


def lines(path: Path, longest: int = LONGEST) -> Iterator[tuple[int, bytes]]:
    """Where each line begins, and the line without its end; the last one may be cut off. No more than a block and a
    line are in memory. Raises FileNotFoundError, and WrongInput for no regular file, or a line longer than that."""
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
                raise WrongInput(f"{path}: line {number} must have at most {longest / MIB:g} MiB, and has more")
        if rest:
            yield begins, rest


def _read(file: BinaryIO, path: Path, count: int) -> bytes:
    try:
        found = file.read(count)
    except OSError as error:
        raise WrongInput(f"{path} cannot be read ({error.strerror})") from None
    if found is None:
        raise WrongInput(f"{path} must be a regular file, and is one that waits")
    return found


def printable(name: object) -> str:
    """A path as a page or a terminal may have it: a byte of a file's name that is no UTF-8 cannot be written there."""
    return _SURROGATE.sub("\ufffd", str(name))


# YAML -> plain values, bounded: what comes out can be validated, shown and stored without surprises.

YAML_BYTES = MIB // 2  # bytes of a file: PyYAML takes seconds for it
GIVEN = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+")
LONGEST_NUMBER = 400  # letters: to base 60, which YAML knows, its time goes by their square
YAML_DEPTH = 32  # of nested lists and mappings
MAX_VALUES = 100_000  # an alias counts as often as it is used: a few lines may stand for billions
MAX_INT = 2**63


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key, which PyYAML lets pass: the second block would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key.value, str))
        twice = sorted(key for key, count in keys.items() if count > 1)
        if twice:
            raise WrongInput(f"{', '.join(twice)}: given twice in one block (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        if node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
            raise WrongInput(f"a number must have at most {LONGEST_NUMBER} letters (line {node.start_mark.line + 1})")
        found: str = super().construct_scalar(node)
        return found


class _Dumper(yaml.SafeDumper):
    """Writes text that _Loader would take for a number in quotes."""


# 1e-4 is a number: YAML 1.1, which PyYAML reads, wants a dot in it.
for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), [*"-+0123456789"])


def dump(tree: Any) -> str:
    """A tree as read_yaml reads it."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """One YAML mapping; an empty file is an empty mapping. It may be a pipe that this process was started with, such as
    /dev/stdin or what a shell makes of <(...). Raises WrongInput."""
    try:
        text = read_given(path, YAML_BYTES) if GIVEN.fullmatch(str(path)) else read_text(path, YAML_BYTES)
    except WrongInput as error:
        raise WrongInput(f"--config: {error}; give a YAML file, such as those in configs/") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        said = error.strerror if isinstance(error, OSError) else error
        raise WrongInput(f"--config {path}: {said}; the ready-made ones are in configs/") from None
    try:
        return mapping_of(text)
    except WrongInput as error:
        raise WrongInput(f"--config {path}: {error}") from None


def mapping_of(text: str) -> dict[str, Any]:
    """The mapping that a YAML text holds; an empty text is an empty mapping. Raises WrongInput."""
    tree, refused = _parse(text)
    if refused is not None:
        raise WrongInput(refused)
    check_plain(tree)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise WrongInput(f"must be a mapping of keys, got {type(tree).__name__}")
    return tree


def parse_value(text: str) -> Any:
    """The value of an override: numbers, true/false, null, [lists], {maps} and 'quoted text' as in YAML, and all else
    as it stands (to YAML, `Solve: {question}` is a mapping, and what follows a # is nothing). Raises WrongInput."""
    value, refused = _parse(text)
    value = value if refused is None else text
    marked = text.lstrip().startswith(("[", "{", "'", '"'))
    plain = value is None or isinstance(value, int | float)
    value = value if marked or (plain and "#" not in text) else text
    check_plain(value)
    return value


def _parse(text: str) -> tuple[Any, str | None]:
    """The values of a YAML text, and why YAML does not take it. Raises WrongInput where it repeats a key or is nested
    too deep."""
    try:
        return yaml.load(text, Loader=_Loader), None
    except WrongInput:
        raise
    except RecursionError:
        raise WrongInput(_too_deep()) from None
    except Exception as error:  # besides YAMLError whatever PyYAML meets in a value that its tag does not promise
        return None, f"not YAML: {' '.join(str(error).split())[:300]}"


def check_plain(tree: Any) -> None:
    """Raises WrongInput where a tree is too deep (or holds itself) or too large, or has a value that no file holds."""
    left = MAX_VALUES
    waiting: list[tuple[Any, tuple[Any, ...]]] = [(tree, ())]
    while waiting:
        value, where = waiting.pop()
        left -= 1
        if left < 0:
            raise WrongInput(f"must hold at most {MAX_VALUES} values, aliases counted as often as they are used")
        if len(where) > YAML_DEPTH:
            raise WrongInput(_too_deep())
        if isinstance(value, dict):
            waiting += [(item, (*where, key)) for key, inner in value.items() for item in (key, inner)]
        elif isinstance(value, list | tuple | set):
            waiting += [(item, (*where, place)) for place, item in enumerate(value)]
        elif isinstance(value, bytes):  # which JSON has no form for
            raise WrongInput(f"{_dotted(where)}must not be bytes (!!binary), got {value[:40]!r}; write it as text")
        elif isinstance(value, int) and abs(value) > MAX_INT:
            raise WrongInput("a whole number must lie within 64 bits; write it as text in quotes")
        elif isinstance(value, str):
            _check_text(value)


def _dotted(where: tuple[Any, ...]) -> str:
    return f"{' '.join('.'.join(map(str, where)).split())[:200]}: " if where else ""


def _check_text(text: str) -> None:
    if "\0" in text:
        raise WrongInput(f"text must not hold a null character, got {text[:40]!r}; remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WrongInput(f"text must be UTF-8, got {text[:40]!r}; write it in UTF-8") from None


def _too_deep() -> str:
    return f"lists and mappings must be nested at most {YAML_DEPTH} deep; take levels out"
