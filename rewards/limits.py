"""What a reward process may hold and how long it may take: memory cap, deadlines, and where its output goes."""

import errno
import io
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cluster.confinement import limit

# What a reward process may hold: its memory cap, what is said of a function that met it, and what has leaked.


DEFAULT_MEMORY = (
    4 << 30
)  # bytes: torch and a reward model of a billion parameters in 16 bits, or any number of checkers
GIB = 1 << 30
_CAUSES = 10  # of an exception that are looked at
_THREADS = 1000  # that a function may have: no limit of the kernel says so
# What other languages say in place of a MemoryError.
_SAID = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "unable to allocate")


def cap_memory(memory_bytes: int) -> None:
    """Limits the memory that this process, and each that it starts, can write to.

    Not its address space, which CUDA, torch and thread pools reserve by tens of GB and never fill.
    """
    limit(resource.RLIMIT_DATA, memory_bytes)


def memory_met(error: BaseException) -> bool:
    """True if `error` says that main memory ran out (a GPU's memory has no cap here)."""
    if isinstance(error, MemoryError):
        return True
    try:
        text = str(error).lower()
    except BaseException:  # whatever the __str__ of somebody's exception does
        return False
    return "cuda" not in text and any(words in text for words in _SAID)


def memory_spent(error: BaseException) -> bool:
    """True if it says that the process had no memory, files or threads left, which other calls may have taken."""
    told: BaseException | None = error
    for _ in range(_CAUSES):
        if told is None:
            return False
        if memory_met(told) or (isinstance(told, OSError) and told.errno in (errno.EMFILE, errno.ENOMEM)):
            return True
        if isinstance(told, RuntimeError) and "can't start new thread" in str(told):
            return True
        told = told.__cause__ or told.__context__
    return False


class Usage(NamedTuple):
    """Of this process: bytes that RLIMIT_DATA counts, open files, threads."""

    memory: int
    files: int
    threads: int

    def leaks(self, begun: "Usage", near: float = 0.9) -> bool:
        """Whether so much of a limit is taken, much of it since the beginning."""
        most = resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0], _THREADS
        return any(
            limit != resource.RLIM_INFINITY and now > near * limit and now - first > near / 2 * (limit - first)
            for now, first, limit in zip(self, begun, most, strict=True)
        )


def memory_usage() -> Usage:
    """As it is now: proc(5), statm and stat."""
    threads = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[17])
    return Usage(memory_held(), len(os.listdir("/proc/self/fd")), threads)


def memory_held() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def memory_advice() -> str:
    """The cap of this process, which it met, and what to set instead."""
    bytes_ = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if bytes_ == resource.RLIM_INFINITY:
        return "the machine has no more memory"
    return (
        f"its process may hold {bytes_ / GIB:g} GiB: raise rollout.process_memory, for example to "
        f"{2 * bytes_ / GIB:g}GiB, or let the function need less"
    )


# What reward functions print goes to no standard output of ours, which may be JSON, and does not flood a console.

NAME = "reward_output.log"  # in a run's folder


def redirect_output(file: str | None) -> None:
    """Standard output and error of this process and its children go to the end of that file (None: output to where
    errors go)."""
    descriptor = 2
    if file is not None:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError:  # no folder on this node, or a full disk: what is printed is no reason to end a run
            file = None
    os.dup2(descriptor, 1)
    if file is not None:
        os.dup2(descriptor, 2)
        os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):  # None, where it was closed
        sys.stdout.reconfigure(line_buffering=True)  # a process that is killed would take what it holds along


# A deadline for what a function of ours does with one completion, so that it costs no other its reward.

_PATIENT, _HURRIED = 2, 1 / 8
_OF_THE_REST = 1 / 4  # of the time that a call has left, for one completion
_OF_OTHERS, _OF_THE_LAST = 1 / 2, 9 / 10  # the same, where a function of the user's has one completion a call
_LEAST_S = 0.01
_ends: list[float] = []  # of time.monotonic, by when the call that this process answers must be over


class Late(BaseException):
    """It took too long; a BaseException, since libraries catch exceptions of what they do not understand."""


@contextmanager
def answering(seconds: float | None) -> Iterator[None]:
    """A call that must be over in so many seconds by the clock on the wall (None: whenever it is): `computing` inside
    leaves others their part of them."""
    if seconds is not None:
        _ends.append(time.monotonic() + seconds)
    try:
        yield
    finally:
        if seconds is not None:
            _ends.pop()


@contextmanager
def within(seconds: float, error: type[BaseException] = Late, again_s: float | None = None) -> Iterator[None]:
    """Raises `error` inside, after `seconds` and again after each `again_s` (None: seconds), since code may catch it.

    By SIGALRM: what computes in C without asking for signals is not interrupted (regular expressions are). Without a
    limit in any thread but the main one, which is where reward processes call their functions.
    """
    with _alarms({signal.ITIMER_REAL: (seconds, again_s or seconds)}, error):
        yield


@contextmanager
def computing(seconds: float, error: type[BaseException] = Late) -> Iterator[None]:
    """As `within`, but of this process's CPU time: a busy machine makes nothing late that only computes. On the wall a
    quarter of what its call has left, so that however many are late, and on whatever machine, the call is not."""
    timers = {signal.ITIMER_PROF: (seconds, seconds)}
    if _ends:
        rest = max(_LEAST_S, (_ends[-1] - time.monotonic()) * _OF_THE_REST)
        timers[signal.ITIMER_REAL] = rest, rest
    with _alarms(timers, error):
        yield


@contextmanager
def sharing(last: bool, error: type[BaseException] = Late) -> Iterator[None]:
    """Of the time that its call has left, half for this completion, so that of several that take equally long none is
    late; nine tenths for the last of a group. No limit where somebody else's code has a handler of its own for SIGALRM:
    by it that limits itself."""
    if not _ends or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return
    rest = max(_LEAST_S, (_ends[-1] - time.monotonic()) * (_OF_THE_LAST if last else _OF_OTHERS))
    with _alarms({signal.ITIMER_REAL: (rest, rest)}, error):
        yield


@contextmanager
def _alarms(timers: dict[int, tuple[float, float]], error: type[BaseException]) -> Iterator[None]:
    """timers: seconds to the first alarm of each, and between others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    over = False

    def late(_number: int, _frame: object) -> None:
        if not over:
            raise error

    signals = {signal.ITIMER_REAL: signal.SIGALRM, signal.ITIMER_PROF: signal.SIGPROF}
    before = {timer: signal.signal(signals[timer], late) for timer in timers}
    try:
        for timer, (first, others) in timers.items():
            signal.setitimer(timer, first, others)
        yield
    finally:
        over = True  # before the timers are stopped: a busy machine may have had the next alarm by now
        for timer, handler in before.items():
            signal.setitimer(timer, 0)
            if signal.getsignal(signals[timer]) is late:  # not a module's own, which it set as it was imported in here
                signal.signal(signals[timer], handler)


class Patience:
    """Of a group: each completion may compute for `seconds`; once two were late, the others an eighth of it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.late = 0

    @property
    def seconds(self) -> float:
        """For the next one."""
        return self._seconds * (_HURRIED if self.late >= _PATIENT else 1.0)

    @contextmanager
    def with_one(self) -> Iterator[None]:
        """Raises Late inside once its time is over, and counts that."""
        try:
            with computing(self.seconds):
                yield
        except Late:
            self.late += 1
            raise
