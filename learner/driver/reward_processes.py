"""Reward processes that serve all generators, watched: Ray starts those again that end, and nobody those that hang."""

import logging
import math
import time
from dataclasses import dataclass
from typing import Self

from cluster.actor import ActorDied, DeadlineExceeded
from cluster.config import DeadlineConfig
from cluster.ray_actor import Remote
from learner.driver.failure import RunEnded
from rewards.service import RewardServer

log = logging.getLogger("learner")

MAX_LOSSES = 5  # each less than the patience for silence after the one before: then what it is asked ends it


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a reward process may give no answer, and that a fresh one may take to start. Together they are three
    quarters of a group's deadline at most: past that, generators which wait for it would count as hung."""

    silence_s: float
    start_s: float

    @classmethod
    def of(cls, deadlines: DeadlineConfig) -> Self:
        return cls(min(deadlines.heartbeat / 2, deadlines.group / 4), min(deadlines.start, deadlines.group / 2))


async def kept_answering(process: Remote[RewardServer], patience: Patience) -> None:
    """Never returns. A process that hangs is ended, so that Ray starts another, which gets the groups that it had.

    Raises RunEnded: no fresh one has started in time, or more than MAX_LOSSES were lost, each soon after another.
    StartFailed: it has started, and refused what it was given.
    """
    losses, lost_at = 0, -math.inf
    while True:
        try:
            await process.until_ended(patience.silence_s)
        except DeadlineExceeded as error:
            said = f"{error}: it hangs"
            await process.restart()
        except ActorDied as error:
            said = str(error)
        now = time.monotonic()
        losses, lost_at = (losses + 1 if now - lost_at < patience.silence_s else 1), now
        if losses > MAX_LOSSES:
            raise RunEnded(f"{said}; it was lost {losses} times in a row, so it is not started again")
        log.warning("%s; starting a fresh process", said)
        await _started(process, patience.start_s)


async def _started(process: Remote[RewardServer], deadline_s: float) -> None:
    try:
        await process.ready(deadline_s)
    except DeadlineExceeded:
        raise RunEnded(
            f"{process.name}: it was lost, and no fresh process has started within {deadline_s:g} s: its node is gone, "
            "or none has room (cluster.rewards); start the same command again when there is, or raise "
            "cluster.deadlines.start and .group"
        ) from None
