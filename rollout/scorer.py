"""Who scores a worker's groups: reward functions beside it, or processes that all workers share."""

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.actor import Actor
from rewards.base import RewardFailed
from rewards.call import Group
from rewards.pool import Scores
from rewards.service import RewardService


class Scorer(Protocol):
    """rewards.pool.RewardPool, or SharedScorer."""

    async def score(self, group: Group) -> Scores:
        """As RewardPool.score."""

    def close(self) -> None:
        """Ends what was started for this worker."""


@dataclass(frozen=True, slots=True)
class RewardProcesses:
    """Those that all workers share. deadline_s: for a group; reward functions have deadlines of their own."""

    actors: tuple[Actor[RewardService], ...]
    deadline_s: float


class SharedScorer:
    """Asks, group by group, the reward process that has the least to do for this worker.

    Consumes: groups (by call). Waits for: one answer, which comes late if the process is lost and started again.
    """

    def __init__(self, shared: RewardProcesses, first: int) -> None:
        """first: the process that is asked first, so that workers begin with different ones."""
        begin = first % len(shared.actors)
        self._processes = [*shared.actors[begin:], *shared.actors[:begin]]
        self._deadline_s = shared.deadline_s
        self._asked: Counter[str] = Counter()  # groups under way, by the name of the process

    async def score(self, group: Group) -> Scores:
        """Raises RewardFailed as RewardPool.score; ActorDied, DeadlineExceeded, RemoteError."""
        begin = time.perf_counter()
        process = min(self._processes, key=lambda one: self._asked[one.name])
        self._asked[process.name] += 1
        try:
            said = await process.call(RewardService.score, self._deadline_s, group)
        finally:
            self._asked[process.name] -= 1
        if isinstance(said, str):
            raise RewardFailed(said)
        return replace(said, ms=(time.perf_counter() - begin) * 1e3)

    def close(self) -> None:
        """Nothing is this worker's own."""
