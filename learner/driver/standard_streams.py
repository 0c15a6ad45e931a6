"""Standard input, output and error that may be closed, or lose who reads them: `gleaner train ... | head`, a dead tee,
a terminal that vanishes, a disk behind `>` that fills, `>&-`. It costs a run nothing but what was to be read.

A descriptor that is closed becomes /dev/null, before a file of the run's could be opened under its number and be
written into. One that cannot be written any more becomes the file that `kept_in` names, or /dev/null before that; so
does what libraries, threads and later child processes write to it. Loads the standard library alone.
"""

import errno
import io
import os
import select
import sys
from pathlib import Path
from typing import Any, TextIO

CONSOLE = "console.log"  # in a run's folder: what was printed after those who read it had gone

_kept: Path | None = None
_in_file: set[int] = set()  # descriptors that are that file now
_lost: dict[int, OSError] = {}  # descriptor -> why what was written to it is nowhere
_commentary = False
_originals: list[Any] = []  # streams that were replaced: as one goes, it closes its descriptor


class _Lasting(io.FileIO):
    """A descriptor to which writing never fails."""

    def write(self, data: Any) -> int:
        """All of it."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            try:
                count = super().write(left)
            except OSError as error:
                _replace(self.fileno(), error)
                continue
            if count is None:  # somebody has set O_NONBLOCK, as programs do that share a terminal with this one
                writable = select.poll()
                writable.register(self.fileno(), select.POLLOUT)
                writable.poll()
            left = left[count or 0 :]
        return size


def last() -> None:
    """From here on they last. Streams that somebody has put in the place of this process's own are left alone."""
    _open_closed()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream, own = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is own and not (own is not None and isinstance(getattr(own.buffer, "raw", own.buffer), _Lasting)):
            setattr(sys, name, _lasting(descriptor, own))
            setattr(sys, f"__{name}__", getattr(sys, name))


def _open_closed() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            _point(descriptor, os.devnull, os.O_RDWR)


def _lasting(descriptor: int, own: Any) -> TextIO:
    raw = _Lasting(descriptor, "w", closefd=False)
    if own is None:  # it was closed
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    own.flush()
    _originals.append(own)
    unbuffered = isinstance(own.buffer, io.FileIO)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        own.encoding, own.errors, line_buffering=own.line_buffering, write_through=own.write_through,
    )  # fmt: skip


def kept_in(file: Path) -> None:
    """What cannot be written where it should go is added to this file, which is made as soon as there is such."""
    global _kept
    _kept = file
    for descriptor in list(_lost):
        if _to_file(descriptor):
            del _lost[descriptor]


def are_commentary() -> None:
    """What this process prints is not what it is for: `outcome` says nothing of its loss."""
    global _commentary
    _commentary = True


def outcome(code: int) -> int:
    """The exit code of a process that comes to its end with `code`: 1 instead of 0 where something of its standard
    output could not be written, with a sentence. A reader that went away has what it wanted."""
    sys.stdout.flush()
    error = _lost.get(1)
    if error is None or _commentary or error.errno == errno.EPIPE:
        return code
    print(f"error: standard output could not be written ({error.strerror}); send it elsewhere", file=sys.stderr)
    return code or 1


def _replace(descriptor: int, error: OSError) -> None:
    """After `error`, which the last write to it has met."""
    if _kept is None or descriptor in {*_in_file, *_lost} or not _to_file(descriptor):
        _lost.setdefault(descriptor, error)
        _point(descriptor, os.devnull, os.O_WRONLY)


def _to_file(descriptor: int) -> bool:
    assert _kept is not None
    try:
        _point(descriptor, _kept, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    except OSError:  # the run says of its other files that their folder is gone, or the disk full
        return False
    _in_file.add(descriptor)
    return True


def _point(descriptor: int, file: str | Path, flags: int) -> None:
    opened = os.open(file, flags, 0o644)
    if opened == descriptor:
        os.set_inheritable(descriptor, True)
    else:
        os.dup2(opened, descriptor)
        os.close(opened)
