"""A deadline for what a function of ours does with one completion, so that it costs no other its reward."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENT, _HURRIED = 2, 1 / 8


class Late(BaseException):
    """It took too long; a BaseException, since libraries catch exceptions of what they do not understand."""


@contextmanager
def within(
    seconds: float, error: type[BaseException] = Late, again_s: float | None = None, computing: bool = False
) -> Iterator[None]:
    """Raises `error` inside, after `seconds` and again after each `again_s` (None: seconds), since code may catch it.

    computing: seconds of this process's CPU time, so that a busy machine makes nothing late that only computes; what
    waits has no limit then. By SIGALRM, or SIGPROF: what computes in C without asking for signals is not interrupted
    (regular expressions are). Without a limit in any thread but the main one, which is where reward processes call
    their functions.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    timer, number = (signal.ITIMER_PROF, signal.SIGPROF) if computing else (signal.ITIMER_REAL, signal.SIGALRM)
    over = False

    def late(_number: int, _frame: object) -> None:
        if not over:
            raise error

    before = signal.signal(number, late)
    signal.setitimer(timer, seconds, again_s or seconds)
    try:
        yield
    finally:
        over = True  # before the timer is stopped: a busy machine may have had the next alarm by now
        signal.setitimer(timer, 0)
        signal.signal(number, before)


class Patience:
    """Of a group: each completion may compute for `seconds`; once two were late, the others an eighth of it, so that
    the group has its scores before its own deadline."""

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
            with within(self.seconds, computing=True):
                yield
        except Late:
            self.late += 1
            raise
