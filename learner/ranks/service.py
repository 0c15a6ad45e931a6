"""What may be asked of a rank beside what any learner is asked. Imports no torch, as the driver reads it."""

from typing import NamedTuple, Protocol

import pyarrow as pa

from learner.trainer.service import TrainerService

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
    """learner.ranks.rank_trainer.RankTrainer. Calls that step, score or rehearse must reach all ranks in one order."""

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
