"""The one thread in which the learner works, so that its event loop stays free to say how it gets on."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class WorkThread:
    """Runs one piece of work after the other, in the order of the calls."""

    def __init__(self) -> None:
        self._clock: int | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer", initializer=self._begin)

    def _begin(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    async def run(self, work: Callable[[], T]) -> T:
        """What the work returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def computed(self) -> float:
        """Seconds for which the thread has had a processor: they stand still while it waits for a lock or a device."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)
