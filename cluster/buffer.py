"""The pipe that carries samples down: a bounded queue of Arrow tables, the oldest policy version first, that lives with
its consumer.

Pace is a property of this pipe, so neither producers nor the consumer hold an `if` about it:

    admit    a producer waits for a slot before it starts a group; the slot is in use from then on
    put      the finished group enters; waits while the bytes bound is reached
    give_up  the group will not come: the slot is free again
    take     the consumer waits for `count` useful groups; those with older tokens than its bound are dropped
    release  the consumer frees the slots once the policy that learned from those groups is with every producer
    pass_over  the consumer learns nothing from those groups, and takes others in their place

How many slots there are, what that has to do with staleness, what a slow or lost worker costs, and why nobody waits for
ever: cluster.admission.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from cluster.admission import Admission
from cluster.group_slot import GroupSlot

MAX_REFILLS = 8  # batches' worth of useless groups in one take; after that what comes is taken as it is


class Batch(NamedTuple):
    """What `take` found: the groups asked for, and those that were passed over as useless (they hold no slot)."""

    groups: list[pa.Table]
    useless: list[pa.Table]


class Buffer:
    """Bounded queue of rollout groups (pa.Table by value), for one asyncio event loop and one consumer.

    Args: groups_per_step: of one batch. max_staleness: policy versions. max_bytes: Arrow bytes held, at most (unless
    the consumer waits for more). on_drop: receives each group that was too old to train on after all.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        max_bytes: int,
        on_drop: Callable[[pa.Table], None],
    ) -> None:
        if groups_per_step < 1 or max_staleness < 0 or max_bytes < 1:
            raise ValueError(
                "buffer: groups_per_step and max_bytes must be >= 1, max_staleness >= 0, got "
                f"{groups_per_step}, {max_bytes} and {max_staleness}"
            )
        self.max_bytes = max_bytes
        self.on_drop = on_drop
        self.bytes = 0
        self.dropped_stale = 0
        self._admission = Admission(groups_per_step, max_staleness)
        self._groups: dict[GroupSlot, pa.Table] = {}  # that have arrived
        self._news = asyncio.Event()  # for the consumer: a group came, or one less is due
        self._consumer_waits = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def runs_ahead(self) -> bool:
        """Whether groups are generated while a policy arrives (max_staleness above 0)."""
        return self._admission.runs_ahead

    @property
    def slots(self) -> int:
        """Groups that may be admitted and not released at one time."""
        return self._admission.slots

    @property
    def in_use(self) -> int:
        """Slots that are not free."""
        return self._admission.in_use

    def resume(self, version: int) -> None:
        """The run goes on from this policy version; to be called before the first group is admitted."""
        self._admission.resume(version)

    async def admit(self) -> GroupSlot:
        """Waits for a free slot and takes it."""
        turn = self._admission.ask()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given a slot in the same moment
                self.give_up(turn.result())
            raise

    async def put(self, slot: GroupSlot, group: pa.Table) -> None:
        """Adds a finished group; waits while the bytes bound is reached."""
        slot.bytes = group.get_total_buffer_size()  # found 25 times sooner than nbytes, which adds up slices
        while not self._fits(slot.bytes):
            await self._consumer_waits.wait()
        self._groups[slot] = group
        self.bytes += slot.bytes
        self._news.set()

    def _fits(self, size: int) -> bool:
        return self._consumer_waits.is_set() or not self._groups or self.bytes + size <= self.max_bytes

    def give_up(self, slot: GroupSlot) -> None:
        """The group of this slot will not be put. Nothing happens if it was."""
        if slot in self._admission.admitted and slot not in self._groups:
            self._admission.free(slot)
            self._news.set()

    async def take(
        self, count: int, oldest_version: int, useful: Callable[[pa.Table], bool] = lambda group: True
    ) -> Batch:
        """`count` useful groups without a token of a policy older than `oldest_version`, as soon as Admission.due names
        them."""
        if not 1 <= count <= self.slots:
            raise ValueError(f"buffer: take must ask for 1 to {self.slots} groups (its slots), got {count}")
        taken: dict[GroupSlot, pa.Table] = {}
        useless: list[pa.Table] = []
        self._consumer_waits.set()
        try:
            while len(taken) < count:
                slot = await self._arrival(count - len(taken))
                group = self._groups.pop(slot)
                self.bytes -= slot.bytes
                if min(group.column("policy_version_min").to_pylist()) < oldest_version:
                    self.dropped_stale += 1
                    self.on_drop(group)
                    self._admission.free(slot)
                elif len(useless) < MAX_REFILLS * count and not useful(group):
                    useless.append(group)
                    self._admission.free(slot)
                else:
                    self._admission.take(slot)
                    taken[slot] = group
        except asyncio.CancelledError:  # a take that is given up takes nothing
            self._put_back(taken)
            raise
        finally:
            self._consumer_waits.clear()
        self._admission.complete(count)
        return Batch(list(taken.values()), useless)

    async def _arrival(self, missing: int) -> GroupSlot:
        """The slot whose group goes into the batch next, as soon as there is one."""
        while (slot := self._admission.due(self._groups, missing)) is None:
            self._news.clear()
            await self._news.wait()
        return slot

    def _put_back(self, taken: dict[GroupSlot, pa.Table]) -> None:
        self._admission.put_back(taken)
        self._groups = taken | self._groups
        self.bytes += sum(slot.bytes for slot in taken)

    def release(self, count: int) -> None:
        """Frees the slots of `count` groups that were taken."""
        self._admission.release(count)

    def pass_over(self, count: int) -> None:
        """Frees the slots of the `count` groups of a batch from which nothing is learned, so that another batch takes
        its place: the policy stays what it is, and so does how old its groups may get."""
        self._admission.pass_over(count)
