"""The folder of a private Ray cluster: closed to other users, and removed after a driver that was killed before it
could."""

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_ROOT, _PREFIX = Path("/tmp"), "gl-"  # short: socket paths end at 107 bytes


class RuntimeFolder:
    """/tmp/gl-<pid>-<random>, for its owner only, and in it the folder that Ray is given.

    Ray opens whatever it is given to everybody, sockets included; the folder above keeps them out.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        """Makes it; folders of processes that are gone are swept away first."""
        for folder in root.glob(f"{_PREFIX}*-*"):
            if _abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        self._lock = _locked(self.path)  # held until this process ends, however it ends
        self.ray = self.path / "r"
        self.ray.mkdir()

    def remove(self) -> None:
        """Removes it with all that Ray and the roles left there."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _abandoned(folder: Path) -> bool:
    """A real folder of this user, whose process is gone from here and from every container that shares /tmp."""
    owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
    if not owner.isdigit() or Path("/proc", owner).exists():
        return False
    try:
        found = folder.lstat()  # not what a link of another user may lead to
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        lock = _locked(folder)
    except OSError:  # another run has just swept it away
        return False
    if lock is None:
        return False
    os.close(lock)
    return True


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
