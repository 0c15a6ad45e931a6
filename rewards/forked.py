"""Scores of what a policy wrote where the scorer evaluates it, each in a forked child that is confined.

A fork costs milliseconds, where a fresh interpreter (rewards.code_process) would import sympy for each answer. **These
are limits, and no security boundary**, as those of rewards.code_process.
"""

import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rewards import code_child
from rewards.base import said

SECONDS = 2  # of wall time, and of CPU time, that one call may take
PARALLEL = 4  # calls at once: more would share the cores, and an answer that takes its time would be late
_MEMORY = 256 << 20  # bytes that a call may write to, beside what this process holds
_LONGEST = 500  # characters of an error: in JSON less than PIPE_BUF, so that one read has all of it
_PIPE = 3  # its descriptor in the child
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.", "shutil.", "ctypes.", "signal.", "tempfile.")  # audit events, by their beginning
_READS = ("os.listdir", "os.scandir", "os.walk")  # but these, of which imports are made


class _Child(NamedTuple):
    pid: int
    pipe: int


def scores(calls: Sequence[Callable[[], float]]) -> list[float | str]:
    """What each call returns, or the exception that it raised, in words; 0.0 if it is late, or ends its process.

    To be called where no other thread holds a lock that a call needs. Raises OSError if no process can be started.
    """
    found: list[float | str] = []
    for start in range(0, len(calls), PARALLEL):
        found += _together(calls[start : start + PARALLEL])
    return found


def _together(calls: Sequence[Callable[[], float]]) -> list[float | str]:
    memory = _held() + _MEMORY
    children: list[_Child] = []
    try:
        for call in calls:
            children.append(_start(call, memory))
        told = _told([child.pipe for child in children])
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            os.close(child.pipe)
    return [_read(told.get(child.pipe, b"")) for child in children]


def _held() -> int:
    """Bytes of this process that RLIMIT_DATA counts: proc(5), statm."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _start(call: Callable[[], float], memory: int) -> _Child:
    read, write = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _run(call, memory, write)
    except OSError:
        os.close(read)
        raise
    finally:
        os.close(write)
    return _Child(pid, read)


def _run(call: Callable[[], float], memory: int, pipe: int) -> NoReturn:
    """The child, to its end."""
    try:
        _keep(pipe)
        code_child.confine(SECONDS, memory, 0)
        sys.addaudithook(_refuse)
        told: float | str
        try:
            told = float(call())
        except Exception as error:
            told = f"{type(error).__name__}: {said(error)}"[:_LONGEST]
        os.write(_PIPE, json.dumps(told).encode())
    finally:
        os._exit(0)


def _keep(pipe: int) -> None:
    """Closes every file but the pipe: what is evaluated must not write to the log, nor answer for this process."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.dup2(pipe, _PIPE)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _PIPE:
            with suppress(OSError):  # that of the listing itself
                os.close(int(name))


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and arguments[2] & _WRITES:
        raise PermissionError("an answer may write no files here")
    if event.startswith(_CHANGES) and event not in _READS:
        raise PermissionError(f"an answer may not do this here: {event}")


def _told(pipes: Sequence[int]) -> dict[int, bytes]:
    """What came from each pipe in time."""
    told: dict[int, bytes] = {}
    deadline = time.monotonic() + SECONDS
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                told[key.fd] = os.read(key.fd, 1 << 16)
                waiting.unregister(key.fd)
    return told


def _read(told: bytes) -> float | str:
    """Never a pickle: what was evaluated may have written it."""
    try:
        value = json.loads(told)
    except ValueError:
        return 0.0
    return value if isinstance(value, float | str) else 0.0
