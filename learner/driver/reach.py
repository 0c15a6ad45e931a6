"""Whether generators can read whole weights where the learner has them (rollout.weights_file)."""

import asyncio
from collections.abc import Callable, Sequence

from cluster.actor import Actor, ActorDied, DeadlineExceeded
from cluster.ray_cluster import Session
from learner.config import RunConfig, generator_roles, learner_roles
from learner.trainer.service import TrainerService
from rollout.service import RolloutService


async def weights_stay(
    config: RunConfig,
    session: Session,
    learner: Actor[TrainerService],
    generators: Sequence[Actor[RolloutService]],
    note: Callable[[str], None],
) -> bool:
    """False where none are sent, where processes are on several nodes, and where a trial says so: some sandboxes let no
    process map another's memory. A generator that is lost meanwhile is not waited for, and found lost later."""
    used = (*generator_roles(config), *learner_roles(config))
    if not config.weights_stay or len({session.node_of()[role.name] for role in used}) > 1:
        return False
    deadline_s = config.cluster.deadlines.push
    place = await learner.call(TrainerService.empty_weights, deadline_s)
    tries = (generator.call(RolloutService.reaches, deadline_s, place) for generator in generators)
    for answer in await asyncio.gather(*tries, return_exceptions=True):
        if isinstance(answer, ActorDied | DeadlineExceeded):
            return False
        if isinstance(answer, BaseException):
            raise answer
        if answer:
            note(f"whole weights go through Ray's object store, which takes longer: {answer}")
            return False
    return True
