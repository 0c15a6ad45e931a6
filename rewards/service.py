"""Reward functions in a process that is asked by others: generators, of their own node or another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rewards.base import RewardFailed
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.pool import Judging, RewardPool, Scores


class RewardService(Protocol):
    """What may be asked of it: the methods that cluster.actor.Actor.call takes at that border."""

    async def score(self, group: Group) -> Scores | str:
        """As RewardPool.score; the text of RewardFailed in place of raising it."""

    async def close(self) -> None:
        """Ends the reward functions."""


class RewardServer:
    """The RewardService of a process: a pool for whoever asks."""

    def __init__(
        self, rewards: Sequence[RewardConfig], workers: int, memory_bytes: int, judged: Judging, printed: Path
    ) -> None:
        """As RewardPool."""
        self._pool = RewardPool(rewards, workers, memory_bytes, judged, printed)

    async def score(self, group: Group) -> Scores | str:
        try:
            return await self._pool.score(group)
        except RewardFailed as error:  # its type would be lost on the way
            return str(error)

    async def close(self) -> None:
        self._pool.close()
