"""Tells early whether many small pieces of work will be done by their deadline."""

import time

PROBE_S = 3.0  # of work, before the rest is estimated from it


class Pace:
    """`total` pieces must be done within `seconds` from the construction of this object."""

    def __init__(self, total: int, seconds: float) -> None:
        self._total, self._seconds = total, seconds
        self._begin = time.monotonic()

    def late(self, done: int) -> str:
        """What is wrong after `done` pieces (at least 1), or ''."""
        spent = time.monotonic() - self._begin
        if spent < min(PROBE_S, self._seconds):
            return ""
        whole = spent / done * self._total
        if whole <= self._seconds:
            return ""
        return f"{done} of {self._total} took {spent:.0f} s, so that all would take {whole:.0f} s of {self._seconds:g}"
