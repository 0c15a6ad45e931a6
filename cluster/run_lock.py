"""One writer per run folder: a lock that the kernel holds for as long as the process lives.

It is flock on runs/<name>/.lock, whose text says who holds it. A process that is killed leaves the file behind but not
the lock, so there is no stale lock to break and no guess whether a process id still belongs to the same process.
Between hosts it holds where the file system carries locks: NFS 4, NFS 3 with its lock daemon, Lustre mounted with
flock. Where locks stay on one host (NFS mounted with nolock or local_lock), two runs on two hosts are not told apart;
where there are none at all, a warning says so.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.files import writing
from cluster.reading import json_value, read_mapping

NAME = ".lock"
LONGEST = 4096  # bytes of what it says
MOST_TRIES = 100
UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}

log = logging.getLogger(__name__)


class RunFolderInUse(RuntimeError):
    """Another process writes to the run folder; the message names it."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside this block this process is the only writer of the run folder. A missing folder is made, and removed again
    if it is empty at the end. Raises RunFolderInUse."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / NAME
    descriptor = _take(path)
    try:
        of_folder = _take_folder(folder)
        try:
            _sign(descriptor, path)
            yield
        finally:
            os.close(of_folder)
    finally:
        if _is_at(descriptor, path):
            with suppress(OSError):  # of a disk that fails: what is left is no lock
                path.unlink()  # before the lock goes: who waits for it sees that this file is no longer the folder's
        os.close(descriptor)
        _remove_empty(made)


def _take_folder(folder: Path) -> int:
    """A descriptor of the folder itself, locked where the file system can: the lock file may be deleted under a run.
    Raises RunFolderInUse."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunFolderInUse(_refusal(folder, b"")) from None
    except OSError as error:  # NFS takes locks on files that are open for writing, which no folder is
        log.debug("%s: the folder itself cannot be locked: %s", folder, error)
    return descriptor


def _dangles(path: Path) -> bool:
    """Whether it is a link to what is not there, so that no folder can be made of it."""
    return path.is_symlink() and not path.exists()


def _take(path: Path) -> int:
    """A descriptor of the folder's lock file, locked."""
    tries = 0
    while True:
        tries += 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # a run that ended without leaving anything has just removed its folder
            if tries == MOST_TRIES:  # no: a file system that makes no folders, as /proc
                raise
            continue
        except FileExistsError:  # it has removed it while we made it; or there is a file of that name
            if (path.parent.exists() and not path.parent.is_dir()) or any(map(_dangles, path.parents)):
                raise
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, LONGEST, 0)
            os.close(descriptor)
            raise RunFolderInUse(_refusal(path.parent, owner)) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(descriptor)
                raise
            log.warning("%s: no lock can be had here (%s); start no second run in it", path, error.strerror)
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its owner ended and removed it between our two lines


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(descriptor: int, path: Path) -> None:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
    with writing(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)


def is_held(folder: Path) -> bool:
    """Whether a run goes on in the folder, for people: a guess by the process id in its lock file, which a killed
    process leaves behind. Nothing is decided by it."""
    try:
        owner = read_mapping(folder / NAME, LONGEST)
        gone = owner["host"] == socket.gethostname() and not Path(f"/proc/{int(owner['pid'])}").exists()
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):  # it has the lock and not signed yet
        return True
    return not gone


def _refusal(folder: Path, owner: bytes) -> str:
    try:
        found = json_value(owner, NAME)
        who = f"process {found['pid']} on host {found['host']} since {found['started']}"
    except (ValueError, KeyError, TypeError):  # it has the lock and not signed yet
        who = f"a process that has just started, or whose {NAME} was deleted"
    return (
        f"output_dir: a run folder has one writer, and {folder} is in use by {who}; wait for its end or stop it, or "
        "give this run another name="
    )


def _remove_empty(folders: list[Path]) -> None:
    """Deepest first, up to the first that holds something or is gone."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            return
