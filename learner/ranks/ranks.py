"""The ranks of the learner, seen as one actor by the loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pyarrow as pa

from cluster.actor import Actor, ActorDied, DeadlineExceeded, Method, P, Shared, T
from learner.ranks.asked import Asked
from learner.ranks.regroup import Regroup
from learner.ranks.service import RankService
from learner.trainer.service import TrainerService


class Ranks:
    """An Actor. What changes the learner's state reaches every rank; what only reads it is asked of rank 0.

    A rank that is lost is replaced (learner.ranks.regroup), and what was asked of it is asked again: the step that was
    under way, from where it began, to the same bits.

    sharded: the base is divided among them (learner.ranks.sharded_rank), so that all are asked for any pass.
    """

    def __init__(self, ranks: Sequence[Actor[RankService]], regroup: Regroup, *, sharded: bool = False) -> None:
        self.name = "learner"
        self._asked, self._regroup = Asked(ranks, sharded=sharded), regroup
        self._mending, self._looking, self._mended = asyncio.Lock(), asyncio.Lock(), 0  # how often
        self._steps, self._under_way = 0, False
        self._beside: set[asyncio.Future[None]] = set()  # calls beside a step, which were made before it

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
        step: Callable[..., Any] = self._step
        answer: T
        if one is TrainerService.step:
            answer = await step(deadline_s, *args, **kwargs)
        elif one is TrainerService.pulse:
            answer = await self._pulse(deadline_s)
        else:
            with self._known_beside():
                longest_s = max(deadline_s, self._regroup.hung_s)
                answer = await self._again(lambda: self._asked(one, longest_s, *args, **kwargs))
        return answer

    async def _pulse(self, deadline_s: float) -> Any:
        """While a rank is replaced, which has deadlines of its own, seconds that grow."""
        return time.monotonic() if self._mending.locked() else await self._asked(TrainerService.pulse, deadline_s)

    async def _step(self, deadline_s: float, groups: list[pa.Table]) -> dict[str, float]:
        self._steps += 1
        shared: Any = Shared(groups)

        async def once() -> dict[str, float]:
            if self._beside:  # asked before the step, so of the policy before it, also when asked again
                await asyncio.wait(self._beside)
            metrics: dict[str, float] = await self._asked(RankService.numbered_step, deadline_s, shared, self._steps)
            return metrics

        self._under_way = True
        try:
            metrics = await self._again(once)
        finally:
            self._under_way = False
        self._regroup.stepped()
        return metrics

    async def _again(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, however often ranks are lost meanwhile, as long as each loss can be made good."""
        while True:
            mended, watch = self._mended, asyncio.create_task(self._watch())
            try:
                return await ask()
            except ActorDied as error:
                async with self._mending:
                    if mended == self._mended:  # else another call has seen to it
                        await self._mend(error)
                        self._mended += 1
            finally:
                watch.cancel()

    async def _mend(self, error: ActorDied | DeadlineExceeded) -> None:
        """Another rank, or the fresh one, may be lost meanwhile: a further loss, which is made good likewise."""
        while True:
            try:
                return await self._regroup.after(error, self._steps if self._under_way else None)
            except (ActorDied, DeadlineExceeded) as another:
                if another is error:
                    raise
                error = another

    async def _watch(self) -> None:
        """Looks for ranks that hang, for one call at a time, and not while a process starts."""
        while True:
            await asyncio.sleep(self._regroup.every_s)
            if not self._mending.locked() and not self._looking.locked():
                async with self._looking:
                    await self._regroup.kill_hung()

    @contextmanager
    def _known_beside(self) -> Iterator[None]:
        done = asyncio.get_running_loop().create_future()
        self._beside.add(done)
        try:
            yield
        finally:
            self._beside.discard(done)
            done.set_result(None)
