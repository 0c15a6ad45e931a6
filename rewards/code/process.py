"""Python code that a policy wrote, run in a process of its own: as a tool's call, or under unit tests.

The process confines itself (cluster.confinement), and `gleaner doctor` says by what on this kernel. **Limits and walls
keep it from your files, processes and secrets, and are no virtual machine**: a mistake of the kernel is a way out. Give
a container to what you do not trust.

Nothing that the code can change is opened by its name here: what it prints goes to a file in memory that has none, of
which one descriptor is kept, and its folder is wiped without following anything in it.
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
FILES, FILES_BYTES = 1000, 4  # in its folder, and how many times file_bytes they may take together
LOOK_S = 0.2  # between looks at that folder: the kernel counts what is in no folder
_PREFIX = "python-tool-"
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one call.

    Attributes:
        seconds: of wall time, and of CPU time; less than the time-out of whoever waits (PythonTools, a reward
            function), which would show nothing of what was printed.
        memory_bytes: that the process may write to (RLIMIT_DATA).
        file_bytes: of any file that it writes, and of what it prints; all files together may take four times that.
        characters: of what it printed that are shown.
    """

    seconds: float = 8.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    characters: int = 4000


class Outcome(NamedTuple):
    """What a program printed, cut in the middle where it is too long, and how it ended if not well, else ''."""

    printed: str
    ended: str


async def run(code: str, limits: Limits) -> str:
    """What `code` prints to stdout and stderr, cut in the middle where it is too long, then how it ended if not well.

    It starts in an empty folder that is wiped afterwards, with no variables of ours in its environment. It reads the
    interpreter and its libraries and writes its own folder, has no network, starts no processes and signals none, as
    far as this kernel can see to that (`gleaner doctor`). Python's own ways to network and processes are refused on any
    kernel, as an error that the code sees; where that is all there is, code that goes below Python finds a way.
    """
    outcome = await outcome_of(PROGRAM, code.encode("utf-8", "replace"), limits)
    ended = f"error: {outcome.ended}" if outcome.ended else ""
    return "\n".join(part for part in (outcome.printed.rstrip("\n"), ended) if part) or "(the code printed nothing)"


async def outcome_of(module: str, given: bytes, limits: Limits, *, start_s: float = 0.0) -> Outcome:
    """Runs `main` of one of our modules to its end, in a fresh interpreter and a folder of its own, with `given` as its
    standard input. start_s: more wall time, for a program that keeps the limit itself once it has started. Raises
    OSError where this process can start none."""
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
    """Waits for its end, or for what is to end it: that in words, else ''."""
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
    """Its beginning and its end, which has the error; read no further than needed."""
    size = os.fstat(descriptor).st_size
    if size <= most:
        return os.pread(descriptor, size, 0).decode("utf-8", "replace")
    half = most // 2
    begin, end = os.pread(descriptor, half, 0), os.pread(descriptor, half, size - half)
    cut = size - len(begin) - len(end)
    return f"{begin.decode('utf-8', 'replace')}\n[... {cut} bytes left out ...]\n{end.decode('utf-8', 'replace')}"


def _too_much(folder: Path, most_bytes: int) -> bool:
    """Whether there are more than FILES, or such as take more bytes. Looks no further than it must."""
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
        except (FileNotFoundError, PermissionError):  # removed meanwhile, or closed to itself, too
            continue
        except OSError:  # nested beyond the longest path
            return True
    return False


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """An empty folder, wiped at the end, and locked until then: where this process is killed, others know by that that
    it is nobody's (`sweep`)."""
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
    """Wipes the folders that killed processes have left here."""
    for folder in abandoned(Path(tempfile.gettempdir()), _PREFIX):
        _wipe(folder)


def _wipe(folder: Path) -> None:
    try:
        wipe(folder)
    except FileNotFoundError:  # another process has just wiped it
        return
    except OSError as error:
        log.warning("%s: a folder of a policy's code could not be removed: %s", folder, error)
