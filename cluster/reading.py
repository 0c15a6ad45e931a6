"""Reads files that others may have made, such as those of a copied run folder: text, JSON, YAML and lines.

A path in such a folder may be a FIFO, whose open never returns, or a link to /dev/zero, which never ends; a text may be
so long or so deeply nested that reading it ends the process. The functions here read regular files only, within limits
of size and depth, and say in one sentence what is wrong.
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
MOST = 64 * MIB  # bytes of a file that is read as a whole
LONGEST = 16 * MIB  # bytes of a line
BLOCK = 4 * MIB  # bytes of one read
MAX_DEPTH = 200  # of nested lists and mappings; json itself can neither read nor write more than about a thousand
KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a link",
}  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")


def no_regular_file(path: Path) -> str | None:
    """What is wrong with a path that is to be written: it exists and is not a regular file (links are not followed).
    None if nothing is wrong."""
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return None
    return None if kind == stat.S_IFREG else f"{path} must be a regular file, and is {KINDS.get(kind, 'none')}"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file, or a link to one, for reading. Raises FileNotFoundError, and WrongInput if the path is
    something else or may not be read."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)  # checked before the open, since opening a device may have effects
        if kind != stat.S_IFREG:
            raise WrongInput(f"{path} must be a regular file, and is {KINDS.get(kind, 'none')}")
        # O_NONBLOCK: a FIFO may take the file's place between the two calls, and some files of /proc block too.
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
    """The content of a file. Raises FileNotFoundError, and WrongInput if it is no regular file or has more than `most`
    bytes."""
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
    """The text of a file. Raises what read_bytes raises, and WrongInput if it is not UTF-8."""
    return _decoded(read_bytes(path, most), path)


def _decoded(found: bytes, path: Path) -> str:
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise WrongInput(f"{path} must be UTF-8 text, got the byte 0x{byte:02x} at {error.start}") from None


def read_given(path: Path, most: int = MOST) -> str:
    """The text of a file that may be a pipe, which is read to its end: one that the parent of this process has opened.
    Raises OSError, and WrongInput if it has more than `most` bytes or is not UTF-8."""
    with path.open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise WrongInput(f"{path} must have at most {most / MIB:g} MiB, and has more")
    return _decoded(found, path)


def read_json(path: Path, most: int = MOST) -> Any:
    """The value of a JSON file. Raises what read_text and json_value raise."""
    return json_value(read_text(path, most), str(path))


def read_mapping(path: Path, most: int = MOST) -> dict[str, Any]:
    """The value of a JSON file, which must be an object. Raises what read_json raises, and WrongInput."""
    found = read_json(path, most)
    if not isinstance(found, dict):
        raise WrongInput(f"{path} must hold a mapping, got {type(found).__name__}")
    return found


def json_value(text: str | bytes, what: str) -> Any:
    """The value of a JSON text, in which NaN and Infinity are allowed. Raises WrongInput if the text is not JSON or
    nested too deeply. what: the text's name in the message."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise WrongInput(f"{what} must be nested at most {MAX_DEPTH} deep") from None
    except ValueError as error:  # also raised for an integer of thousands of digits
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
    """Yields (offset of its first byte, line without its end) for each line of a file; the last line may lack its end.
    At most a block and a line are in memory. Raises FileNotFoundError, and WrongInput if it is no regular file or a
    line has more than `longest` bytes."""
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
    """A path as text for a page or a terminal, with replacement characters for bytes that are not UTF-8."""
    return _SURROGATE.sub("\ufffd", str(name))


# YAML, read into plain values that can be validated, shown and stored as JSON.

YAML_BYTES = MIB // 2  # bytes of a file, for which PyYAML takes seconds
GIVEN = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+")  # paths that may be pipes of this process
LONGEST_NUMBER = 400  # characters; reading a number in base 60, which YAML allows, takes quadratic time
YAML_DEPTH = 32  # of nested lists and mappings
MAX_VALUES = 100_000  # an alias counts each time it is used, since a few lines of aliases can stand for billions
MAX_INT = 2**63


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key, whose second value would silently replace the first in PyYAML."""

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
    """Writes text in quotes where _Loader would read a number."""


# 1e-4 is read as a number; YAML 1.1, which PyYAML implements, requires a dot in it.
for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), [*"-+0123456789"])


def dump(tree: Any) -> str:
    """Writes plain values as YAML that read_yaml reads back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file, which must be a mapping or empty, which is read as an empty mapping. It may be a pipe with
    which this process was started, such as /dev/stdin or a shell's <(...). Raises WrongInput."""
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
    """The mapping in a YAML text; an empty text is an empty mapping. Raises WrongInput."""
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
    """The value of an override on the command line. Numbers, true/false, null, [lists], {maps} and 'quoted text' are
    read as YAML, and all else is text as it is (YAML would read `Solve: {question}` as a mapping, and drop what follows
    a #). Raises WrongInput."""
    value, refused = _parse(text)
    value = value if refused is None else text
    marked = text.lstrip().startswith(("[", "{", "'", '"'))
    plain = value is None or isinstance(value, int | float)
    value = value if marked or (plain and "#" not in text) else text
    check_plain(value)
    return value


def _parse(text: str) -> tuple[Any, str | None]:
    """Returns (the values of a YAML text, why the text is not YAML or None). Raises WrongInput if a key is repeated or
    the text is nested too deeply."""
    try:
        return yaml.load(text, Loader=_Loader), None
    except WrongInput:
        raise
    except RecursionError:
        raise WrongInput(_too_deep()) from None
    except Exception as error:  # YAMLError, or any exception of PyYAML for a value that does not match its tag
        return None, f"not YAML: {' '.join(str(error).split())[:300]}"


def check_plain(tree: Any) -> None:
    """Raises WrongInput if the values are nested too deeply (or contain themselves), are too many, or include one that
    JSON cannot store."""
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
        elif isinstance(value, bytes):  # JSON has no bytes
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
