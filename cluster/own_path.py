"""Where gleaner's packages are, for processes that have to find them before any file of the user's; and what such a
file has, for whoever imports it from there."""

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
    """What the path of another process lacks."""
    return [] if ROOT.name in INSTALLED else [str(ROOT)]


def environment() -> dict[str, str]:
    """The variable by which another Python finds them first, if it needs one. Started with -P, it has no working
    directory before that."""
    path = [*entries(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path)))} if entries() else {}


ASIDE: dict[str, ModuleType] = {}
"""Modules of the user's that were imported by names of ours before these were."""


def of_users(package: str, attribute: str) -> Any:
    """What stands by that name in the user's module that is called as a package of ours, `rewards.py` in the folder of
    the script, say: `from rewards import accuracy` finds our package, which asks here. Raises AttributeError."""
    own = ROOT / package
    ours = attribute.startswith("_") or (own / attribute).exists() or (own / f"{attribute}.py").exists()
    found = None if ours else ASIDE.get(package) or _beside(package)
    if found is None or not hasattr(found, attribute):
        raise AttributeError(f"module {package!r} has no attribute {attribute!r}")
    return getattr(found, attribute)


def _beside(package: str) -> ModuleType | None:
    """By the path of this process."""
    from cluster.by_path import INIT, name_of

    for entry in sys.path:
        for file in theirs(entry, (package,)):
            return import_module(name_of((file.parent if file.name == INIT else file).resolve()))
    return None


def theirs(folder: str, packages: Sequence[str] = PACKAGES) -> Iterator[Path]:
    """Files there that would be imported in place of a package of ours; '' is the working directory."""
    for name in packages:
        for file in (Path(folder, name, "__init__.py").absolute(), Path(folder, f"{name}.py").absolute()):
            if file.is_file():
                if file.resolve() != (ROOT / name / "__init__.py").resolve():
                    yield file
                break  # a package comes before a module beside it
