"""memory.layout: alternating. Generators and learner take turns on one card."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cluster.actor import Actor
from learner.trainer.service import TrainerService
from rollout.producer import Producer


class CardTurns:
    """alternating: false for every other layout; then nothing here has an effect."""

    def __init__(
        self, alternating: bool, trainer: Actor[TrainerService], producers: Sequence[Producer], deadline_s: float
    ) -> None:
        self._alternating, self._trainer, self._producers = alternating, trainer, producers
        self._deadline_s = deadline_s
        self._theirs = asyncio.Event()  # the generators' turn, in which alone a lost one is replaced
        self._theirs.set()
        if alternating:
            for producer in producers:
                producer.worker.replacing = self._room

    @asynccontextmanager
    async def learner(self) -> AsyncIterator[None]:
        """Inside this block the learner has the card to itself, and the generators sleep."""
        if self._alternating:
            await self._to_sleep()
        yield
        await self.generators()

    async def generators(self) -> None:
        """The generators have the card from here on; they were asleep."""
        if self._alternating:
            await self._trainer.call(TrainerService.release_cache, self._deadline_s)
            self._theirs.set()  # before they are woken: one that was lost meanwhile is started first
            await asyncio.gather(*(producer.wake() for producer in self._producers))

    async def _to_sleep(self) -> None:
        while True:
            lives = [producer.worker.restarts for producer in self._producers]
            await asyncio.gather(*(producer.sleep() for producer in self._producers))
            self._theirs.clear()
            away = any(producer.away for producer in self._producers)
            if not away and lives == [producer.worker.restarts for producer in self._producers]:
                return
            self._theirs.set()  # one was lost since it slept: what takes its place is to sleep, too

    @asynccontextmanager
    async def _room(self) -> AsyncIterator[None]:
        await self._theirs.wait()
        yield
