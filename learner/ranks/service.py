"""What may be asked of a rank beside what any learner is asked. Imports no torch, as the driver reads it."""

from typing import NamedTuple, Protocol

from learner.trainer.service import TrainerService

PEER_LOST = "another rank is gone"  # how a rank says that it is whole itself


class Meeting(NamedTuple):
    """Where ranks find each other. host, port: of rank 0's store. start_s, step_s: seconds that one may wait for the
    others, at the beginning and later."""

    host: str
    port: int
    start_s: float
    step_s: float


class RankService(TrainerService, Protocol):
    """learner.ranks.rank_trainer.RankTrainer. Calls that step, score or rehearse must reach all ranks in one order."""

    async def open(self, host: str, start_s: float) -> int:
        """Of rank 0: the port of a fresh store on this address of its node, which others connect to."""

    async def join(self, meeting: Meeting, address: str) -> None:
        """Meets the other ranks, and sees that all compute alike. address: of this process's node.

        Raises:
            ValueError: a rank has another torch, processor, number of threads or other weights.
            Unusable: the others did not come in time.
        """
