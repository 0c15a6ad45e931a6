"""What the driver does for each memory.layout (learner.config.arrangement): in which order the roles start, which of
them has the card when, and what happens when a generator is replaced.

Hooks is the default, where roles do not depend on each other. OneBase and InTurns are those of `shared` and
`alternating`.
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
    """Passes the card between learner and generators. This default does nothing: neither waits for the other."""

    @asynccontextmanager
    async def learner(self) -> AsyncIterator[None]:
        """Inside this block the learner has the card to itself, with memory.layout: alternating."""
        yield

    async def generators(self) -> None:
        """Gives the card to the generators; with memory.layout: alternating this wakes them."""


class Hooks:
    """What the driver does at certain points of a run: nothing, by these defaults for independent roles."""

    together: bool = True  # whether a learner on a CPU starts at the same time as the generators

    async def started(self, generator: Actor[RolloutService], deadlines: Deadlines) -> None:
        """Called when a generator has started, if the generators start before the learner and not with it."""

    async def base(self, generators: Sequence[Actor[RolloutService]], deadlines: Deadlines) -> Manifest | None:
        """How the learner maps the generator's base; None where the learner loads a base of its own."""
        return None

    def wired(self, trainer: Actor[TrainerService], producers: Sequence[Producer], deadlines: Deadlines) -> Turns:
        """Called once all processes have started. Sets what the producers do when a generator is replaced, and returns
        the turns that the loop takes."""
        return Turns()

    def without_base_s(self, deadlines: Deadlines) -> float:
        """Seconds for which the learner may have no base to compute with."""
        return 0.0


# memory.layout: shared. The generator owns the only copy of the base, and the learner maps it.


class OneBase(Hooks):
    """Hooks for memory.layout: shared. The generator starts first. Its base ends with its process, so when a lost
    generator is replaced, the learner lets go of the old base and maps the new one."""

    together = False

    async def base(self, generators: Sequence[Actor[RolloutService]], deadlines: Deadlines) -> Manifest | None:
        return await generators[0].call(RolloutService.share_base, deadlines.start)

    def wired(self, trainer: Actor[TrainerService], producers: Sequence[Producer], deadlines: Deadlines) -> Turns:
        for producer in producers:
            producer.worker.replacing = partial(replacing_owner, producer.worker.actor, trainer, deadlines)
        return Turns()

    def without_base_s(self, deadlines: Deadlines) -> float:
        """The most seconds in which a fresh generator starts, shares its base, and the learner maps it."""
        return 3 * deadlines.start


@asynccontextmanager
async def replacing_owner(
    generator: Actor[RolloutService], trainer: Actor[TrainerService], deadlines: Deadlines
) -> AsyncIterator[None]:
    """Inside this block the caller starts a fresh generator in the place of a lost one.

    Before it, the learner finishes its step and lets go of the lost generator's base, so that memory never holds two
    bases; after it, the learner maps the fresh generator's base. If no generator starts, the learner has no base.

    Raises LearnerError if the learner cannot map the base; ActorDied or DeadlineExceeded if the fresh generator is lost
    as well.
    """
    await trainer.call(TrainerService.detach_base, deadlines.step)
    yield
    manifest = await generator.call(RolloutService.share_base, deadlines.start)
    await trainer.call(TrainerService.attach_base, deadlines.start, manifest)


# memory.layout: alternating. Generators and learner take turns on one card.


class InTurns(Hooks):
    """Hooks for memory.layout: alternating. A generator sleeps when it has started, so that the learner can start."""

    async def started(self, generator: Actor[RolloutService], deadlines: Deadlines) -> None:
        await generator.call(RolloutService.sleep, deadlines.start)

    def wired(self, trainer: Actor[TrainerService], producers: Sequence[Producer], deadlines: Deadlines) -> Turns:
        return CardTurns(trainer, producers, deadlines.push)


class CardTurns(Turns):
    """Generators and learner have one card in turns: the generators sleep while the learner trains. A lost generator is
    replaced only in the generators' turn."""

    def __init__(self, trainer: Actor[TrainerService], producers: Sequence[Producer], deadline_s: float) -> None:
        self._trainer, self._producers = trainer, producers
        self._deadline_s = deadline_s
        self._theirs = asyncio.Event()  # set in the generators' turn
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
        """Has the learner free its cached memory, and wakes the generators."""
        await self._trainer.call(TrainerService.release_cache, self._deadline_s)
        self._theirs.set()  # set before the generators are woken, so that a lost generator is replaced first
        await asyncio.gather(*(producer.wake() for producer in self._producers))

    async def _to_sleep(self) -> None:
        while True:
            lives = [producer.worker.restarts for producer in self._producers]
            await asyncio.gather(*(producer.sleep() for producer in self._producers))
            self._theirs.clear()
            away = any(producer.away for producer in self._producers)
            if not away and lives == [producer.worker.restarts for producer in self._producers]:
                return
            self._theirs.set()  # a generator was lost since it slept: its replacement starts now, and is put to sleep

    @asynccontextmanager
    async def _room(self) -> AsyncIterator[None]:
        await self._theirs.wait()
        yield


HOOKS: dict[str, Hooks] = {"shared": OneBase(), "alternating": InTurns()}


def hooks_of(arrangement: Arrangement) -> Hooks:
    """The hooks of an arrangement."""
    return HOOKS.get(arrangement.name, Hooks())
