"""Functions of a user's script or notebook, lambdas and closures, which have no file to name in a configuration: `pack`
writes such a function to a file, `load_pickled` reads it in a reward process, and `digest` says whether two functions
are the same.
"""

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


def captured(function: FunctionType) -> dict[str, Any]:
    """The values, by name, of the closure and global variables that a function reads, and of its parameters' defaults.

    A variable without a value is left out; calling the function will raise a NameError.
    """
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # the variable has no value
            continue
    names = sorted(set(_globals(function.__code__)))
    found |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    found |= dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
    return found | (function.__kwdefaults__ or {})


def _globals(code: CodeType) -> Iterator[str]:
    """Names of the global variables that the code, or the code of functions inside it, reads."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each with the name that its author would use for it; none if it has no parts."""
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


# The digest of a function is made of its code and of the values and functions that it reads. The bytes of a pickle
# would not do: they have line numbers, the names of a notebook's files, which contain a process id, and the order of a
# set, which differs between processes. Bytecode depends on the version of Python, and so does the digest.

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
LARGE = 2**20  # bytes objects beyond this are hashed directly, since their repr is several times as long
CODE = (
    "co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code", "co_consts",
    "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable",
)  # fmt: skip
NOT_OF_A_CLASS = {  # attributes that Python adds to a class, and that do not come from its source
    "__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl",
    "__abstractmethods__",
    # Attributes that pydantic makes from the annotations of a model.
    "__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__", "__signature__",
}  # fmt: skip
CACHED = type(functools.lru_cache(len))
INSTALLED = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib"))


def digest(function: Any) -> str:
    """Returns a sha256 in hexadecimal, which is equal in any process for equal source and equal captured values.

    A function or class of an importable module counts by its name, and if the module is the user's also by the content
    of the module's file, but not of the files that this imports.
    """
    return _Digest().of(function).hex()


class _Digest:
    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}  # by id; the value is kept so that its id is not reused
        self._within: list[int] = []  # ids of the values whose digests are being made

    def of(self, value: Any) -> bytes:
        if isinstance(value, bytes) and len(value) > LARGE:
            return _hash("bytes", hashlib.sha256(value).hexdigest())
        if type(value) in PLAIN:
            return _hash(type(value).__name__, repr(value))
        if id(value) in self._within:  # a function that calls itself, or a list that contains itself
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
        """The digest of any other object, mostly by the parts from which pickle would rebuild it."""
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
        except Exception:  # cloudpickle can pickle further types, and says clearly why it refuses others
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
    """`module:name` of a function or class that another process can import; '' for one of the main script or one that
    is defined in a function."""
    found: Any = sys.modules.get(value.__module__ or "")
    if value.__module__ == "__main__":
        return ""
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return f"{value.__module__}:{value.__qualname__}" if found is value else ""


def _file_digest(module: ModuleType) -> str:
    """sha256 of the file of a user's module; '' for an installed module, whose version may change without harm."""
    file = getattr(module, "__file__", None)
    if file is None or str(Path(file).resolve()).startswith(INSTALLED) or not Path(file).is_file():
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


# The file of a function, for `use: path/file.pickle:name`. Its first line is JSON, the rest a pickle made by
# cloudpickle. Like a .py file it is code: loading it runs it.

SUFFIX = ".pickle"
LARGEST = 256 * 2**20  # bytes of a pickle, at most, since each reward process holds it
FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
PYTHON = ".".join(map(str, sys.version_info[:2]))  # bytecode in a pickle can be loaded by this version only


class Packed(NamedTuple):
    """A function as the content of a file."""

    name: str  # of the function, with characters that metrics and paths allow
    digest: str  # see `digest`
    content: bytes


def pack(function: Any) -> Packed:
    """Makes the content of a function's file. Raises WrongInput if the function cannot be pickled, or its pickle is
    larger than LARGEST; the error names the variable that is the cause."""

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
    """Loads the function from a file that `pack` made. The sys.path of the process that packed it is appended to this
    process's. Raises WrongInput with one sentence."""
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
    """The digest of the function in a file that `pack` made; '' for another file, which loading reports."""
    try:
        with file.open("rb") as stream:
            return str(json.loads(stream.readline())["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _dumps(value: Any) -> bytes:
    """The pickle of a value. Open files are refused, since cloudpickle would silently send a copy of their content. A
    function with functools.lru_cache of a main script is sent with an empty cache; cloudpickle would send only its
    name, which the other process does not have."""
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
    """Bytes of a value's pickle; None if it cannot be pickled."""
    try:
        return len(_dumps(value))
    except Exception:
        return None


def _blame(function: Any, error: Exception) -> str:
    """The end of the error's sentence: the innermost variable that cannot be pickled, and what to do."""
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
    """The end of the error's sentence: the variable with the largest pickle."""
    sizes = {name: _size(part) or 0 for name, part in parts(function)}
    name = max(sizes, key=lambda one: sizes[one], default=None)
    return "" if name is None else f", of them {sizes[name] / 2**20:.0f} MiB its variable {name}"
