"""Earlier commits that are measured beside this one.

Apart from what measures: an earlier commit runs with its own benchmarks first on the path, and takes from here only the
files that it lacks.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.system.workloads import ROOT


def short(revision: str) -> str:
    """Its abbreviated commit."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", revision]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with the files of that commit."""
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as parent:
        folder = Path(parent) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)
