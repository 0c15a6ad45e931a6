"""Deadlines of which only such seconds count in which this process could run.

A run that was stopped as a whole goes on when it wakes: a paused container or machine, SIGSTOP to all of its processes,
Ctrl-Z, a terminal that takes no more output. By the clock all deadlines are over then, and by this one none is: whoever
was asked has stood still as well. (While a machine sleeps, Linux's monotonic clock itself stands still.)

A clock is looked at once a second; a look that comes late says that the process stood still meanwhile.
"""

import asyncio
import math
import time
from types import TracebackType
from typing import Self

LOOK_S = 1.0
LATE_S = 1.0  # of a look on a busy machine; what is later stood still
WAKE_S = 10.0  # that are left at least after it did, for others to wake and answer


class Awake:
    """Seconds that pass while this process runs, as long as `left` is called every LOOK_S seconds or sooner.

    Attributes:
        lost: seconds so far in which it stood still.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._seen, self.lost = time.monotonic(), 0.0

    def left(self) -> float:
        """At most 0 once they have passed."""
        now = time.monotonic()
        passed, self._seen = now - self._seen, now
        if passed > LOOK_S + LATE_S:
            self.lost += passed
            self._left = max(self._left, min(self._seconds, WAKE_S))
        else:
            self._left -= passed
        return self._left


def within(seconds: float | None) -> "Deadline":
    """As asyncio.timeout by that clock: TimeoutError once the body has taken so many seconds; None, infinity: never."""
    return Deadline(math.inf if seconds is None else seconds)


class Deadline:
    """What `within` gives."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._clock = seconds, Awake(seconds)
        self._timeout = asyncio.timeout(None)
        self._look: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.restart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        await self._timeout.__aexit__(kind, error, trace)

    def restart(self) -> None:
        """All seconds are there again."""
        self._stop()
        self._clock = Awake(self._seconds)
        self._wait(self._seconds)

    def expired(self) -> bool:
        """Whether they have passed, so that the TimeoutError is this block's."""
        return self._timeout.expired()

    def stood_still(self) -> bool:
        """Whether this process did, meanwhile."""
        self._clock.left()
        return self._clock.lost > 0

    def _wait(self, left: float) -> None:
        if left < math.inf:
            self._look = asyncio.get_running_loop().call_later(min(left, LOOK_S), self._looked)

    def _looked(self) -> None:
        left = self._clock.left()
        if left > 0:
            self._wait(left)
        else:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def _stop(self) -> None:
        if self._look is not None:
            self._look.cancel()
