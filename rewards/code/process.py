"""Runs Python code that the policy wrote in a process of its own: a call of the Python tool (`run`), or a program such
as the unit tests of rewards.built_in.unit_tests (`outcome_of`).

The process confines itself (cluster.confinement), and `gleaner doctor` says which walls this kernel has. **Limits and
walls keep the code from your files, processes and secrets, and are no virtual machine**: a bug of the kernel is a way
out. Run code that you do not trust in a container.

This module opens nothing by a name that the code could change: the code prints to a file in memory without a name, and
its folder is removed without following links in it.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cluster.actor import within
from cluster.child import Program, nameless
from cluster.confinement import command
from cluster.files import abandoned, locked, wipe

log = logging.getLogger("rewards")

PROGRAM = "rewards.code.child"
FILES, FILES_BYTES = 1000, 4  # files in the code's folder, at most, and their size together as a multiple of file_bytes
LOOK_S = 0.2  # between two checks of the code's folder, whose total size no limit of the kernel bounds
_PREFIX = "python-tool-"
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one call.

    Attributes:
        seconds: wall time, and CPU time. It must be less than the time-out of the caller (PythonTools, a reward
            function), at which the printed text would be lost.
        memory_bytes: writable memory of the process (RLIMIT_DATA).
        file_bytes: size of each file that the process writes, and of its output; all files together may have four times
            that.
        characters: length of the printed text that is returned.
    """

    seconds: float = 8.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    characters: int = 4000


class Outcome(NamedTuple):
    """The outcome of a program. printed: its output, cut in the middle if it is too long. ended: why the program was
    stopped or which signal ended it, else ''."""

    printed: str
    ended: str


async def run(code: str, limits: Limits) -> str:
    """Runs `code` and returns what it prints to stdout and stderr, cut in the middle if that is too long, and then why
    it was stopped, if it was.

    The code starts in an empty folder, which is removed afterwards, and with none of this process's variables in its
    environment. It can read the interpreter and its libraries, write to its folder, and neither use the network nor
    start or signal processes, as far as this kernel can enforce that (`gleaner doctor`). Python's own functions for
    network and processes raise an error on any kernel; without the kernel's walls, code can evade this below Python.
    """
    outcome = await outcome_of(PROGRAM, code.encode("utf-8", "replace"), limits)
    ended = f"error: {outcome.ended}" if outcome.ended else ""
    return "\n".join(part for part in (outcome.printed.rstrip("\n"), ended) if part) or "(the code printed nothing)"


async def outcome_of(module: str, given: bytes, limits: Limits, *, start_s: float = 0.0) -> Outcome:
    """Runs `main` of one of our modules in a fresh interpreter and a folder of its own, with `given` as its standard
    input, until it ends or exceeds a limit. start_s: additional wall time, for a program that enforces `seconds` itself
    once it has started. Raises OSError if no process can be started."""
    with _folder() as home, nameless(given) as told, nameless() as output:
        program = Program(
            command(module, str(math.ceil(limits.seconds)), str(limits.memory_bytes), str(limits.file_bytes)),
            stdin=told, stdout=output, stderr=output, cwd=home,
            env=_ENVIRONMENT | {"HOME": str(home), "TMPDIR": str(home)},
        )  # fmt: skip
        end = asyncio.wrap_future(program.ended)
        try:
            ended = await _ended(end, home, limits, start_s)
        finally:
            program.kill()
            await end
            code = program.code()
        return Outcome(_shown(output.fileno(), limits.characters), ended or _death(code, limits))


async def _ended(end: asyncio.Future[None], home: Path, limits: Limits, start_s: float) -> str:
    """Waits until the program ends or must be stopped. Returns why it must be stopped, else ''."""
    try:
        async with within(limits.seconds + start_s):
            while not (await asyncio.wait([end], timeout=LOOK_S))[0]:
                if _too_much(home, FILES_BYTES * limits.file_bytes):
                    mebibytes = FILES_BYTES * limits.file_bytes / 2**20
                    return f"stopped, since its files took more than {mebibytes:g} MiB or were more than {FILES}"
    except TimeoutError:
        return f"stopped after {limits.seconds:g} s"
    return ""


def _death(code: int, limits: Limits) -> str:
    if code >= 0:
        return ""
    if code == -signal.SIGXCPU:
        return f"stopped after {limits.seconds:g} s"
    return f"the process died ({signal.Signals(-code).name})"


def _shown(descriptor: int, most: int) -> str:
    """The text of an output file; of a text longer than `most` bytes only the beginning and the end, which may have an
    error, are read."""
    size = os.fstat(descriptor).st_size
    if size <= most:
        return os.pread(descriptor, size, 0).decode("utf-8", "replace")
    half = most // 2
    begin, end = os.pread(descriptor, half, 0), os.pread(descriptor, half, size - half)
    cut = size - len(begin) - len(end)
    return f"{begin.decode('utf-8', 'replace')}\n[... {cut} bytes left out ...]\n{end.decode('utf-8', 'replace')}"


def _too_much(folder: Path, most_bytes: int) -> bool:
    """Whether a folder has more than FILES files and folders, or they take more than `most_bytes` on the disk."""
    files, taken, folders = 0, 0, [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    files, taken = files + 1, taken + found.st_blocks * 512
                    if files > FILES or taken > most_bytes:
                        return True
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(entry.path)
        except (FileNotFoundError, PermissionError):  # the code has removed the folder, or closed it even to itself
            continue
        except OSError:  # the path is too long, since folders are nested very deeply
            return True
    return False


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """An empty folder, which is removed at the end of the block. It is locked until then, so that other processes can
    tell that it is abandoned if this process is killed (`sweep`)."""
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    lock = None
    with contextlib.suppress(OSError):  # a file system without locks
        lock = locked(folder)
    try:
        yield folder
    finally:
        _wipe(folder)
        if lock is not None:
            os.close(lock)


def sweep() -> None:
    """Removes the folders that killed processes have left on this machine."""
    for folder in abandoned(Path(tempfile.gettempdir()), _PREFIX):
        _wipe(folder)


def _wipe(folder: Path) -> None:
    try:
        wipe(folder)
    except FileNotFoundError:  # another process has just removed it
        return
    except OSError as error:
        log.warning("%s: a folder of a policy's code could not be removed: %s", folder, error)
