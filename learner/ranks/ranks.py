"""The ranks of the learner, seen as one actor by the loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from cluster.actor import Actor, ActorDied, Method, P, Shared, T
from learner.ranks.service import PEER_LOST, RankService
from learner.trainer.service import TrainerService

GRACE_S = 3.0  # for the rank that was lost to be named, once another has missed it
LARGEST = ("time/train", "memory/learner_peak")  # metrics of a process; the others are of all micro-batches


class Ranks:
    """An Actor. What changes the learner's state reaches every rank; what only reads it is asked of rank 0."""

    def __init__(self, ranks: Sequence[Actor[RankService]]) -> None:
        self.name = "learner"
        self._ranks = list(ranks)

    async def call(
        self,
        method: Method[TrainerService, P, T],
        deadline_s: float,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """As Actor.call. Of several ranks that fail, the error is that of one that did not fail for another's sake."""
        one = cast(Callable[..., Any], method)  # RankService has all methods of TrainerService
        join = JOINED.get(method.__name__)
        if join is None:
            answer: T = await self._ranks[0].call(one, deadline_s, *args, **kwargs)
            return answer
        sent = [Shared(arg) if isinstance(arg, list) else arg for arg in args]
        joined: T = join(await all_of([rank.call(one, deadline_s, *sent, **kwargs) for rank in self._ranks]))
        return joined


async def all_of(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Their answers, in order; or what the first that fails raises, unless that was for another's sake, which then has
    some seconds to say why."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting and all(map(_missed_another, _errors(tasks))):
            await asyncio.wait(waiting, timeout=GRACE_S, return_when=asyncio.FIRST_EXCEPTION)
        if errors := sorted(_errors(tasks), key=_missed_another):
            raise errors[0]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _errors(tasks: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    done = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for error in (task.exception() for task in done) if error is not None]


def _missed_another(error: BaseException) -> bool:
    return isinstance(error, ActorDied) and PEER_LOST in (error.reason or "")


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _metrics(answers: list[dict[str, float]]) -> dict[str, float]:
    largest = {name: max(one[name] for one in answers) for name in LARGEST if name in answers[0]}
    return answers[0] | largest


def _mismatch(answers: list[pa.Array]) -> pa.Array:
    """Each row is known to the rank that trained on it."""
    return pc.coalesce(*answers)


# What all ranks are asked, and how their answers become one. A step gets on as long as any rank does: the others may
# wait for it, so pulses are added.
JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "step": _metrics,
    "rehearse": _metrics,
    "mismatch": _mismatch,
    "score": _first,
    "load": _first,
    "release_cache": _first,
    "sees": all,
    "pulse": sum,
}
