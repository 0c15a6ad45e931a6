"""Scores a rollout worker's groups in reward processes that all workers share (SharedScorer).

Also here: warnings that are logged once, and helpers for tasks that run concurrently.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from cluster.actor import Actor
from cluster.errors import WrongInput
from rewards.call import Group
from rewards.pool import RewardService, Scores

# Warnings, each of which is logged once. How often their causes occur is seen in the metrics.

MOST = 50  # different warnings that are logged


class Sentences:
    """Logs each warning once, and at most MOST different ones."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[str] = set()

    def warn(self, sentences: Iterable[str]) -> None:
        """Logs the sentences that were not logged before."""
        self.warn_of({sentence: sentence for sentence in sentences})

    def warn_of(self, sentences: Mapping[str, str]) -> None:
        """Logs the sentences whose keys are new. The key names what the sentence is about."""
        for about, sentence in sentences.items():
            if about not in self._said and len(self._said) < MOST:
                self._said.add(about)
                self._log.warning(sentence)


# Tasks that run concurrently; if one fails, all end.

T = TypeVar("T")


async def side_by_side(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs the coroutines concurrently; returns their results in order. On an error the others are cancelled, then the
    first error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in begun]


@asynccontextmanager
async def alongside(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Runs endless coroutines while the block runs, and cancels them at its end. If one of them fails, the block is
    cancelled and the first error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(one) for one in work]
            yield
            for task in begun:
                task.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


class Room:
    """A semaphore of which several places are taken at once; first come, first served."""

    def __init__(self, places: int) -> None:
        self._places, self._free, self._line = places, asyncio.Semaphore(places), asyncio.Lock()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Holds `count` places during the block, or all places if there are fewer."""
        mine = 0
        try:
            async with self._line:  # else two tasks could each wait for places that the other one holds
                while mine < min(count, self._places):
                    await self._free.acquire()
                    mine += 1
            yield
        finally:
            for _ in range(mine):
                self._free.release()


class Scorer(Protocol):
    """Scores a worker's groups. rewards.pool.RewardPool, beside the engine, and SharedScorer implement it."""

    async def score(self, group: Group) -> Scores:
        """See RewardPool.score."""

    def close(self) -> None:
        """Ends the processes that were started for this worker alone."""


@dataclass(frozen=True, slots=True)
class RewardProcesses:
    """The reward processes that all workers share.

    deadline_s: seconds for scoring one group; reward functions have deadlines of their own.
    """

    actors: tuple[Actor[RewardService], ...]
    deadline_s: float


class SharedScorer:
    """Sends each group to the shared reward process that has the fewest groups of this worker to score.

    The answer comes late if that process is lost and started again.
    """

    def __init__(self, shared: RewardProcesses, first: int) -> None:
        """first: a number that differs between workers, so that they begin with different processes."""
        begin = first % len(shared.actors)
        self._processes = [*shared.actors[begin:], *shared.actors[:begin]]
        self._deadline_s = shared.deadline_s
        self._asked: Counter[str] = Counter()  # name of a process -> groups of this worker that it is scoring

    async def score(self, group: Group) -> Scores:
        """See RewardPool.score. Raises WrongInput, ActorDied, DeadlineExceeded, RemoteError."""
        begin = time.perf_counter()
        process = min(self._processes, key=lambda one: self._asked[one.name])
        self._asked[process.name] += 1
        try:
            said = await process.call(RewardService.score, self._deadline_s, group)
        finally:
            self._asked[process.name] -= 1
        if isinstance(said, str):
            raise WrongInput(said)
        return replace(said, ms=(time.perf_counter() - begin) * 1e3)

    def close(self) -> None:
        """Does nothing, since all processes are shared."""


class SharedPool:
    """A pool that several runs share, each by a PoolOfRun. It is closed when each of them has closed its own."""

    def __init__(self, pool: Scorer) -> None:
        self.pool = pool
        self.users: set[PoolOfRun] = set()

    def taken(self) -> "PoolOfRun":
        """The pool for one more run."""
        user = PoolOfRun(self)
        self.users.add(user)
        return user


class PoolOfRun:
    """The Scorer of one run that shares a pool."""

    def __init__(self, shared: SharedPool) -> None:
        self._shared = shared

    async def score(self, group: Group) -> Scores:
        """See RewardPool.score."""
        return await self._shared.pool.score(group)

    def close(self) -> None:
        """Ends the reward processes with the last run. Idempotent."""
        if self in self._shared.users:
            self._shared.users.remove(self)
            if not self._shared.users:
                self._shared.pool.close()
