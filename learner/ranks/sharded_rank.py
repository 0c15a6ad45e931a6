"""A rank of a learner whose base is in shards (learner.model.sharded_base)."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch.distributed import DistError

from cluster.actor import Shared, Unusable
from cluster.files import Digest
from learner.ranks.group import Group, peer_lost
from learner.ranks.rank_trainer import RankTrainer
from learner.ranks.service import Meeting
from learner.trainer.divided_state import DividedState
from learner.trainer.service import Exported
from rollout.types import PolicyId, SentPolicy
from rollout.weight_sync import Answer

GLOO = "gloo"  # in the words of its errors, which are RuntimeErrors as any other


class ShardedRank(RankTrainer):
    """It is built once the ranks have met, since its passes need all of them from the first on; only `open` and `join`
    may be called before. Nor does it outlive another rank, with which a part of the base is gone, so it keeps nothing
    to go back to."""

    def __init__(self, *args: Any, group: Group, **options: Any) -> None:
        self.rank, self._group = group.rank, group
        self._build = partial(super().__init__, *args, group=group, **options)

    async def join(self, meeting: Meeting, address: str) -> None:
        await asyncio.to_thread(self._group.join, meeting, address)
        with _or_lost():
            await asyncio.to_thread(self._build)
        await self._compare(0)

    async def numbered_step(self, groups: list[pa.Table], number: int) -> dict[str, float]:
        with _or_lost():
            return await self.step(groups)

    async def outgoing(self, stays: bool = False) -> tuple[Shared[SentPolicy], Exported]:
        """Only rank 0's goes to the generators; the others gather what is in shards with it."""
        with _or_lost():
            if self.rank > 0 and self._policy.trained.divided:
                await self._thread.run(self._gather_all)
                return Shared(None), Exported(PolicyId(self._version, ""), 0.0)
            shared, exported = await super().outgoing(stays)
            return shared if self.rank == 0 else Shared(None), exported

    async def save(self, folder: Path) -> dict[str, Digest]:
        with _or_lost():
            if self._policy.trained.divided:
                divided = DividedState(self._policy, self._updates.updater.optimizers, self._group)
                return await self._thread.run(lambda: divided.write(folder, self._path, self._state()))
            return await super().save(folder) if self.rank == 0 else {}

    async def load(self, folder: Path) -> None:
        with _or_lost():
            await super().load(folder)

    def _gather_all(self) -> None:
        for name in self._policy.masters:
            if name in self._policy.trained.divided:
                self._policy.trained.whole(name)

    async def score(self, groups: list[pa.Table]) -> list[list[float]]:
        with _or_lost():
            return await super().score(groups)

    async def rehearse(self, prompt_length: int) -> dict[str, float]:
        with _or_lost():
            return await super().rehearse(prompt_length)

    async def probe(self, token_ids: list[int]) -> Answer:
        with _or_lost():
            return await super().probe(token_ids)


@contextmanager
def _or_lost() -> Iterator[None]:
    """Where a pass fails because another rank did not gather with this one, that is said."""
    try:
        yield
    except Unusable:
        raise
    except RuntimeError as error:
        if isinstance(error, DistError) or GLOO in str(error):
            raise peer_lost(error) from error
        raise
