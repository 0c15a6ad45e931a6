"""One rank of the learner: a trainer that shares each step with its peers."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from learner.ranks.group import Group
from learner.ranks.memory import Before, as_bytes, copied, from_bytes
from learner.ranks.service import Meeting, RankService, Return
from learner.trainer.float32_products import use_library
from learner.trainer.trainer import Trainer
from learner.trainer.trainer_state import set_weights, weights_of


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
    """group: as this rank sees it. The others: see Trainer."""

    def __init__(self, *args: Any, group: Group, **options: Any) -> None:
        self.rank, self._group = group.rank, group
        self._before: Before | None = None
        super().__init__(*args, peers=group, **options)

    async def open(self, host: str, start_s: float) -> int:
        return await asyncio.to_thread(self._group.open, host, start_s)

    async def join(self, meeting: Meeting, address: str) -> None:
        await asyncio.to_thread(self._group.join, meeting, address)
        await self._compare(0)

    async def numbered_step(self, groups: list[pa.Table], number: int) -> dict[str, float]:
        return await self._thread.compute(lambda: self._numbered(groups, number))

    async def rejoin(self, meeting: Meeting, address: str, back: Return) -> None:
        await asyncio.to_thread(self._group.abandon)  # not in the step's thread, which may wait for the lost one
        await self._thread.run(self._group.leave)
        await self._thread.run(lambda: self._group.join(meeting, address))
        await self._thread.run(lambda: self._go_back(back))
        await self._compare(back.source)

    def _numbered(self, groups: list[pa.Table], number: int) -> dict[str, float]:
        self._before = Before(number, self._whole())
        return self._step(groups)

    def _whole(self) -> dict[str, Any]:
        state = copied(self._state())
        return {"weights": weights_of(self._policy), "state": state, "tokens": self._budget.tokens}

    def _go_back(self, back: Return) -> None:
        """The source's state is everybody's: a rank that had finished the step goes back with the others."""
        began = self._before is not None and self._before.number == back.undo
        own = self._before.state if began and self._before is not None else self._whole()
        sent = self._group.broadcast(as_bytes(own) if self.rank == back.source else b"", back.source)
        whole = from_bytes(sent)
        set_weights(self._policy, whole["weights"])
        self._set_state(whole["state"])
        self._budget.tokens, self._before = whole["tokens"], None

    async def _compare(self, first: int) -> None:
        """Raises ValueError if a rank is not like that one; all take its library of products."""
        arithmetic = await self.arithmetic()
        mine = [str(arithmetic.torch), arithmetic.device, arithmetic.threads, await self._thread.run(self._digest)]
        everyone = await self._thread.run(lambda: self._group.gather(mine))
        for rank, theirs in enumerate(everyone):
            check_alike(rank, everyone[first], theirs, first)
        library = (await self._thread.run(lambda: self._group.gather(arithmetic.products)))[first]
        if arithmetic.products != library:  # found by a trial, which may end either way
            use_library(library)

    def _digest(self) -> str:
        found = hashlib.sha256()
        for name, weight in self._policy.masters.items():
            found.update(name.encode())
            if name not in self._policy.trained.divided:  # else each rank has other rows
                found.update(weight.detach().cpu().numpy().tobytes())
        return found.hexdigest()


def check_alike(rank: int, wants: Sequence[Any], theirs: Sequence[Any], first: int = 0) -> None:
    """Raises ValueError if what a rank computes with is not what rank `first` does, which is `wants`."""
    for must, wanted, found in zip(MUST_BE, wants, theirs, strict=True):
        if found != wanted:
            raise ValueError(
                f"cluster.learners: every rank must have the same {must.name}, rank {first} has {_short(wanted)} and "
                f"rank {rank} {_short(found)}; {must.look_at}"
            )


def _short(value: Any) -> str:
    return str(value)[:40]
