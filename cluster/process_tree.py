"""Processes that a process has started, and those have, and so on; whatever group or session they have made for
themselves. Linux only: elsewhere none are found."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

MARK = (
    "GLEANER_MARK"  # what processes hand on to those that they start, and are known by; rewards.environment lets it by
)


def descendants(pid: int) -> list[int]:
    """Those of a living process; what has detached itself from its parent is not among them."""
    found, asked = list[int](), [pid]
    while asked:
        children = _children(asked.pop())
        found += children
        asked += children
    return found


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(child) for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return []


def kill(pids: list[int]) -> None:
    """SIGKILL to each that is there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sweep(found: Callable[[], list[int]], patience_s: float) -> None:
    """Ends all processes that are found, those too that they start meanwhile. They are waited for no longer than
    `patience_s`."""
    deadline = time.monotonic() + patience_s
    while left := found():
        kill(left)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """All that have this mark, but for this process."""
    return [pid for pid, own in _marks() if own == mark]


def orphans(mark: str) -> list[int]:
    """All whose mark begins so and ends in the number of a process that is no more."""
    found = [(pid, own.removeprefix(mark)) for pid, own in _marks() if own.startswith(mark)]
    return [pid for pid, number in found if number.isdecimal() and int(number) != pid and not _lives(int(number))]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _marks() -> Iterator[tuple[int, str]]:
    begin = f"{MARK}=".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is another user's
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(begin) and int(folder.name) != os.getpid():
                    yield int(folder.name), entry[len(begin) :].decode(errors="replace")
