"""Keeps gleaner's packages and a user's files of the same name apart: says where the packages are, for processes that
must find them before any file of the user, and finds the names of a user's module, such as rewards.py, in which an
import finds the package instead."""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cluster", "gleaner", "learner", "rewards", "rollout")
INSTALLED = ("site-packages", "dist-packages")  # folders that each Python has on its path


def entries() -> list[str]:
    """The entries that sys.path of another Python needs to find the packages; none if they are installed."""
    return [] if ROOT.name in INSTALLED else [str(ROOT)]


def environment() -> dict[str, str]:
    """The environment variable by which another Python finds the packages first; empty if they are installed. That
    Python must be started with -P, or the working directory comes before them."""
    path = [*entries(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path)))} if entries() else {}


ASIDE: dict[str, ModuleType] = {}
"""A user's modules that were imported under the name of one of our packages before that package was, by name."""


def of_users(package: str, attribute: str) -> Any:
    """The attribute of the user's module that has the name of one of our packages. With a rewards.py in the folder of
    the user's script, `from rewards import accuracy` finds our package, whose __getattr__ calls this. Raises
    AttributeError."""
    own = ROOT / package
    ours = attribute.startswith("_") or (own / attribute).exists() or (own / f"{attribute}.py").exists()
    found = None if ours else ASIDE.get(package) or _beside(package)
    if found is None or not hasattr(found, attribute):
        raise AttributeError(f"module {package!r} has no attribute {attribute!r}")
    return getattr(found, attribute)


def _beside(package: str) -> ModuleType | None:
    """The user's module of that name, found by sys.path of this process."""
    from cluster.by_path import INIT, name_of

    for entry in sys.path:
        for file in theirs(entry, (package,)):
            return import_module(name_of((file.parent if file.name == INIT else file).resolve()))
    return None


def theirs(folder: str, packages: Sequence[str] = PACKAGES) -> Iterator[Path]:
    """Files in `folder` ('': the working directory) that would be imported in place of one of our packages."""
    for name in packages:
        for file in (Path(folder, name, "__init__.py").absolute(), Path(folder, f"{name}.py").absolute()):
            if file.is_file():
                if file.resolve() != (ROOT / name / "__init__.py").resolve():
                    yield file
                break  # Python prefers a package to a module of the same name
