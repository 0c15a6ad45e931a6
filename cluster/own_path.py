"""Where gleaner's packages are, for processes that have to find them before any file of the user's; and what such a
file has, for whoever imports it from there."""

import os
import sys
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
    """By the path of this process, '' for the working directory."""
    from cluster.by_path import INIT, name_of

    for entry in sys.path:
        folder = Path(entry or os.getcwd()).absolute()
        for place in (folder / package, folder / f"{package}.py"):
            there = (place / INIT).is_file() if place.suffix == "" else place.is_file()
            if there and place.resolve() != (ROOT / package).resolve():
                return import_module(name_of(place.resolve()))
    return None
