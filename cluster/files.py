"""What every writer of files here needs: errors that name the path, digests, and content that is on the disk."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Digest = dict[str, int | str]  # {"bytes": …, "sha256": …}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it an error of the operating system names the path: of a full disk it would say only [Errno 28]."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def digest_of(file: Path) -> Digest:
    """Its length and sha256, as they are read back."""
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def digests_in(folder: Path) -> dict[str, Digest]:
    """Of every file below the folder, by its path in it."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): digest_of(file) for file in files}


def fsync(path: Path) -> None:
    """The file's content, or a folder's list of names, survives a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
