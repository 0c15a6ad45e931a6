"""Helpers for code that writes files: errors that name the file and say what to do (writing), digests, fsync, removal
of folders that untrusted code has filled (wipe) or killed processes have left (abandoned), and the lock of a run
folder, which has one writer (lock_held).
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import resource
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.errors import WrongInput
from cluster.reading import json_value, read_mapping

Digest = dict[str, int | str]  # {"bytes": …, "sha256": …}

FULL = (errno.ENOSPC, errno.EDQUOT)
SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
IN_RUST = re.compile(r"\(os error (\d+)\)")  # the end of an error's text in Rust's standard library


class WriteFailed(OSError):
    """A file that could not be written. learner.driver.failure tells its sentence without a traceback, and
    cluster.ray_actor passes it on as it is.

    Attributes:
        free: bytes that are left on its disk; None if that is not known. needed: bytes that were to be written, if
        known.
    """

    free: int | None = None
    needed: int | None = None

    def sentence(self) -> str:
        """The message for the user: which file, why, and what to do."""
        if self.errno in FULL:
            return f"the disk of {self.filename} is full ({lacks(self)}); free some of it{self._room()}"
        return f"{self.filename} cannot be written ({self.strerror}); {self._mended()}"

    def _room(self) -> str:
        free = None if self.errno == errno.EDQUOT else self.free  # with a quota, free space of the disk says nothing
        known = [
            f"{_size(count)} {what}" for count, what in ((free, "left"), (self.needed, "needed")) if count is not None
        ]
        return f" ({', '.join(known)})" if known else ""

    def _mended(self) -> str:
        if self.errno == errno.EROFS:
            return "a system makes a disk that fails read-only (dmesg tells why): make it writable again"
        if self.errno == errno.EFBIG:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            limit = "" if most == resource.RLIM_INFINITY else f", {_size(most)} here"
            return f"raise the limit on the size of a file (ulimit -f{limit})"
        if self.errno in (errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EREMOTEIO, errno.ENOTCONN):
            return "its disk, or the way there, has failed (dmesg tells why): mend it, or write elsewhere"
        if self.errno == errno.ENOENT:
            return "its folder was deleted or replaced: put it back"
        if self.errno in (errno.EACCES, errno.EPERM):
            return "give this user the right to write there"
        return "mend that"


def write_failed(path: Path, error: BaseException, needed: int | None = None) -> WriteFailed:
    """Makes a WriteFailed of the exception that writing `path` raised. needed: bytes that were to be written in all."""
    cause = error if isinstance(error, WriteFailed) else _of_the_system(error)
    if isinstance(cause, WriteFailed):
        failed = cause
    elif cause is not None:
        number, file = cause.errno or 0, cause.filename2 or cause.filename or path  # filename2: the target of a copy
        failed = WriteFailed(number, os.strerror(number), str(file))
    else:
        words = str(error).strip() or type(error).__name__
        failed = WriteFailed(0, words.splitlines()[0], str(path))
    if failed.free is None:
        failed.free = _free(Path(failed.filename))
    failed.needed = failed.needed or needed
    return failed


def _of_the_system(error: BaseException | None) -> OSError | None:
    """The operating system's error in an exception or its causes. Libraries in C++ and Rust report it as text, or lose
    it; None then."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error
        if (found := IN_RUST.search(str(error))) is not None:
            return OSError(int(found[1]), "")
        error = error.__cause__ or error.__context__
    return None


def _free(path: Path) -> int | None:
    for folder in path.parents:
        with suppress(OSError):
            found = os.statvfs(folder)
            return found.f_bavail * found.f_frsize
    return None


def _size(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in SIZES if count >= unit), SIZES[-1])
    return f"{count / unit:.1f} {name}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the operating system in this block into a WriteFailed, with `path` if the error names no
    file. Errors that say that another file or folder is in the way are left as they are."""
    try:
        yield
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno is None or isinstance(error, WriteFailed):
            raise
        raise write_failed(path, error) from error


def lacks(error: OSError) -> str:
    """The text of a file system's error; for a full disk it says whether bytes or inodes are used up, since the kernel
    has one error for both."""
    said = error.strerror or str(error)
    if error.errno != errno.ENOSPC or not isinstance(error.filename, str):
        return said
    path = Path(error.filename).absolute()
    found = os.statvfs(next(one for one in (path, *path.parents) if one.exists()))
    if found.f_favail or not found.f_files:
        return said
    free = found.f_bavail * found.f_frsize / 2**20
    return f"no inode is left for another file, though {free:.0f} MiB are free: delete files, many small"


def digest_of(file: Path) -> Digest:
    """Length and sha256 of a file, which is read for this."""
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def digests_in(folder: Path) -> dict[str, Digest]:
    """The digest of each file below the folder, by the file's path relative to the folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): digest_of(file) for file in files}


def fsync(path: Path) -> None:
    """Puts a file's content, or a folder's list of names, on the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locked(folder: Path) -> int | None:
    """Takes the lock of a folder and returns a descriptor, which holds it until it is closed or this process ends. None
    if another process has the lock. Raises OSError on a file system without locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # for example ENOLCK on a network file system
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def abandoned(root: Path, prefix: str) -> list[Path]:
    """Folders of this user in `root`, not links, that are named <prefix><pid>-... and whose process has ended: on this
    machine by its pid, in other containers that share `root` by the folder's lock."""
    return [folder for folder in root.glob(f"{prefix}*-*") if _is_abandoned(folder, prefix)]


def _is_abandoned(folder: Path, prefix: str) -> bool:
    owner = folder.name.removeprefix(prefix).partition("-")[0]
    if not owner.isdigit() or Path("/proc", owner).exists():
        return False
    try:
        found = folder.lstat()  # a link of another user must not be followed
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        lock = locked(folder)
    except OSError:  # another process has just removed it
        return False
    if lock is None:
        return False
    os.close(lock)
    return True


def wipe(folder: Path) -> None:
    """Removes a folder and its content of any depth, without following links, not even if the folder itself is one.

    Each folder inside is moved to the top and then emptied, so that neither paths nor the stack grow with the depth,
    which untrusted code can make greater than shutil.rmtree can handle. Raises OSError.
    """
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return
    except OSError:  # the folder is not empty, or is a link
        _empty(folder)


def _empty(folder: Path) -> None:
    beside = tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent)
    place = os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.rename(folder, "0", dst_dir_fd=place)
        left, moved = ["0"], 0
        while left:
            name = left.pop()
            if not stat.S_ISDIR(os.lstat(name, dir_fd=place).st_mode):
                os.unlink(name, dir_fd=place)
                continue
            with _opened(name, place) as here:
                for entry in list(os.scandir(here)):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.name, dir_fd=here)
                        continue
                    with _opened(entry.name, here):  # a folder can be moved only if its owner may write to it
                        moved += 1
                        left.append(str(moved))
                        os.rename(entry.name, left[-1], src_dir_fd=here, dst_dir_fd=place)
            os.rmdir(name, dir_fd=place)
    finally:
        os.close(place)
    os.rmdir(beside)


@contextmanager
def _opened(name: str, place: int) -> Iterator[int]:
    """Gives the owner all rights to the folder `name` in the folder `place`, and opens it."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    try:
        os.chmod(f"/proc/self/fd/{found}", stat.S_IRWXU)
        here = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=found)
        try:
            yield here
        finally:
            os.close(here)
    finally:
        os.close(found)


# One writer per run folder, by a lock that the kernel holds while the process lives: flock on runs/<name>/.lock. The
# text of the file says who holds the lock. A killed process leaves the file but not the lock, so no stale lock must be
# broken, and no process id guessed at.
#
# The lock works between hosts on NFS 4, NFS 3 with its lock daemon, and Lustre mounted with flock. If locks are local
# to a host (NFS mounted with nolock or local_lock), two runs on two hosts do not notice each other. On a file system
# without locks a warning is logged.

LOCK_FILE = ".lock"
LONGEST = 4096  # bytes that are read of the lock file
MOST_TRIES = 100
UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}

log = logging.getLogger(__name__)


@contextmanager
def lock_held(folder: Path) -> Iterator[None]:
    """Makes this process the only writer of the run folder inside this block. A missing folder is created, and removed
    again if it is empty at the end. Raises WrongInput if another process is the writer."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK_FILE
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
            with suppress(OSError):  # if the disk fails, the file stays, but the lock does not
                # Deleted before the lock is freed, so that the next process notices that its open file is not the lock.
                path.unlink()
        os.close(descriptor)
        _remove_empty(made)


def _take_folder(folder: Path) -> int:
    """Opens the folder itself, and locks it too if the file system can, since the lock file may be deleted during a
    run. Raises WrongInput if another process has that lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WrongInput(_refusal(folder, b"")) from None
    except OSError as error:  # NFS locks only files that are open for writing, which folders cannot be
        log.debug("%s: the folder itself cannot be locked: %s", folder, error)
    return descriptor


def _dangles(path: Path) -> bool:
    """Whether the path is a link to a missing file, where no folder can be created."""
    return path.is_symlink() and not path.exists()


def _take(path: Path) -> int:
    """Creates and locks the lock file and returns its descriptor. Raises WrongInput if another process has the lock."""
    tries = 0
    while True:
        tries += 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # another run has just ended and removed its empty folder
            if tries == MOST_TRIES:  # the file system cannot create folders, for example /proc
                raise
            continue
        except FileExistsError:  # another run has just removed its folder, or a file has the folder's name
            if (path.parent.exists() and not path.parent.is_dir()) or any(map(_dangles, path.parents)):
                raise
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, LONGEST, 0)
            os.close(descriptor)
            raise WrongInput(_refusal(path.parent, owner)) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(descriptor)
                raise
            log.warning("%s: no lock can be had here (%s); start no second run in it", path, error.strerror)
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # the former owner has removed the file between open and flock


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


def is_locked(folder: Path) -> bool:
    """Whether a run seems to go on in the folder, by the process id in its lock file. This is a guess for messages
    only, since a killed process leaves the file."""
    try:
        owner = read_mapping(folder / LOCK_FILE, LONGEST)
        gone = owner["host"] == socket.gethostname() and not Path(f"/proc/{int(owner['pid'])}").exists()
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):  # the owner has not written the file yet
        return True
    return not gone


def _refusal(folder: Path, owner: bytes) -> str:
    try:
        found = json_value(owner, LOCK_FILE)
        who = f"process {found['pid']} on host {found['host']} since {found['started']}"
    except (ValueError, KeyError, TypeError):  # the owner has not written the file yet
        who = f"a process that has just started, or whose {LOCK_FILE} was deleted"
    return (
        f"output_dir: a run folder has one writer, and {folder} is in use by {who}; wait for its end or stop it, or "
        "give this run another name="
    )


def _remove_empty(folders: list[Path]) -> None:
    """Removes these folders in order, the deepest first, up to the first that is not empty or does not exist."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            return
