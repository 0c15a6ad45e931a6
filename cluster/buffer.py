"""The pipe that carries samples down: a bounded FIFO of Arrow tables that lives with its consumer.

Pace is a property of this pipe, so neither producers nor the consumer hold an `if` about it:

    admit    a producer waits for a slot before it starts a group; the slot is charged at once
    put      the finished group enters; waits while the bytes bound is reached
    take     the consumer waits for `count` useful groups; what is older than its bound is dropped, counted, handed back
    release  the consumer frees the slots once the policy that learned from those groups is with every producer

With slots = groups_per_step * (1 + max_staleness) the staleness bound is arithmetic: when batch t is taken, at most
groups_per_step groups are left that were admitted at version t - max_staleness or before. Those are due: the batch
waits for them, and groups that overtook them fill what is left of it. So nothing grows too old, however long its
completions are (dropping the slow ones would teach a bias to short completions). Synchronous training is
max_staleness 0.

Over-sampling adds `oversample` slots and lets as many due groups be left over: the batch is then the first that
finish, and stragglers that could not be trained on any more are given up (see `straggling`).
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

MAX_REFILLS = 8  # batches' worth of useless groups in one take; after that what comes is taken as it is


class Batch(NamedTuple):
    """What `take` found: the groups asked for, and those that were passed over as useless (they hold no slot)."""

    groups: list[pa.Table]
    useless: list[pa.Table]


class Buffer:
    """Bounded FIFO of rollout groups (pa.Table by value), for one asyncio event loop.

    Args: groups_per_step: of one batch. max_staleness: policy versions. max_bytes: Arrow bytes held, at most (unless
    the consumer waits for more). on_drop: receives each group that was too old to train on after all. oversample:
    groups generated beyond those that a batch needs.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        max_bytes: int,
        on_drop: Callable[[pa.Table], None],
        oversample: int = 0,
    ) -> None:
        if groups_per_step < 1 or max_staleness < 0 or max_bytes < 1 or oversample < 0:
            raise ValueError(
                "buffer: groups_per_step and max_bytes must be >= 1, max_staleness and oversample >= 0, got "
                f"{groups_per_step}, {max_bytes}, {max_staleness} and {oversample}"
            )
        self.groups_per_step, self.max_staleness, self.oversample = groups_per_step, max_staleness, oversample
        self.slots = groups_per_step * (1 + max_staleness) + oversample
        self.max_bytes, self.on_drop = max_bytes, on_drop
        self.in_use = 0
        self.bytes = 0
        self.dropped_stale = 0
        self._numbers = itertools.count()
        self._admitted: dict[int, int] = {}  # ticket, in order -> version at its admission; until taken or given up
        self._groups: dict[int, pa.Table] = {}  # ticket -> group, in order of arrival
        self._taken = self._released = 0  # groups, since the start
        self._too_old = -max_staleness  # admission versions below it cannot be trained on any more
        self._hungry = False  # the consumer waits
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._groups)

    async def admit(self) -> int:
        """Waits for a free slot and takes it: the right to start one group, as a ticket.

        A slot that a straggler left stays free until a policy is out that the next batch can be sampled from.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.in_use < self.slots and self._version >= self._too_old)
            self.in_use += 1
            ticket = next(self._numbers)
            self._admitted[ticket] = self._version
            return ticket

    @property
    def _version(self) -> int:
        """The policy version that every producer holds."""
        return self._released // self.groups_per_step

    async def put(self, ticket: int, group: pa.Table) -> None:
        """Adds an admitted, finished group; waits while the bytes bound is reached."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._hungry or not self._groups or self.bytes + group.nbytes <= self.max_bytes
            )
            self._groups[ticket] = group
            self.bytes += group.nbytes
            self._changed.notify_all()

    async def give_up(self, ticket: int) -> None:
        """Frees the slot of a group that will not come."""
        async with self._changed:
            del self._admitted[ticket]
            self.in_use -= 1
            self._changed.notify_all()

    async def straggling(self, ticket: int) -> None:
        """Returns once the group of this ticket, still unfinished, could not be trained on any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._admitted.get(ticket, self._too_old) < self._too_old)

    async def take(
        self, count: int, oldest_version: int, useful: Callable[[pa.Table], bool] = lambda group: True
    ) -> Batch:
        """`count` useful groups with no token older than `oldest_version`: those that are due, then by arrival."""
        if not 1 <= count <= self.slots:
            raise ValueError(f"buffer: take must ask for 1 to {self.slots} groups (its slots), got {count}")
        due_version = self._taken // self.groups_per_step - self.max_staleness
        taken: dict[int, tuple[int, pa.Table]] = {}
        useless: list[pa.Table] = []
        async with self._changed:
            self._hungry = True
            self._changed.notify_all()
            try:
                while len(taken) < count:
                    ticket = await self._arrival(due_version, count - len(taken))
                    version, group = self._admitted.pop(ticket), self._groups.pop(ticket)
                    self.bytes -= group.nbytes
                    if min(group.column("policy_version_min").to_pylist()) < oldest_version:
                        self.dropped_stale += 1
                        self.in_use -= 1
                        self.on_drop(group)
                    elif len(useless) < MAX_REFILLS * count and not useful(group):
                        useless.append(group)
                        self.in_use -= 1
                    else:
                        taken[ticket] = (version, group)
                    self._changed.notify_all()
            except asyncio.CancelledError:  # a take that is given up takes nothing
                self._put_back(taken)
                raise
            finally:
                self._hungry = False
            self._taken += count
            self._too_old = self._taken // self.groups_per_step - self.max_staleness
        return Batch([group for _, group in taken.values()], useless)

    async def _arrival(self, due_version: int, left: int) -> int:
        """The ticket to take next, as soon as there is one."""
        await self._changed.wait_for(lambda: self._next(due_version, left) is not None)
        ticket = self._next(due_version, left)
        assert ticket is not None, "just waited for"
        return ticket

    def _next(self, due_version: int, left: int) -> int | None:
        """The ticket to take now: of what is due, else of what has arrived; None while there is nothing such.

        As many due groups as `oversample` may be left when the batch has its `left` more groups.
        """
        due = [ticket for ticket, version in self._admitted.items() if version <= due_version]
        waiting_for = due if len(due) >= left + self.oversample else [*due, *self._groups]
        return next((ticket for ticket in waiting_for if ticket in self._groups), None)

    def _put_back(self, taken: dict[int, tuple[int, pa.Table]]) -> None:
        self._admitted |= {ticket: version for ticket, (version, _) in taken.items()}
        self._groups = {ticket: group for ticket, (_, group) in taken.items()} | self._groups
        self.bytes += sum(group.nbytes for _, group in taken.values())

    async def release(self, count: int) -> None:
        """Frees the slots of `count` groups that were taken."""
        async with self._changed:
            if not 0 <= count <= self._taken - self._released:
                raise ValueError(
                    f"buffer: cannot release {count} slots, {self._taken - self._released} taken ones are in use"
                )
            self.in_use -= count
            self._released += count
            self._changed.notify_all()
