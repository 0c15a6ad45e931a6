"""Who scores a worker's groups: reward functions beside it, or processes that all workers share.

What scorers and workers do side by side, and warnings that are logged once, are here, too.
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

# Warnings of which each is logged once; metrics count what they are about.

MOST = 50  # different ones that are logged


class Sentences:
    """Those that were said to one log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[str] = set()

    def warn(self, sentences: Iterable[str]) -> None:
        """Logs those that are new."""
        self.warn_of({sentence: sentence for sentence in sentences})

    def warn_of(self, sentences: Mapping[str, str]) -> None:
        """Logs those that are about something new; the keys say about what."""
        for about, sentence in sentences.items():
            if about not in self._said and len(self._said) < MOST:
                self._said.add(about)
                self._log.warning(sentence)


# Work of one kind side by side, of which one failure ends all.

T = TypeVar("T")


async def side_by_side(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. The first error of any is raised, once the others are cancelled for it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in begun]


@asynccontextmanager
async def alongside(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Work without end goes on inside this block. The first error of any ends the block, and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(one) for one in work]
            yield
            for task in begun:
                task.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


class Room:
    """Places that are taken several at a time; first come, first served."""

    def __init__(self, places: int) -> None:
        self._places, self._free, self._line = places, asyncio.Semaphore(places), asyncio.Lock()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Inside this block so many places are taken, or all where there are fewer."""
        mine = 0
        try:
            async with self._line:  # else two of them could each wait for the places that the other has
                while mine < min(count, self._places):
                    await self._free.acquire()
                    mine += 1
            yield
        finally:
            for _ in range(mine):
                self._free.release()


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
        """Raises WrongInput as RewardPool.score; ActorDied, DeadlineExceeded, RemoteError."""
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
        """Nothing is this worker's own."""
