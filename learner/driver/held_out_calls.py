"""Many problems through several generators: in calls of some problems each, which whoever is free takes."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import NamedTuple, Protocol

import pyarrow as pa

from learner.config import RunConfig
from rollout.schema import Problem
from rollout.side_by_side import alongside
from rollout.types import Sampling

LARGEST = 16  # problems of a call; a call costs about as much as the problem in it
SHARES = 4  # calls of each generator, at least, so that the last one does not leave the others idle for long
AHEAD = 2  # times what a generator runs at once: so much it is asked for at once, that it has the next ones


class Asks(Protocol):
    """What generates groups: a Producer."""

    async def requests(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int,
        lost: Callable[[], None],
    ) -> pa.Table | None:  # fmt: skip
        """The groups of the problems, in their order; None if the process was lost meanwhile (`lost` is called then; it
        is alive again when this returns)."""

    @property
    def away(self) -> bool:
        """Whether its process is being replaced."""

    async def present(self) -> None:
        """Waits until it is not away."""


class Calls(NamedTuple):
    """How problems are asked for.

    size: problems of a call, at most. at_once: calls under way of each generator. rounds: how many groups a group waits
    for, one after the other, with itself, at most: the deadline of a call is that of so many groups.
    """

    size: int
    at_once: int
    rounds: int


def calls_of(problems: int, generators: int, running: int) -> Calls:
    """running: groups that a generator runs at once."""
    size = max(1, min(LARGEST, running, problems // (SHARES * generators)))
    return Calls(size, AHEAD * running // size, min(AHEAD, ceil(problems / running)))


def groups_at_once(config: RunConfig, size: int) -> int:
    """How many groups of so many completions a generator runs at once."""
    sequences = config.rollout.sequences
    return max((sequences if config.env.use is None else min(sequences, config.trajectories)) // size, 1)


async def generate(
    asked: Sequence[Asks],
    problems: Sequence[Problem],
    config: RunConfig,
    sampling: Callable[[int], Sampling],
    attempt: int = 0,
    done: Callable[[int], None] = lambda count: None,
) -> list[pa.Table]:
    """The groups of all problems, in their order, in tables of one or more. A call whose process is lost is made again
    at once, by whoever is free first.

    sampling: how the group of the i-th is sampled, all of one size. done: told of so many more that are there.
    """
    calls = calls_of(len(problems), len(asked), groups_at_once(config, sampling(0).n))
    starts = range(0, len(problems), calls.size)
    waiting: asyncio.Queue[int] = asyncio.Queue()
    for start in starts:
        waiting.put_nowait(start)
    answers: dict[int, asyncio.Future[pa.Table]] = {start: asyncio.Future() for start in starts}

    async def lane(one: Asks) -> None:
        while True:
            await one.present()
            start = await waiting.get()
            if one.away:  # lost while this lane waited: the call is another generator's
                waiting.put_nowait(start)
                continue
            mine = problems[start : start + calls.size]
            samplings = [sampling(start + i) for i in range(len(mine))]
            groups = await one.requests(mine, samplings, attempt, calls.rounds, partial(waiting.put_nowait, start))
            if groups is not None:
                answers[start].set_result(groups)
                done(len(mine))

    async with alongside(lane(one) for one in [*asked] * calls.at_once):
        return [await answers[start] for start in starts]
