"""Reward processes that serve all generators, watched: Ray starts those again that end, and nobody those that hang."""

import asyncio
import logging

from cluster.actor import DeadlineExceeded
from cluster.ray_actor import LOOK_EVERY_S, Remote
from rewards.service import RewardServer

log = logging.getLogger("learner")


async def kept_answering(process: Remote[RewardServer], silence_s: float) -> None:
    """Never returns. A process that gives no answer for so long is ended, so that Ray starts another, which gets the
    groups that this one had."""
    while True:
        try:
            await process.ready(silence_s)
        except DeadlineExceeded as error:
            log.warning("%s: it hangs, or there is no room for it; starting a fresh process", error)
            await process.restart()
        await asyncio.sleep(min(silence_s / 4, LOOK_EVERY_S))
