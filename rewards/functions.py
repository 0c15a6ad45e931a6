"""Functions without a file to name, of a notebook, a main script or a closure: written to a file, and told apart."""

import copyreg
import dis
import functools
import hashlib
import inspect
import io
import json
import os
import pickle
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from cluster.errors import WrongInput
from rewards.base import said
from rewards.limits import described

# What a function brings along: the variables around it and its defaults; of other things, what they are made of.


def captured(function: FunctionType) -> dict[str, Any]:
    """Name -> value of the variables that a function reads from around itself, and of its parameters' defaults.

    A variable that is not set (yet) is left out: calling the function would be its NameError.
    """
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    names = sorted(set(_globals(function.__code__)))
    found |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    found |= dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
    return found | (function.__kwdefaults__ or {})


def _globals(code: CodeType) -> Iterator[str]:
    """Names that the code looks up outside of itself, that of functions inside included."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, part) of what a value is made of, as its author would name it; nothing for what has no parts."""
    if isinstance(value, FunctionType):
        yield from captured(value).items()
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), *((f"args[{i}]", one) for i, one in enumerate(value.args)))
        yield from value.keywords.items()
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif inspect.isclass(value) or hasattr(value, "__dict__"):
        yield from vars(value).items()


# A digest of a function by what it does: its code, the values and functions that it reads, not where it stands.
#
# Bytes of a pickle would not do: they hold line numbers and the names of a notebook's files, which have a process id in
# them, and the order of a set, which differs from one process to the next. The bytecode is that of one Python version:
# under another the digest is another one.

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


# Functions without a file to name, of a notebook or a main script, lambdas and closures: a file that cloudpickle makes
# of one, and `use: path/file.pickle:name` reads.
#
# Its first line is JSON, the rest a pickle. It is code as a .py file is: whoever loads it runs it.

SUFFIX = ".pickle"
LARGEST = 256 * 2**20  # bytes; each reward process holds them
FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
PYTHON = ".".join(map(str, sys.version_info[:2]))  # whose bytecode it is


class Packed(NamedTuple):
    """A function as a file."""

    name: str  # of the function, of letters that a metric and a path may have
    digest: str  # of what it does
    content: bytes


def pack(function: Any) -> Packed:
    """Raises WrongInput, which names the variable to blame, if it cannot be pickled or is larger than LARGEST."""

    own = getattr(function, "__name__", None) or type(function).__name__
    name = re.sub(r"\W+", "_", own, flags=re.ASCII).strip("_") or "function"
    try:
        content = _dumps(function)
        made = digest(function) if len(content) <= LARGEST else ""
    except Exception as error:
        raise WrongInput(f"{own} cannot be sent to another process{_blame(function, error)}") from error
    if len(content) > LARGEST:
        size, blamed = f"{len(content) / 2**20:.0f} MiB", _largest(function)
        raise WrongInput(
            f"{own} must be at most {LARGEST // 2**20} MiB with all that it reads, got {size}{blamed}; load such "
            "things inside the function, or in a module that it imports"
        )
    head = {"digest": made, "python": PYTHON, "path": [entry or os.getcwd() for entry in sys.path]}
    return Packed(name, made, json.dumps(head).encode() + b"\n" + content)


def load_pickled(file: Path) -> Any:
    """The function of a file that `pack` made. What it imports is looked for where its author's process would have, in
    the end. Raises WrongInput with one sentence."""
    try:
        first, _, content = file.read_bytes().partition(b"\n")
        head = json.loads(first)
        python, path = head["python"], head["path"]
    except OSError as error:
        raise WrongInput(f"{file} cannot be read: {error.strerror}; call learner.train again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise WrongInput(f"{file} is not a function that learner.train wrote; call it again") from error
    if python != PYTHON:
        raise WrongInput(f"{file} was written by Python {python}, and this is {PYTHON}; call learner.train again")
    sys.path += [entry for entry in path if entry not in sys.path]
    try:
        return pickle.loads(content)
    except (Exception, SystemExit) as error:
        raise WrongInput(f"{file} does not load: {described(error)}") from error


def digest_in(file: Path) -> str:
    """The digest of the function in a file that `pack` made; '' if that is no such file, which `load` will say."""
    try:
        with file.open("rb") as stream:
            return str(json.loads(stream.readline())["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _dumps(value: Any) -> bytes:
    """Its pickle. Open files are refused: cloudpickle would send a copy of what they hold, without a word. A cached
    function of a main script goes with an empty cache; by itself it would be sent by its name, which is not there."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, one: Any) -> Any:
            if isinstance(one, FILES) and one not in (sys.stdout, sys.stderr):
                raise pickle.PicklingError("an open file stays in its process")
            if isinstance(one, CACHED) and (one.__module__ == "__main__" or "<locals>" in one.__qualname__):
                return _cached, (one.__wrapped__, *one.cache_parameters().values())
            return super().reducer_override(one)

    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


def _size(value: Any) -> int | None:
    """Bytes of its pickle; None if there can be none."""
    try:
        return len(_dumps(value))
    except Exception:
        return None


def _blame(function: Any, error: Exception) -> str:
    """The innermost variable that cannot be pickled, and what to do."""
    names, value, seen = [], function, {id(function)}
    while True:
        found = next(((n, part) for n, part in parts(value) if id(part) not in seen and _size(part) is None), None)
        if found is None:
            break
        names.append(found[0])
        value = found[1]
        seen.add(id(value))
    if not names:
        return f": {said(error)}"
    variable = ".".join(names).replace(".[", "[")
    return (
        f": its variable {variable} is a {type(value).__name__}, which cannot be pickled; make it inside the function, "
        "or in a module that the function imports"
    )


def _largest(function: Any) -> str:
    """The variable that takes most."""
    sizes = {name: _size(part) or 0 for name, part in parts(function)}
    name = max(sizes, key=lambda one: sizes[one], default=None)
    return "" if name is None else f", of them {sizes[name] / 2**20:.0f} MiB its variable {name}"
