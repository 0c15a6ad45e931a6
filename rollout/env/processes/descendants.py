"""Processes that a process has started, and those have, and so on; whatever group or session they have made for
themselves. Linux only: elsewhere none are found."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 2.0  # that the kernel may take to end them


def descendants(pid: int) -> list[int]:
    """Those of a living process. One that has died has left its own to the next subreaper above (prctl)."""
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


def kill_own() -> None:
    """Ends all descendants of this process, and those that they start meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := descendants(os.getpid())) and time.monotonic() < deadline:
        kill(found)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)
