"""Scores of what a policy wrote where the scorer evaluates it, each in a forked child that confines itself.

A fork costs milliseconds, where a fresh interpreter (rewards.code_process) would import sympy for each answer. What is
evaluated shares the interpreter of the scorer, so a caller lets no code through (rewards.reasoning_gym): the walls of
cluster.confinement are the second line, and `gleaner doctor` says which of them stand on this kernel.
"""

import json
import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from cluster.confinement import confine
from rewards import memory
from rewards.base import said

SECONDS = 2  # of wall time, and of CPU time, that one call may take
PARALLEL = 4  # calls at once: more would share the cores, and an answer that takes its time would be late
_MEMORY = 256 << 20  # bytes that a call may write to, beside what this process holds
_LONGEST = 500  # characters of an error
_MOST = 8 << 10  # bytes that a child may say
_PIPE = 3  # its descriptor in the child
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.", "shutil.", "ctypes.", "signal.", "tempfile.")  # audit events, by their beginning
_READS = ("os.listdir", "os.scandir", "os.walk")  # but these, of which imports are made


class NotEvaluated(Exception):
    """What a call refuses to evaluate; the reason."""


class Scored(NamedTuple):
    """The score of a call: 0 where it has none, since it raised an exception (in words), or (`why`) since it was late,
    ended its process, or refused."""

    score: float
    raised: str = ""
    why: str = ""


class _Child(NamedTuple):
    pid: int
    pipe: int
    nonce: str  # without which nothing counts that comes from the pipe


def scores(calls: Sequence[Callable[[], float]]) -> list[Scored]:
    """What becomes of each call.

    To be called where no other thread holds a lock that a call needs. Raises OSError if no process can be started.
    """
    found: list[Scored] = []
    for start in range(0, len(calls), PARALLEL):
        found += _together(calls[start : start + PARALLEL])
    return found


def _together(calls: Sequence[Callable[[], float]]) -> list[Scored]:
    most = memory.held() + _MEMORY
    children: list[_Child] = []
    told: dict[int, bytes] = {}
    late: set[int] = set()
    try:
        for call in calls:
            children.append(_start(call, most))
        told, late = _told([child.pipe for child in children])
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            os.close(child.pipe)
    return [_read(told[child.pipe], child, late=child.pipe in late) for child in children]


def _start(call: Callable[[], float], most: int) -> _Child:
    nonce = secrets.token_hex(16)
    read, write = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _run(call, most, write, nonce)
    except OSError:
        os.close(read)
        raise
    finally:
        os.close(write)
    return _Child(pid, read, nonce)


def _run(call: Callable[[], float], most: int, pipe: int, nonce: str) -> NoReturn:
    """The child, to its end."""
    try:
        _keep(pipe)
        confine(SECONDS, most, 0, writes=False)
        sys.addaudithook(_refuse)
        try:
            scored = Scored(float(call()))
        except NotEvaluated as error:
            scored = Scored(0.0, why=str(error)[:_LONGEST])
        except Exception as error:
            scored = Scored(0.0, f"{type(error).__name__}: {said(error)}"[:_LONGEST])
        os.write(_PIPE, json.dumps([nonce, *scored]).encode())
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


def _told(pipes: Sequence[int]) -> tuple[dict[int, bytes], set[int]]:
    """All that came from each pipe until its end, and those that had none in time, or no end of what they say."""
    told = dict.fromkeys(pipes, b"")
    deadline = time.monotonic() + SECONDS
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                part = os.read(key.fd, _MOST)
                told[key.fd] += part
                if not part or len(told[key.fd]) > _MOST:
                    waiting.unregister(key.fd)
        return told, {key.fd for key in waiting.get_map().values()}


def _read(told: bytes, child: _Child, *, late: bool) -> Scored:
    """Never a pickle: what was evaluated may have written it."""
    if late:
        return Scored(0.0, why=f"not evaluated within {SECONDS} s")
    try:
        nonce, score, raised, why = json.loads(told)
        if nonce == child.nonce and isinstance(score, float):
            return Scored(score, str(raised), str(why))
    except (ValueError, TypeError):
        pass
    return Scored(0.0, why="its process ended without a score")
