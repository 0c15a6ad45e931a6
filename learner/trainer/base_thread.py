"""The learner's thread of work where the base belongs to a generator, which may be lost and replaced."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from learner.model.mapped_base import MappedBase
from learner.trainer.work_thread import WorkThread
from rollout.shared_base.manifest import Manifest

T = TypeVar("T")

CHECK_EVERY = 20  # versions between two looks at the content of the base, which read all of it


class BaseThread(WorkThread):
    """Work that computes with the base waits while there is none; other work does not.

    base: what is mapped; None where the learner has a base of its own, which is always there.
    """

    def __init__(self, base: MappedBase | None) -> None:
        super().__init__()
        self._base = base
        self._there = asyncio.Event()
        self._there.set()
        self._away, self._since = 0.0, 0.0  # seconds without the base, and when the present ones began

    async def compute(self, work: Callable[[], T]) -> T:
        """As `run`, once the base is there."""
        while not self._there.is_set():  # again, since it may have gone before this task had its turn
            await self._there.wait()
        return await self.run(work)

    async def detach(self) -> None:
        """Lets the base go, after the work that is under way."""
        assert self._base is not None, "the learner's base is its own"
        if self._there.is_set():
            self._there.clear()
            self._since = time.monotonic()
        await self.run(self._base.detach)

    async def attach(self, manifest: Manifest) -> None:
        """Takes the base of a fresh generator; what waits for it goes on."""
        assert self._base is not None, "the learner's base is its own"
        base = self._base
        await self.run(lambda: base.attach(manifest))
        self._away += time.monotonic() - self._since
        self._there.set()

    def check(self, version: int) -> None:
        """Raises RuntimeError if the base was written to; looks at every CHECK_EVERY-th version. Part of some work."""
        if self._base is not None and version % CHECK_EVERY == 0:
            self._base.check()

    def progress(self, *, on_cpu: bool) -> float:
        """Seconds that grow while a step gets on: those without the base, for which it waits and does not hang; and on
        a CPU those of computation (a thread that waits for a CUDA device computes, so there they would say nothing)."""
        away = self._away + (0.0 if self._there.is_set() else time.monotonic() - self._since)
        return away + (self.computed() if on_cpu else 0.0)
