"""One rank of the learner: a trainer that shares each step with its peers. RankTrainer has the whole base, ShardedRank
a shard of it. Both run in the rank's process; learner.ranks.ranks calls them from the driver.
"""

import asyncio
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor
from torch.distributed import DistError

from cluster.actor import Shared, Unusable
from cluster.files import Digest
from learner.ranks.group import Group, peer_lost
from learner.ranks.ranks import Meeting, RankService, Return
from learner.trainer.float32_products import use_library
from learner.trainer.service import Exported
from learner.trainer.state import DividedState, set_weights, weights_of
from learner.trainer.trainer import Trainer
from rollout.delivery import Answer
from rollout.types import PolicyId, SentPolicy


class Before(NamedTuple):
    """All that a step depends on, as it was when the step began. A rank keeps it so that the step can be undone.

    When a rank is lost, the others may be before or after their update. With this state all ranks go back to where they
    were equal, and the process that replaces the lost rank gets it.
    """

    number: int  # number of the step, as the driver counts
    state: dict[str, Any]  # tensors in main memory, and plain values


def copied(value: Any) -> Any:
    """Returns the value with copies of its tensors in main memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    return value


def as_bytes(state: dict[str, Any]) -> bytes:
    """Serialises a state of tensors and plain values."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(sent: bytes) -> dict[str, Any]:
    """Reads what as_bytes made. Pickles of other objects are refused, since a port has no password."""
    state: dict[str, Any] = torch.load(io.BytesIO(sent), weights_only=True)
    return state


class Alike(NamedTuple):
    """A property that must be the same on every rank, since their results would differ otherwise."""

    name: str  # in words
    look_at: str  # what to do if it differs


MUST_BE = (
    Alike("torch's version", "install the same packages on every node"),
    Alike("processor or card", "use nodes of one kind"),
    Alike("number of threads", "cluster.cpus.learner must be the same in effect"),
    Alike("weights to train", "model.path and model.adapter must be the same files on every node"),
)


class RankTrainer(Trainer, RankService):
    """A trainer that is one rank of the learner, with the whole base.

    group: the process group as this rank sees it; for other arguments see Trainer.
    """

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
        await asyncio.to_thread(self._group.abandon)  # not in the work thread, which may wait for the lost rank
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
        """Takes the state of the source; a rank that had finished the step goes back, too."""
        began = self._before is not None and self._before.number == back.undo
        own = self._before.state if began and self._before is not None else self._whole()
        sent = self._group.broadcast(as_bytes(own) if self.rank == back.source else b"", back.source)
        whole = from_bytes(sent)
        set_weights(self._policy, whole["weights"])
        self._set_state(whole["state"])
        self._budget.tokens, self._before = whole["tokens"], None

    async def _compare(self, first: int) -> None:
        """Raises ValueError if a rank computes otherwise than rank `first`, or has other weights. All ranks then use
        the library of float32 products that rank `first` uses."""
        arithmetic = await self.arithmetic()
        mine = [str(arithmetic.torch), arithmetic.device, arithmetic.threads, await self._thread.run(self._digest)]
        everyone = await self._thread.run(lambda: self._group.gather(mine))
        for rank, theirs in enumerate(everyone):
            check_alike(rank, everyone[first], theirs, first)
        library = (await self._thread.run(lambda: self._group.gather(arithmetic.products)))[first]
        if arithmetic.products != library:  # each rank chose by a trial, which may end either way
            use_library(library)

    def _digest(self) -> str:
        found = hashlib.sha256()
        for name, weight in self._policy.masters.items():
            found.update(name.encode())
            if name not in self._policy.trained.divided:  # the ranks have different rows of a sharded weight
                found.update(weight.detach().cpu().numpy().tobytes())
        return found.hexdigest()


def check_alike(rank: int, wants: Sequence[Any], theirs: Sequence[Any], first: int = 0) -> None:
    """Raises ValueError if the properties `theirs` of a rank differ from `wants`, those of rank `first`; both are in
    the order of MUST_BE."""
    for must, wanted, found in zip(MUST_BE, wants, theirs, strict=True):
        if found != wanted:
            raise ValueError(
                f"cluster.learners: every rank must have the same {must.name}, rank {first} has {_short(wanted)} and "
                f"rank {rank} {_short(found)}; {must.look_at}"
            )


def _short(value: Any) -> str:
    return str(value)[:40]


GLOO = "gloo"  # a word in the messages of gloo's errors, which are plain RuntimeErrors


class ShardedRank(RankTrainer):
    """A rank of a learner whose base is sharded (learner.model.bases.sharded).

    Its trainer is built in `join`, since already the first pass needs all ranks; only `open` and `join` may be called
    before. With a lost rank a part of the base is lost, so this rank keeps no state to go back to.
    """

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
        """Returns the policy on rank 0 alone; the other ranks take part in gathering its sharded weights."""
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

    async def rehearse(self, prompt_length: int, teacher_length: int = 0) -> dict[str, float]:
        with _or_lost():
            return await super().rehearse(prompt_length, teacher_length)

    async def probe(self, token_ids: list[int]) -> Answer:
        with _or_lost():
            return await super().probe(token_ids)


@contextmanager
def _or_lost() -> Iterator[None]:
    """Raises Unusable with PEER_LOST if the pass in this block failed since another rank did not take part in it."""
    try:
        yield
    except Unusable:
        raise
    except RuntimeError as error:
        if isinstance(error, DistError) or GLOO in str(error):
            raise peer_lost(error) from error
        raise
