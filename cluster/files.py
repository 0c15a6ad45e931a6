"""What every writer of files here needs: errors that name the path, digests, content that is on the disk, and an end of
folders that others have filled or left."""

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Digest = dict[str, int | str]  # {"bytes": …, "sha256": …}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside this block an OSError names the path; that of a full disk would say only [Errno 28]."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def lacks(error: OSError) -> str:
    """What a file system said that it cannot do; of a full one whether bytes or inodes are used up, which the kernel
    calls the same."""
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
    """Length and sha256 of the file, read back from the disk."""
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def digests_in(folder: Path) -> dict[str, Digest]:
    """The digest of every file below the folder, by its path relative to the folder."""
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
    """A descriptor that holds the folder's lock for as long as it is open, however this process ends; None if another
    has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def abandoned(root: Path, prefix: str) -> list[Path]:
    """Real folders of this user called <prefix><pid>-..., whose process is gone from here and, by their lock, from
    every container that shares `root`."""
    return [folder for folder in root.glob(f"{prefix}*-*") if _is_abandoned(folder, prefix)]


def _is_abandoned(folder: Path, prefix: str) -> bool:
    owner = folder.name.removeprefix(prefix).partition("-")[0]
    if not owner.isdigit() or Path("/proc", owner).exists():
        return False
    try:
        found = folder.lstat()  # not what a link of another user may lead to
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        lock = locked(folder)
    except OSError:  # another process has just swept it away
        return False
    if lock is None:
        return False
    os.close(lock)
    return True


def wipe(folder: Path) -> None:
    """Removes it with all that is in it, however deep, following no link, not even one in its own place.

    A folder within is moved out and emptied in its turn: neither path nor stack grows with the depth, which code can
    make greater than shutil.rmtree bears. Raises OSError.
    """
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return
    except OSError:  # there is something in it, or it is a link
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
                    with _opened(entry.name, here):  # a closed one cannot be moved
                        moved += 1
                        left.append(str(moved))
                        os.rename(entry.name, left[-1], src_dir_fd=here, dst_dir_fd=place)
            os.rmdir(name, dir_fd=place)
    finally:
        os.close(place)
    os.rmdir(beside)


@contextmanager
def _opened(name: str, place: int) -> Iterator[int]:
    """A descriptor of the folder of that name in the folder `place`, to which its owner is given all rights first."""
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
