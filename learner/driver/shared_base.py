"""memory.base: shared. The one copy of the base belongs to the generator; the learner maps it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.actor import Actor
from cluster.config import DeadlineConfig
from learner.trainer.service import TrainerService
from rollout.service import RolloutService


@asynccontextmanager
async def replacing_owner(
    generator: Actor[RolloutService], trainer: Actor[TrainerService], deadlines: DeadlineConfig
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
