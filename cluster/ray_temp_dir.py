"""The folder of a private Ray cluster: closed to other users, and removed after a driver that was killed before it
could."""

import os
import shutil
import tempfile
from pathlib import Path

from cluster.files import abandoned, locked

_ROOT, _PREFIX = Path("/tmp"), "gl-"  # short: socket paths end at 107 bytes


class RuntimeFolder:
    """/tmp/gl-<pid>-<random>, for its owner only, and in it the folder that Ray is given.

    Ray opens whatever it is given to everybody, sockets included; the folder above keeps them out.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        """Makes it; folders of processes that are gone are swept away first."""
        for folder in abandoned(root, _PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        self._lock = locked(self.path)  # held until this process ends, however it ends
        self.ray = self.path / "r"
        self.ray.mkdir()

    def remove(self) -> None:
        """Removes it with all that Ray and the roles left there."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
