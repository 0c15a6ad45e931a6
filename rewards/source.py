"""The file that a reward function comes from, found without running any of it."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

from rewards import pickled
from rewards.loader import BUILT_INS

GRADERS = {
    "json_schema": "jsonschema",
    "math": "math-verify",
    "reasoning_gym": "reasoning-gym",
}  # packages that do a built-in's work


def source_of(use: str) -> Path | None:
    """The Python file, or that of a pickled function, that `use` names (see rewards.loader.load), None if there is
    none: a module without a source, or one that is not there. What that file imports: rewards.own_imports."""
    place = BUILT_INS.get(use, use).rpartition(":")[0]
    if use in BUILT_INS:
        return Path(__file__).with_name(f"{place.rpartition('.')[2]}.py")
    if place.endswith((".py", pickled.SUFFIX)):
        file = Path(place).resolve()
        return file if file.is_file() else None
    return _module_file(place)


def grader_version(use: str) -> str:
    """Name and version of the package that does a built-in's work; '' where there is none, or it is not installed."""
    package = GRADERS.get(use, "")
    if not package:
        return ""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _module_file(name: str) -> Path | None:
    """importlib.util.find_spec("a.b") would import a; hence only the first part is looked up by it."""
    first, *others = name.split(".")
    with _here_on_path():
        spec = importlib.util.find_spec(first)
    found = first
    for part in others:
        found = f"{found}.{part}"
        folders = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(found, folders) if folders is not None else None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


@contextmanager
def _here_on_path() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
