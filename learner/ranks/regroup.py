"""A rank that is lost is replaced: the others meet its successor, and all are again where the step began."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from cluster.actor import ActorDied, DeadlineExceeded, RevivableActor, StartFailed
from cluster.config import DeadlineConfig
from learner.ranks.calls import all_of
from learner.ranks.service import Meeting, RankService, Return
from learner.trainer.service import TrainerService

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


async def meet(ranks: Sequence[Rank], deadlines: DeadlineConfig, back: Return | None = None) -> None:
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

    def __init__(self, ranks: Sequence[Rank], deadlines: DeadlineConfig, *, replaces: bool = True) -> None:
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
                f"{error}: it hangs, and is killed (raise cluster.deadlines.heartbeat={self._deadlines.heartbeat:g} if "
                "its machine may stand still for longer)"
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
