"""One call of several ranks, and whose failure is told."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from cluster.actor import ActorDied
from learner.ranks.service import PEER_LOST

GRACE_S = 3.0  # for the rank that was lost to be named, once another has missed it


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
