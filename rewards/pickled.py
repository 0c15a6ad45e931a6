"""Functions without a file to name, of a notebook or a main script, lambdas and closures: a file that cloudpickle makes
of one, and `use: path/file.pickle:name` reads.

Its first line is JSON, the rest a pickle. It is code as a .py file is: whoever loads it runs it.
"""

import functools
import io
import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rewards.base import RewardLoadError, said
from rewards.captured import parts
from rewards.described import described

SUFFIX = ".pickle"
LARGEST = 256 * 2**20  # bytes; each reward process holds them
CACHED = type(functools.lru_cache(len))
FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
PYTHON = ".".join(map(str, sys.version_info[:2]))  # whose bytecode it is


class Packed(NamedTuple):
    """A function as a file."""

    name: str  # of the function, of letters that a metric and a path may have
    digest: str  # of what it does (rewards.function_digest)
    content: bytes


def pack(function: Any) -> Packed:
    """Raises RewardLoadError, which names the variable to blame, if it cannot be pickled or is larger than LARGEST."""
    from rewards.function_digest import digest  # with cloudpickle, which not each reward process has to load

    own = getattr(function, "__name__", None) or type(function).__name__
    name = re.sub(r"\W+", "_", own, flags=re.ASCII).strip("_") or "function"
    try:
        content = _dumps(function)
        made = digest(function) if len(content) <= LARGEST else ""
    except Exception as error:
        raise RewardLoadError(f"{own} cannot be sent to another process{_blame(function, error)}") from error
    if len(content) > LARGEST:
        size, blamed = f"{len(content) / 2**20:.0f} MiB", _largest(function)
        raise RewardLoadError(
            f"{own} must be at most {LARGEST // 2**20} MiB with all that it reads, got {size}{blamed}; load such "
            "things inside the function, or in a module that it imports"
        )
    head = {"digest": made, "python": PYTHON, "path": [entry or os.getcwd() for entry in sys.path]}
    return Packed(name, made, json.dumps(head).encode() + b"\n" + content)


def load(file: Path) -> Any:
    """The function of a file that `pack` made. What it imports is looked for where its author's process would have, in
    the end. Raises RewardLoadError with one sentence."""
    try:
        first, _, content = file.read_bytes().partition(b"\n")
        head = json.loads(first)
        python, path = head["python"], head["path"]
    except OSError as error:
        raise RewardLoadError(f"{file} cannot be read: {error.strerror}; call learner.train again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RewardLoadError(f"{file} is not a function that learner.train wrote; call it again") from error
    if python != PYTHON:
        raise RewardLoadError(f"{file} was written by Python {python}, and this is {PYTHON}; call learner.train again")
    sys.path += [entry for entry in path if entry not in sys.path]
    try:
        return pickle.loads(content)
    except (Exception, SystemExit) as error:
        raise RewardLoadError(f"{file} does not load: {described(error)}") from error


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
