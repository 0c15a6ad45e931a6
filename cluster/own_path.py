"""Where gleaner's packages are, for processes that have to find them before any file of the user's."""

import os
from pathlib import Path

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
