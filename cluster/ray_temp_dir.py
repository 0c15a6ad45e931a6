"""The folder of a private Ray cluster: closed to other users, and removed after a driver that was killed before it
could."""

import os
import shutil
import tempfile
from pathlib import Path

from cluster.files import abandoned, locked
from cluster.placement import PlacementError

_USUAL, _PREFIX = Path("/tmp"), "gl-"
LONGEST = 21  # bytes of its path: that of a socket ends at 107, and gl-... and what Ray makes in it have 86


def root() -> Path:
    """Where temporary folders are made here: TMPDIR, or /tmp where that is not set, too long or not to be written.
    Raises PlacementError: neither can be."""
    given = Path(os.environ.get("TMPDIR") or _USUAL)
    wrong = {}
    for folder in dict.fromkeys((given, _USUAL)):
        if len(os.fsencode(folder)) > LONGEST:
            wrong[folder] = f"has more than {LONGEST} bytes"
            continue
        try:
            tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder).cleanup()
        except OSError as error:
            wrong[folder] = error.strerror or str(error)
        else:
            return folder
    told = ", ".join(f"{folder}: {why}" for folder, why in wrong.items())
    raise PlacementError(
        f"TMPDIR: must be a folder that can be written, of a path of at most {LONGEST} bytes, since sockets lie in it "
        f"({told}); set it to such a folder"
    )


class RuntimeFolder:
    """<root>/gl-<pid>-<random>, for its owner only, and in it the folder that Ray is given.

    Ray opens whatever it is given to everybody, sockets included; the folder above keeps them out.
    """

    def __init__(self, place: Path | None = None) -> None:
        """Makes it in `place`, or the usual one; folders of processes that are gone are swept away first. Raises
        PlacementError."""
        place = root() if place is None else place
        for folder in abandoned(place, _PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
        self._lock = locked(self.path)  # held until this process ends, however it ends
        self.ray = self.path / "r"
        self.ray.mkdir()

    def remove(self) -> None:
        """Removes it with all that Ray and the roles left there."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
