"""The learner's policies, as they leave it one after the other."""

import asyncio
from collections.abc import Sequence

from cluster.actor import Actor, Shared
from learner.config import RunConfig
from learner.trainer.service import Exported, TrainerService
from rollout.producer import Producer
from rollout.service import RolloutService
from rollout.types import SentPolicy


class Outgoing:
    """Waits for: the learner's policy; where it overwrites the one before (rollout.weights_file), first for every
    generator that is to have that one. It must come to all of them before the next one is sent in any case.

    delivered: ends when every generator has the newest policy that was sent.
    """

    def __init__(self, config: RunConfig, trainer: Actor[TrainerService], producers: Sequence[Producer]) -> None:
        self._trainer, self._producers = trainer, producers
        self._deadline_s, self._overwrites = config.cluster.deadlines.push, config.overwrites_policies
        self._readers: tuple[str, ...] = ()
        self.delivered: asyncio.Task[None] | None = None

    async def next(self) -> tuple[Shared[SentPolicy], Exported]:
        """The policy as it is now."""
        if self._overwrites and self.delivered is None:
            workers = (producer.worker.actor for producer in self._producers)
            machines = [worker.call(RolloutService.machine, self._deadline_s) for worker in workers]
            self._readers = tuple(await asyncio.gather(*machines))
        elif self._overwrites and self.delivered is not None:
            await asyncio.wait({self.delivered})
        return await self._trainer.call(TrainerService.outgoing, self._deadline_s, self._readers)
