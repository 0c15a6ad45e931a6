"""The pipe that carries samples down: a bounded FIFO of Arrow tables that lives with its consumer.

Pace is a property of this pipe, so neither producers nor the consumer hold an `if` about it:

    admit    a producer waits for a slot before it starts a group; the slot is charged at once
    put      the finished group enters; waits while the bytes bound is reached
    take     the consumer waits for `count` groups; what is older than its bound is dropped, counted and handed back
    release  the consumer frees the slots once the policy that learned from those groups is with every producer

With slots = groups_per_step * (1 + max_staleness) the staleness bound is arithmetic: when batch t is taken, at most
groups_per_step groups are left that were admitted at version t - max_staleness or before. Those are due: the batch
waits for them, and groups that overtook them fill what is left of it. So nothing grows too old, however long its
completions are (dropping the slow ones would teach a bias to short completions). Synchronous training is
max_staleness 0.
"""

import asyncio
import itertools
from collections.abc import Callable

import pyarrow as pa


class Buffer:
    """Bounded FIFO of rollout groups (pa.Table by value), for one asyncio event loop.

    Args: groups_per_step: of one batch. max_staleness: policy versions. max_bytes: Arrow bytes held, at most (unless
    the consumer waits for more). on_drop: receives each group that was too old to train on after all.
    """

    def __init__(
        self, groups_per_step: int, max_staleness: int, max_bytes: int, on_drop: Callable[[pa.Table], None]
    ) -> None:
        if groups_per_step < 1 or max_staleness < 0 or max_bytes < 1:
            raise ValueError(
                "buffer: groups_per_step and max_bytes must be >= 1 and max_staleness >= 0, got "
                f"{groups_per_step}, {max_bytes} and {max_staleness}"
            )
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.slots = groups_per_step * (1 + max_staleness)
        self.max_bytes, self.on_drop = max_bytes, on_drop
        self.in_use = 0
        self.bytes = 0
        self.dropped_stale = 0
        self._numbers = itertools.count()
        self._admitted: dict[int, int] = {}  # ticket, in order -> version at its admission; until taken or given up
        self._groups: dict[int, pa.Table] = {}  # ticket -> group, in order of arrival
        self._taken = self._released = 0  # groups, since the start
        self._hungry = False  # the consumer waits
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._groups)

    async def admit(self) -> int:
        """Waits for a free slot and takes it: the right to start one group, as a ticket."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.in_use < self.slots)
            self.in_use += 1
            ticket = next(self._numbers)
            self._admitted[ticket] = self._released // self.groups_per_step
            return ticket

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

    async def take(self, count: int, oldest_version: int) -> list[pa.Table]:
        """`count` groups with no token older than `oldest_version`: those that are due, then by arrival."""
        if not 1 <= count <= self.slots:
            raise ValueError(f"buffer: take must ask for 1 to {self.slots} groups (its slots), got {count}")
        due_version = self._taken // self.groups_per_step - self.max_staleness
        taken: dict[int, tuple[int, pa.Table]] = {}
        async with self._changed:
            self._hungry = True
            self._changed.notify_all()
            try:
                while len(taken) < count:
                    await self._changed.wait_for(lambda: self._next(due_version) is not None)
                    ticket = self._next(due_version)
                    assert ticket is not None
                    version, group = self._admitted.pop(ticket), self._groups.pop(ticket)
                    self.bytes -= group.nbytes
                    if min(group.column("policy_version_min").to_pylist()) >= oldest_version:
                        taken[ticket] = (version, group)
                    else:
                        self.dropped_stale += 1
                        self.in_use -= 1
                        self.on_drop(group)
                    self._changed.notify_all()
            except asyncio.CancelledError:  # a take that is given up takes nothing
                self._put_back(taken)
                raise
            finally:
                self._hungry = False
        self._taken += count
        return [group for _, group in taken.values()]

    def _next(self, due_version: int) -> int | None:
        """The ticket to take now: of what is due, else of what has arrived; None while there is nothing such."""
        due = [ticket for ticket, version in self._admitted.items() if version <= due_version]
        return next((ticket for ticket in (due or self._groups) if ticket in self._groups), None)

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
