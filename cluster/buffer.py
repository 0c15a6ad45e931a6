"""The pipe that carries samples down: a bounded FIFO of Arrow tables that lives with its consumer.

Pace is a property of this pipe, so neither producers nor the consumer hold an `if` about it:

    admit    a producer waits for a slot before it starts a group; the slot is charged at once
    put      the finished group enters; waits while the bytes bound is reached
    take     the consumer waits for `count` groups; what is older than its bound is dropped, counted and handed back
    release  the consumer frees the slots once the policy that learned from those groups is with every producer

With slots = groups_per_step * (1 + max_staleness) the staleness bound is arithmetic: a group that is admitted after
v releases is among the next slots / groups_per_step batches, so it trains at version v + max_staleness at the latest.
Synchronous training is max_staleness 0.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import pyarrow as pa


class Buffer:
    """Bounded FIFO of rollout groups (pa.Table by value), for one asyncio event loop.

    Args: slots: groups admitted and not yet released, at most. max_bytes: Arrow bytes held, at most (a group larger
    than this still passes when the buffer is empty). on_drop: receives each group that was too old to train on.
    """

    def __init__(self, slots: int, max_bytes: int, on_drop: Callable[[pa.Table], None]) -> None:
        if slots < 1 or max_bytes < 1:
            raise ValueError(f"buffer: slots and max_bytes must be >= 1, got {slots} and {max_bytes}")
        self.slots, self.max_bytes, self.on_drop = slots, max_bytes, on_drop
        self.in_use = 0
        self.bytes = 0
        self.dropped_stale = 0
        self._groups: deque[pa.Table] = deque()
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._groups)

    async def admit(self) -> None:
        """Waits for a free slot and takes it: the right to start one group."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.in_use < self.slots)
            self.in_use += 1

    async def put(self, group: pa.Table) -> None:
        """Adds an admitted, finished group; waits while the bytes bound is reached."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._groups or self.bytes + group.nbytes <= self.max_bytes)
            self._groups.append(group)
            self.bytes += group.nbytes
            self._changed.notify_all()

    async def take(self, count: int, oldest_version: int) -> list[pa.Table]:
        """The next `count` groups whose every token is at least as new as `oldest_version`, oldest arrival first."""
        if not 1 <= count <= self.slots:
            raise ValueError(f"buffer: take must ask for 1 to {self.slots} groups (its slots), got {count}")
        taken: list[pa.Table] = []
        async with self._changed:
            try:
                while len(taken) < count:
                    await self._changed.wait_for(lambda: bool(self._groups))
                    group = self._groups.popleft()
                    self.bytes -= group.nbytes
                    if min(group.column("policy_version_min").to_pylist()) >= oldest_version:
                        taken.append(group)
                    else:
                        self.dropped_stale += 1
                        self.in_use -= 1
                        self.on_drop(group)
                    self._changed.notify_all()
            except asyncio.CancelledError:  # a take that is given up takes nothing
                self._groups.extendleft(reversed(taken))
                self.bytes += sum(group.nbytes for group in taken)
                raise
        return taken

    async def release(self, count: int) -> None:
        """Frees the slots of `count` groups that were taken (or whose production was given up)."""
        async with self._changed:
            if not 0 <= count <= self.in_use:
                raise ValueError(f"buffer: cannot release {count} slots, {self.in_use} are in use")
            self.in_use -= count
            self._changed.notify_all()
