"""Tells early whether many small pieces of work will be done by their deadline."""

import time

PROBE_S = 3.0  # of work, before the rest is estimated from it


class Pace:
    """`total` pieces must be done within `seconds`. The first, which may have to load what all need, says nothing of
    the others, so the clock starts behind it."""

    def __init__(self, total: int, seconds: float) -> None:
        self._total, self._seconds = total, seconds
        self._first: tuple[int, float] | None = None  # done so far as the clock started, and when that was

    def late(self, done: int) -> str:
        """What is wrong after `done` pieces (at least 1, and more at each call), or ''."""
        now = time.monotonic()
        before, begin = self._first = self._first or (done, now)
        spent = now - begin
        if spent < min(PROBE_S, self._seconds):
            return ""
        whole = spent / (done - before) * (self._total - before)
        if whole <= self._seconds:
            return ""
        return f"{done} of {self._total} took {spent:.0f} s, so that all would take {whole:.0f} s of {self._seconds:g}"
