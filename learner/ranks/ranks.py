"""The ranks of the learner, seen as one actor by the loop."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, cast

import pyarrow as pa
import pyarrow.compute as pc

from cluster.actor import Actor, ActorDied, DeadlineExceeded, Method, P, RevivableActor, Shared, StartFailed, T
from cluster.config import Deadlines
from learner.trainer.service import TrainerService

# What may be asked of a rank beside what any learner is asked. Imports no torch, as the driver reads it.

PEER_LOST = "another rank is gone"  # how a rank says that it is whole itself


class Meeting(NamedTuple):
    """Where ranks find each other. host, port: of rank 0's store. start_s, step_s: seconds that one may wait for the
    others, at the beginning and later."""

    host: str
    port: int
    start_s: float
    step_s: float


class Return(NamedTuple):
    """To what ranks go back after the loss of one, or of several.

    source: a rank that was not lost, whose state the fresh ones get. undo: number of the step that was under way; None
    if none was.
    """

    source: int
    undo: int | None


class RankService(TrainerService, Protocol):
    """learner.ranks.rank.RankTrainer. Calls that step, score or rehearse must reach all ranks in one order."""

    async def numbered_step(self, groups: list[pa.Table], number: int) -> dict[str, float]:
        """As `step`. Until the next one, the state before it is kept in main memory, to go back to."""

    async def rejoin(self, meeting: Meeting, address: str, back: Return) -> None:
        """Meets the other ranks once more, after some were lost, and takes the state of the source as it was before the
        step that was under way. Raises as `join`."""

    async def open(self, host: str, start_s: float) -> int:
        """Of rank 0: the port of a fresh store on this address of its node, which others connect to."""

    async def join(self, meeting: Meeting, address: str) -> None:
        """Meets the other ranks, and sees that all compute alike. address: of this process's node.

        Raises:
            ValueError: a rank has another torch, processor, number of threads or other weights.
            Unusable: the others did not come in time.
        """


# One call of several ranks, and whose failure is told.

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


# Which ranks are asked what, and how their answers become one.

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


# A rank that is lost is replaced: the others meet its successor, and all are again where the step began.

log = logging.getLogger("learner")

LOOK_S = 10.0  # for a rank to say that it is there; its event loop answers while it computes
IN_A_ROW = 3  # losses without a step between them; then the learner as a whole counts as lost


class Rank(RevivableActor[RankService], Protocol):
    """A rank's process, and its node's address."""

    @property
    def address(self) -> str:
        """On which it listens for the others."""

    async def kill(self) -> None:
        """Ends the process, whatever it does."""


async def meet(ranks: Sequence[Rank], deadlines: Deadlines, back: Return | None = None) -> None:
    """All ranks find each other at rank 0. back: after a loss."""
    start_s, step_s = deadlines.start, deadlines.step
    port = await ranks[0].call(RankService.open, start_s, ranks[0].address, start_s)
    meeting = Meeting(ranks[0].address, port, start_s, step_s)
    if back is None:
        await all_of([rank.call(RankService.join, start_s, meeting, rank.address) for rank in ranks])
        return
    await all_of([rank.call(RankService.rejoin, start_s, meeting, rank.address, back) for rank in ranks])


class Regroup:
    """deadlines: a rank whose process does not answer for half a heartbeat hangs, and is killed. So it is replaced
    before the learner as a whole counts as hung (learner.driver.failure). replaces: false where the base is in
    shards, of which a lost rank takes its own along: then the learner as a whole is lost."""

    def __init__(self, ranks: Sequence[Rank], deadlines: Deadlines, *, replaces: bool = True) -> None:
        self._ranks, self._deadlines, self._replaces = list(ranks), deadlines, replaces
        self._in_a_row = 0
        self._without_state: set[int] = set()  # fresh processes, until all have met
        self._hung: DeadlineExceeded | None = None  # why a rank was killed that is not yet replaced

    @property
    def every_s(self) -> float:
        """Between two looks for ranks that hang."""
        return self._deadlines.heartbeat / 8

    @property
    def hung_s(self) -> float:
        """Within which a rank that hangs is killed."""
        return self._deadlines.heartbeat

    async def kill_hung(self) -> None:
        """One look; whoever waits for the answer of a rank that is killed hears of its end."""
        await asyncio.gather(*map(self._kill_if_hung, self._ranks))

    async def _kill_if_hung(self, rank: Rank) -> None:
        try:
            await rank.call(TrainerService.pulse, self._deadlines.heartbeat / 2)
        except DeadlineExceeded as error:
            self._hung = DeadlineExceeded(
                f"{error}: it hangs, and is killed (raise cluster.patience if its machine may stand still for longer)"
            )
            log.warning("%s", self._hung)
            await rank.kill()
        except ActorDied:
            return

    def stepped(self) -> None:
        """A step is done, so whatever was lost before it is made good."""
        self._in_a_row = 0

    async def after(self, error: ActorDied | DeadlineExceeded, undo: int | None) -> None:
        """All ranks are there again, those that were lost as fresh processes. undo: number of the step under way.

        Raises the error itself, or that a rank hung, if nobody is left to take the state from, or after too many losses
        in a row, or if none is replaced; ActorDied, DeadlineExceeded or RemoteError if another one is lost meanwhile.
        """
        if not self._replaces:
            raise self._hung or error
        self._in_a_row += 1
        lost = [rank for rank, there in enumerate(await asyncio.gather(*map(_is_there, self._ranks))) if not there]
        self._without_state |= set(lost)
        holders = [rank for rank in range(len(self._ranks)) if rank not in self._without_state]
        if isinstance(error, StartFailed):
            raise error
        if self._in_a_row > IN_A_ROW or not holders:
            raise self._hung or error
        source = holders[0]
        names = ", ".join(self._ranks[rank].name for rank in lost)
        taken_again = "" if undo is None else "; the step is taken again"
        log.warning(
            "%s; %s: a fresh process gets the state of %s%s", error, names or "no process is lost",
            self._ranks[source].name, taken_again,
        )  # fmt: skip
        await asyncio.gather(*(self._ranks[rank].revive(self._deadlines.start) for rank in lost))
        await meet(self._ranks, self._deadlines, Return(source, undo))
        self._without_state.clear()
        self._hung = None


async def _is_there(rank: Rank) -> bool:
    try:
        await rank.call(TrainerService.pulse, LOOK_S)
    except (ActorDied, DeadlineExceeded):
        return False
    return True


class Ranks:
    """An Actor. What changes the learner's state reaches every rank; what only reads it is asked of rank 0.

    A rank that is lost is replaced, and what was asked of it is asked again: the step that was
    under way, from where it began, to the same bits.

    sharded: the base is divided among them (learner.ranks.rank), so that all are asked for any pass.
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
