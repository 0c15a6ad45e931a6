"""Processes that a process has started, and those have, and so on; whatever group or session they have made for
themselves. Linux only: elsewhere none are found."""

import os
import signal
from contextlib import suppress
from pathlib import Path


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
