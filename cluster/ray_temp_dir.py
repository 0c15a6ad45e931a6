"""The folder of a private Ray cluster: made for one driver, and removed after one that was killed before it could."""

import os
import shutil
import tempfile
from pathlib import Path

_ROOT, _PREFIX = Path("/tmp"), "gl-"  # short: socket paths end at 107 bytes


def new_folder() -> Path:
    """A folder of this process; those of processes that are gone are swept away first."""
    for folder in _ROOT.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_ROOT))
