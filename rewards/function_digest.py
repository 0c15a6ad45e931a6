"""A digest of a function by what it does: its code, the values and functions that it reads, not where it stands.

Bytes of a pickle would not do: they hold line numbers and the names of a notebook's files, which have a process id in
them, and the order of a set, which differs from one process to the next. The bytecode is that of one Python version:
under another the digest is another one.
"""

import copyreg
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from rewards.captured import captured

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
LARGE = 2**20  # bytes of which the text would be several times as long
CODE = (
    "co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code", "co_consts",
    "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable",
)  # fmt: skip
NOT_OF_A_CLASS = {  # what Python adds to a class that is written in a file
    "__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl",
    "__abstractmethods__",
    # What pydantic makes of the annotations of a model.
    "__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__", "__signature__",
}  # fmt: skip
CACHED = type(functools.lru_cache(len))
INSTALLED = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib"))


def digest(function: Any) -> str:
    """sha256 in hexadecimal letters; equal for the same source and the same captured values, in any process.

    What lies in a module that can be imported counts by its name, and if that module is the user's by the content of
    its file; what that imports in its turn is not looked at.
    """
    return _Digest().of(function).hex()


class _Digest:
    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}  # with the value, so that its id is not given to another
        self._within: list[int] = []

    def of(self, value: Any) -> bytes:
        if isinstance(value, bytes) and len(value) > LARGE:
            return _hash("bytes", hashlib.sha256(value).hexdigest())
        if type(value) in PLAIN:
            return _hash(type(value).__name__, repr(value))
        if id(value) in self._within:  # a function that calls itself, a list that holds itself
            return _hash("within", str(self._within.index(id(value))))
        if id(value) not in self._known:
            self._within.append(id(value))
            self._known[id(value)] = value, self._made_of(value)
            self._within.pop()
        return self._known[id(value)][1]

    def _made_of(self, value: Any) -> bytes:
        if isinstance(value, CodeType):
            return self._all("code", *(getattr(value, name) for name in CODE if hasattr(value, name)))
        if isinstance(value, FunctionType | type) and (name := _importable(value)):
            return _hash("name", name, _file_digest(sys.modules[value.__module__]))
        if isinstance(value, FunctionType):
            return self._all("function", value.__code__, captured(value), vars(value))
        if isinstance(value, type):
            own = {name: part for name, part in vars(value).items() if name not in NOT_OF_A_CLASS}
            return self._all("class", value.__name__, value.__bases__, own)
        if isinstance(value, ModuleType):
            return _hash("module", value.__name__, _file_digest(value))
        if type(value) in (list, tuple):
            return self._all(type(value).__name__, *value)
        if type(value) in (set, frozenset):
            return _hash("set", *sorted(self.of(part).hex() for part in value))
        if type(value) is dict:
            return self._all("dict", *(part for pair in value.items() for part in pair))
        return self._of_object(value)

    def _of_object(self, value: Any) -> bytes:
        """Of any other object: by what pickle would make it from."""
        if isinstance(value, staticmethod | classmethod):
            return self._all(type(value).__name__, value.__func__)
        if isinstance(value, property):
            return self._all("property", value.fget, value.fset, value.fdel)
        if isinstance(value, CellType):
            return self._all("cell", value.cell_contents)
        if isinstance(value, CACHED) and not _importable(value):
            return self._all("cached", value.__wrapped__, value.cache_parameters())
        if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return self._all("tensor", str(value.dtype), list(value.shape), content)
        if isinstance(value, functools.partial):
            return self._all("partial", value.func, value.args, value.keywords)
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            made = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:  # cloudpickle has ways of its own for some types, and refuses the others with a good word
            return _hash("pickle", hashlib.sha256(cloudpickle.dumps(value)).hexdigest())
        if isinstance(made, str):
            module = getattr(value, "__module__", "") or ""
            own = _file_digest(sys.modules[module]) if isinstance(value, CACHED) else ""
            return _hash("name", module, made, *([own] if own else []))
        return self._all("object", *(list(part) if isinstance(part, Iterator) else part for part in made))

    def _all(self, kind: str, *parts: Any) -> bytes:
        return _hash(kind, *(self.of(part).hex() for part in parts))


def _hash(*texts: str) -> bytes:
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode(errors="surrogatepass")
        digest.update(f"{len(content)}:".encode() + content)
    return digest.digest()


def _importable(value: Any) -> str:
    """`module:name` of what another process finds by that; '' of what stands in the main script or in a function."""
    found: Any = sys.modules.get(value.__module__ or "")
    if value.__module__ == "__main__":
        return ""
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return f"{value.__module__}:{value.__qualname__}" if found is value else ""


def _file_digest(module: ModuleType) -> str:
    """Of the file of a module of the user's; '' for what is installed, whose version may change without harm."""
    file = getattr(module, "__file__", None)
    if file is None or str(Path(file).resolve()).startswith(INSTALLED) or not Path(file).is_file():
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
