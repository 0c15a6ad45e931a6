"""The ranks of the learner as one actor: Ranks is what the driver's loop calls. This module sends each call to the
right ranks, joins their answers, and replaces a lost rank (Regroup). It imports no torch, since the driver imports it.
"""

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

PEER_LOST = "another rank is gone"  # in the error of a rank that is intact and failed only because of a lost rank


class Meeting(NamedTuple):
    """Where the ranks form a process group, and how long they wait."""

    host: str  # address of rank 0's store
    port: int  # port of rank 0's store
    start_s: float  # seconds that a rank waits for the others while the group forms
    step_s: float  # seconds that a rank waits for the others later


class Return(NamedTuple):
    """The state from which all ranks go on after ranks were lost."""

    source: int  # a rank that was not lost, whose state the fresh processes get
    undo: int | None  # number of the step that was under way, which is undone; None if there was none


class RankService(TrainerService, Protocol):
    """What a rank's process offers; learner.ranks.rank.RankTrainer implements it. Calls of `numbered_step`, `score` and
    `rehearse` must reach all ranks in the same order."""

    async def numbered_step(self, groups: list[pa.Table], number: int) -> dict[str, float]:
        """Does what `step` does. The state before the step is kept in main memory until the next step, so that the step
        can be undone."""

    async def rejoin(self, meeting: Meeting, address: str, back: Return) -> None:
        """Forms a process group again after ranks were lost, and takes the state that the source had before the step
        that was under way. Raises what `join` raises."""

    async def open(self, host: str, start_s: float) -> int:
        """Opens a new store, to which the other ranks connect, on an address of this node; only for rank 0. Returns its
        port."""

    async def join(self, meeting: Meeting, address: str) -> None:
        """Forms the process group with the other ranks, and checks that all compute alike.

        address: address of this process's node.

        Raises:
            ValueError: a rank has another torch, processor, number of threads or other weights.
            Unusable: the other ranks did not come in time.
        """


# Calls to several ranks at once.

GRACE_S = 3.0  # seconds to wait for the error of the lost rank itself, once another rank has missed it


async def all_of(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Awaits calls to several ranks and returns their answers in order, or raises the first error. If that error only
    says that another rank is gone, the lost rank's error is waited for some seconds, and raised instead."""
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


# Metrics of a process, of which the largest over all ranks counts. Every rank has the same value of other metrics.
LARGEST = ("time/train", "memory/learner_peak")


class RankCalls:
    """Sends a call to all ranks or to rank 0, as its method requires, and joins the answers.

    sharded: whether the base is sharded, so that all ranks must be in any pass through it.
    """

    def __init__(self, ranks: Sequence[Actor[RankService]], *, sharded: bool) -> None:
        self._ranks, self._joins = list(ranks), JOINED | (PASSES if sharded else {})
        self._passing = asyncio.Lock()

    async def __call__(self, method: Callable[..., Any], deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the joined answer of all ranks, or the answer of rank 0."""
        name = method.__name__
        join = self._joins.get(name)
        if join is None:
            return await self._ranks[0].call(method, deadline_s, *args, **kwargs)
        sent = [Shared(arg) if isinstance(arg, list) else arg for arg in args]
        async with self._passing if name in PASSES else nullcontext():  # so that calls reach all ranks in one order
            return join(await all_of([rank.call(method, deadline_s, *sent, **kwargs) for rank in self._ranks]))


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _union(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for answer in answers for name, value in answer.items()}


def _metrics(answers: list[dict[str, float]]) -> dict[str, float]:
    largest = {name: max(one[name] for one in answers) for name in LARGEST if name in answers[0]}
    return answers[0] | largest


def _mismatch(answers: list[pa.Array]) -> pa.Array:
    """Joins the rows: each is known only to the rank that trained on it. A rank that has been replaced since the step
    has no rows."""
    most = max(map(len, answers))
    return pc.coalesce(*(answer for answer in answers if len(answer) == most))


# Methods that need the whole base: if it is sharded, all ranks must run them together.
PASSES: dict[str, Callable[[list[Any]], Any]] = {
    "numbered_step": _metrics,
    "rehearse": _metrics,
    "score": _first,
    "probe": _first,
    "outgoing": _first,
    "save": _union,
}
# Methods that are called on all ranks in any case. Pulses are added, since a step makes progress as long as any rank
# does: the others may be waiting for it.
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


# Replacement of a lost rank: the other ranks form a group with its successor, and all go back to where the step began.

log = logging.getLogger("learner")

LOOK_S = 10.0  # seconds that a rank has to answer that it is there; its event loop answers while it computes
IN_A_ROW = 3  # losses without a finished step between them, after which the learner as a whole counts as lost


class Rank(RevivableActor[RankService], Protocol):
    """A handle of a rank's process."""

    @property
    def address(self) -> str:
        """Address of its node, on which it listens for the other ranks."""

    async def kill(self) -> None:
        """Ends the process, whatever it is doing."""


async def meet(ranks: Sequence[Rank], deadlines: Deadlines, back: Return | None = None) -> None:
    """Makes all ranks form a process group at rank 0's store. back: the state to go back to, after a loss."""
    start_s, step_s = deadlines.start, deadlines.step
    port = await ranks[0].call(RankService.open, start_s, ranks[0].address, start_s)
    meeting = Meeting(ranks[0].address, port, start_s, step_s)
    if back is None:
        await all_of([rank.call(RankService.join, start_s, meeting, rank.address) for rank in ranks])
        return
    await all_of([rank.call(RankService.rejoin, start_s, meeting, rank.address, back) for rank in ranks])


class Regroup:
    """Finds ranks that hang, and replaces lost ranks by fresh processes.

    deadlines: a rank whose process does not answer for half a heartbeat hangs, and is killed. So it is replaced before
        the learner as a whole counts as hung (learner.driver.failure).
    replaces: whether a lost rank is replaced. It is not if the base is sharded: with the lost rank's shards the learner
        as a whole is lost.
    """

    def __init__(self, ranks: Sequence[Rank], deadlines: Deadlines, *, replaces: bool = True) -> None:
        self._ranks, self._deadlines, self._replaces = list(ranks), deadlines, replaces
        self._in_a_row = 0
        self._without_state: set[int] = set()  # fresh processes that have not got the state yet
        self._hung: DeadlineExceeded | None = None  # why a rank was killed, until it is replaced

    @property
    def every_s(self) -> float:
        """Seconds between two calls of `kill_hung`."""
        return self._deadlines.heartbeat / 8

    @property
    def hung_s(self) -> float:
        """Seconds within which a rank that hangs is killed."""
        return self._deadlines.heartbeat

    async def kill_hung(self) -> None:
        """Kills the ranks that do not answer now; calls to a killed rank fail with ActorDied."""
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
        """Notes that a step has finished, so that earlier losses no longer count."""
        self._in_a_row = 0

    async def after(self, error: ActorDied | DeadlineExceeded, undo: int | None) -> None:
        """Replaces the ranks that were lost, and returns when all ranks have formed a group again.

        error: the error of the call that failed. undo: number of the step that was under way; None if there was none.

        Raises `error`, or the DeadlineExceeded of a rank that hung, if no rank is left to take the state from, after
        too many losses in a row, or if lost ranks are not replaced. Raises ActorDied, DeadlineExceeded or RemoteError
        if another rank is lost meanwhile.
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
    """The learner's ranks as one Actor. Calls that change the learner's state are sent to every rank; calls that only
    read it are sent to rank 0.

    A lost rank is replaced, and its calls are sent again. A step that was under way starts again from the state in
    which it began, and gives the same bits.

    sharded: whether the base is sharded over the ranks (learner.ranks.rank), so that all must be in any pass.
    """

    def __init__(self, ranks: Sequence[Actor[RankService]], regroup: Regroup, *, sharded: bool = False) -> None:
        self.name = "learner"
        self._asked, self._regroup = RankCalls(ranks, sharded=sharded), regroup
        self._mending, self._looking, self._mended = asyncio.Lock(), asyncio.Lock(), 0  # _mended: number of repairs
        self._steps, self._under_way = 0, False
        self._beside: set[asyncio.Future[None]] = set()  # calls, other than steps, that are not answered yet

    async def call(
        self,
        method: Method[TrainerService, P, T],
        deadline_s: float,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Does what Actor.call does. If several ranks fail, it raises the error of one that did not fail only because
        another was lost."""
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
        """Returns the sum of the ranks' pulses; while a rank is replaced, which has its own deadlines, a clock."""
        return time.monotonic() if self._mending.locked() else await self._asked(TrainerService.pulse, deadline_s)

    async def _step(self, deadline_s: float, groups: list[pa.Table]) -> dict[str, float]:
        self._steps += 1
        shared: Any = Shared(groups)

        async def once() -> dict[str, float]:
            if self._beside:  # calls made before the step are about the policy before it, also when they are sent again
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
        """Returns the answer of `ask`, which is called again after each loss of ranks that could be repaired."""
        while True:
            mended, watch = self._mended, asyncio.create_task(self._watch())
            try:
                return await ask()
            except ActorDied as error:
                async with self._mending:
                    if mended == self._mended:  # otherwise another call has repaired the loss
                        await self._mend(error)
                        self._mended += 1
            finally:
                watch.cancel()

    async def _mend(self, error: ActorDied | DeadlineExceeded) -> None:
        """Replaces lost ranks. If another rank, or the fresh one, is lost meanwhile, it is replaced, too."""
        while True:
            try:
                return await self._regroup.after(error, self._steps if self._under_way else None)
            except (ActorDied, DeadlineExceeded) as another:
                if another is error:
                    raise
                error = another

    async def _watch(self) -> None:
        """Kills ranks that hang, until it is cancelled. Only one call watches at a time, and none while a process
        starts."""
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
