"""Reward processes that serve all generators, watched: Ray starts those again that end, and nobody those that hang."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Self

from cluster.actor import ActorDied, DeadlineExceeded
from cluster.config import DeadlineConfig
from cluster.ray_actor import LOOK_EVERY_S, Remote
from learner.driver.failure import RunEnded
from rewards.service import RewardServer

log = logging.getLogger("learner")


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a reward process may give no answer, and that a fresh one may take to start. Together they are less
    than a group's deadline: past that, generators which wait for it would count as hung."""

    silence_s: float
    start_s: float

    @classmethod
    def of(cls, deadlines: DeadlineConfig) -> Self:
        return cls(min(deadlines.heartbeat / 2, deadlines.group / 4), min(deadlines.start, deadlines.group / 2))


async def kept_answering(process: Remote[RewardServer], patience: Patience) -> None:
    """Never returns. A process that hangs is ended, so that Ray starts another, which gets the groups that it had.

    Raises RunEnded: no fresh one has started in time. StartFailed: it has, and refused what it was given.
    """
    while True:
        try:
            await process.answering(patience.silence_s)
        except DeadlineExceeded as error:
            log.warning("%s: it hangs; starting a fresh process", error)
            await process.restart()
            await _started(process, patience.start_s)
        except ActorDied as error:
            log.warning("%s; Ray starts a fresh process", error)
            await _started(process, patience.start_s)
        await asyncio.sleep(min(patience.silence_s / 4, LOOK_EVERY_S))


async def _started(process: Remote[RewardServer], deadline_s: float) -> None:
    try:
        await process.ready(deadline_s)
    except DeadlineExceeded:
        raise RunEnded(
            f"{process.name}: it was lost, and no fresh process has started within {deadline_s:g} s: its node is gone, "
            "or none has room (cluster.rewards); start the same command again when there is, or raise "
            "cluster.deadlines.start and .group"
        ) from None
