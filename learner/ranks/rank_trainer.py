"""One rank of the learner: a trainer that shares each step with its peers."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from learner.ranks.group import Group
from learner.ranks.service import Meeting, RankService
from learner.trainer.float32_products import use_library
from learner.trainer.trainer import Trainer


class Alike(NamedTuple):
    """What must be the same on every rank, or their results would differ: in words, and in the setting to look at."""

    name: str
    look_at: str


MUST_BE = (
    Alike("torch's version", "install the same packages on every node"),
    Alike("processor or card", "use nodes of one kind"),
    Alike("number of threads", "cluster.cpus.learner must be the same in effect"),
    Alike("weights to train", "model.path and model.adapter must be the same files on every node"),
)


class RankTrainer(Trainer, RankService):
    """rank: this one, from 0. ranks: of all. The others: see Trainer."""

    def __init__(self, *args: Any, rank: int, ranks: int, device: str, **options: Any) -> None:
        self._group = Group(rank, ranks, torch.device(device))
        super().__init__(*args, peers=self._group, device=device, **options)

    async def open(self, host: str, start_s: float) -> int:
        return await self._thread.run(lambda: self._group.open(host, start_s))

    async def join(self, meeting: Meeting, address: str) -> None:
        await self._thread.run(lambda: self._group.join(meeting, address))
        arithmetic = await self.arithmetic()
        mine = [str(arithmetic.torch), arithmetic.device, arithmetic.threads, await self._thread.run(self._digest)]
        everyone = await self._thread.run(lambda: self._group.gather(mine))
        for rank, theirs in enumerate(everyone):
            check_alike(rank, everyone[0], theirs)
        library = (await self._thread.run(lambda: self._group.gather(arithmetic.products)))[0]
        if arithmetic.products != library:  # found by a trial, which may end either way
            use_library(library)

    def _digest(self) -> str:
        found = hashlib.sha256()
        for name, weight in self._policy.masters.items():
            found.update(name.encode())
            found.update(weight.detach().cpu().numpy().tobytes())
        return found.hexdigest()


def check_alike(rank: int, first: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Raises ValueError if what a rank computes with is not what rank 0 does."""
    for must, wanted, found in zip(MUST_BE, first, theirs, strict=True):
        if found != wanted:
            raise ValueError(
                f"cluster.learners: every rank must have the same {must.name}, rank 0 has {_short(wanted)} and rank "
                f"{rank} {_short(found)}; {must.look_at}"
            )


def _short(value: Any) -> str:
    return str(value)[:40]
