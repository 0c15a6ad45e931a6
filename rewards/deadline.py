"""A deadline for what a function of ours does with one completion, so that it costs no other its reward."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
