"""Which ranks are asked what, and how their answers become one."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cluster.actor import Actor, Shared
from learner.ranks.calls import all_of
from learner.ranks.service import RankService

LARGEST = ("time/train", "memory/learner_peak")  # metrics of a process; the others are of all micro-batches


class Asked:
    """sharded: the base is divided among the ranks, so that all are asked for any pass through it."""

    def __init__(self, ranks: Sequence[Actor[RankService]], *, sharded: bool) -> None:
        self._ranks, self._joins = list(ranks), JOINED | (PASSES if sharded else {})
        self._passing = asyncio.Lock()

    async def __call__(self, method: Callable[..., Any], deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        """The answer of all that are asked, or of rank 0."""
        name = method.__name__
        join = self._joins.get(name)
        if join is None:
            return await self._ranks[0].call(method, deadline_s, *args, **kwargs)
        sent = [Shared(arg) if isinstance(arg, list) else arg for arg in args]
        async with self._passing if name in PASSES else nullcontext():  # they reach all ranks in one order
            return join(await all_of([rank.call(method, deadline_s, *sent, **kwargs) for rank in self._ranks]))


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _union(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for answer in answers for name, value in answer.items()}


def _metrics(answers: list[dict[str, float]]) -> dict[str, float]:
    largest = {name: max(one[name] for one in answers) for name in LARGEST if name in answers[0]}
    return answers[0] | largest


def _mismatch(answers: list[pa.Array]) -> pa.Array:
    """Each row is known to the rank that trained on it. One that has come since the step knows none."""
    most = max(map(len, answers))
    return pc.coalesce(*(answer for answer in answers if len(answer) == most))


# What gathers the base, for which the ranks wait for each other where it is divided among them.
PASSES: dict[str, Callable[[list[Any]], Any]] = {
    "numbered_step": _metrics,
    "rehearse": _metrics,
    "score": _first,
    "probe": _first,
    "outgoing": _first,
    "save": _union,
}
# What all ranks are asked in any case. A step gets on as long as any rank does: the others may wait for it, so pulses
# are added.
JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "numbered_step": _metrics,
    "rehearse": _metrics,
    "score": _first,
    "mismatch": _mismatch,
    "load": _first,
    "release_cache": _first,
    "sees": all,
    "pulse": sum,
}
