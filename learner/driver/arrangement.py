"""What the driver does for each arrangement of learner.config.arrangement.

Hooks say in which order the roles start, who has the card when, and what happens when a generator is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from cluster.actor import Actor
from cluster.config import Deadlines
from learner.config.arrangement import Arrangement
from learner.trainer.service import TrainerService
from rollout.producer import Producer
from rollout.service import RolloutService
from rollout.types import Manifest


class Turns:
    """Whose turn the card is: of roles that never wait for each other, always everybody's."""

    @asynccontextmanager
    async def learner(self) -> AsyncIterator[None]:
        """Inside this block the learner has the card to itself, where it is shared by turns."""
        yield

    async def generators(self) -> None:
        """The generators have the card from here on; where it is shared by turns, they were asleep."""


class Hooks:
    """Of roles that do not touch each other: none has an effect."""

    together: bool = True  # on a CPU: generators and learner may start at the same time

    async def started(self, generator: Actor[RolloutService], deadlines: Deadlines) -> None:
        """A generator has started, and the learner has not."""

    async def base(self, generators: Sequence[Actor[RolloutService]], deadlines: Deadlines) -> Manifest | None:
        """The base that the learner is to map; None where it loads one of its own."""
        return None

    def wired(self, trainer: Actor[TrainerService], producers: Sequence[Producer], deadlines: Deadlines) -> Turns:
        """Called once all processes are there: says what is done as a generator is replaced, and whose turn it is."""
        return Turns()

    def without_base_s(self, deadlines: Deadlines) -> float:
        """Seconds that the learner may be without its base."""
        return 0.0


# memory.layout: shared. The one copy of the base belongs to the generator; the learner maps it.


class OneBase(Hooks):
    """The generator starts first, and its base outlives no generator."""

    together = False

    async def base(self, generators: Sequence[Actor[RolloutService]], deadlines: Deadlines) -> Manifest | None:
        return await generators[0].call(RolloutService.share_base, deadlines.start)

    def wired(self, trainer: Actor[TrainerService], producers: Sequence[Producer], deadlines: Deadlines) -> Turns:
        for producer in producers:
            producer.worker.replacing = partial(replacing_owner, producer.worker.actor, trainer, deadlines)
        return Turns()

    def without_base_s(self, deadlines: Deadlines) -> float:
        """Until a lost generator is replaced."""
        return deadlines.start


@asynccontextmanager
async def replacing_owner(
    generator: Actor[RolloutService], trainer: Actor[TrainerService], deadlines: Deadlines
) -> AsyncIterator[None]:
    """Inside of it a fresh generator is started in the place of a lost one.

    The learner lets the lost one's base go first, after its step, so that two bases never lie in memory at once; then
    it takes the fresh one's. If none starts, the learner stays without.

    Raises LearnerError if it cannot take it; ActorDied or DeadlineExceeded if the fresh generator is lost as well.
    """
    await trainer.call(TrainerService.detach_base, deadlines.step)
    yield
    manifest = await generator.call(RolloutService.share_base, deadlines.start)
    await trainer.call(TrainerService.attach_base, deadlines.start, manifest)


# memory.layout: alternating. Generators and learner take turns on one card.


class InTurns(Hooks):
    """A generator sleeps as soon as it has started: the card is then free for the learner."""

    async def started(self, generator: Actor[RolloutService], deadlines: Deadlines) -> None:
        await generator.call(RolloutService.sleep, deadlines.start)

    def wired(self, trainer: Actor[TrainerService], producers: Sequence[Producer], deadlines: Deadlines) -> Turns:
        return CardTurns(trainer, producers, deadlines.push)


class CardTurns(Turns):
    """One card by turns."""

    def __init__(self, trainer: Actor[TrainerService], producers: Sequence[Producer], deadline_s: float) -> None:
        self._trainer, self._producers = trainer, producers
        self._deadline_s = deadline_s
        self._theirs = asyncio.Event()  # the generators' turn, in which alone a lost one is replaced
        self._theirs.set()
        for producer in producers:
            producer.worker.replacing = self._room

    @asynccontextmanager
    async def learner(self) -> AsyncIterator[None]:
        """Inside this block the generators sleep."""
        await self._to_sleep()
        yield
        await self.generators()

    async def generators(self) -> None:
        """They are woken."""
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


HOOKS: dict[str, Hooks] = {"shared": OneBase(), "alternating": InTurns()}


def hooks_of(arrangement: Arrangement) -> Hooks:
    """What the driver does for it."""
    return HOOKS.get(arrangement.name, Hooks())
