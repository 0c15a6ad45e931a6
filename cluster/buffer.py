"""The pipe that carries samples down: a bounded FIFO of Arrow tables that lives with its consumer.

Pace is a property of this pipe, so neither producers nor the consumer hold an `if` about it:

    admit    a producer waits for a slot before it starts a group; the slot is charged at once
    put      the finished group enters; waits while the bytes bound is reached
    take     the consumer waits for `count` useful groups; those wholly older than its bound are dropped and counted
    release  the consumer frees the slots once the policy that learned from those groups is with every producer

With slots = groups_per_step * (1 + max_staleness) the staleness bound is arithmetic: a group that was admitted at
version v is taken with batch v + max_staleness at the latest. Groups overtake others only as far as there is room for
those others in the batches up to theirs; beyond that, the batch waits (the earliest deadline first). So nothing grows
too old, however long its completions are (dropping the slow ones would teach a bias to short completions). Synchronous
training is max_staleness 0.

Over-sampling adds `oversample` slots: a batch is the first groups that finish, and stragglers are stopped, to go on
later under the newest policy from what their producers keep of them (rollout.partial). Their tokens are of several
policies then, each trained on with the ratio to its own. They may miss MISSES batches; after that the batch waits for
them, so that tokens are at most `staleness` versions old, and none is left out for the length of its completion.

A slow producer holds nobody up for long: while the consumer waits, a group that takes too long (cluster.backups) is
given to a second producer as well, if one waits for a slot. The first of the two to finish is put, the other is
stopped. Both sample the same problem with the same seed, and the group stays due until one of them is done: a long
group is helped, not replaced, so there is no bias to short completions.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from math import ceil
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa

from cluster.backups import Backups
from cluster.group_slot import Ticket

MAX_REFILLS = 8  # batches' worth of useless groups in one take; after that what comes is taken as it is
BACKUP_AFTER = 2.0
MISSES = 4  # batches that a straggler of over-sampling may miss


class Batch(NamedTuple):
    """What `take` found: the groups asked for, and those that were passed over as useless (they hold no slot)."""

    groups: list[pa.Table]
    useless: list[pa.Table]


class Buffer:
    """Bounded FIFO of rollout groups (pa.Table by value), for one asyncio event loop and one consumer.

    Args: groups_per_step: of one batch. max_staleness: policy versions. max_bytes: Arrow bytes held, at most (unless
    the consumer waits for more). on_drop: receives each group that was too old to train on after all. oversample:
    groups generated beyond those that a batch needs. backup_after: multiple of the usual time of a group after which
    it gets a second producer; inf for never.

    staleness: policy versions from the sampling of a token to its training, at most.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        max_bytes: int,
        on_drop: Callable[[pa.Table], None],
        oversample: int = 0,
        backup_after: float = BACKUP_AFTER,
    ) -> None:
        if groups_per_step < 1 or max_staleness < 0 or max_bytes < 1 or oversample < 0:
            raise ValueError(
                "buffer: groups_per_step and max_bytes must be >= 1, max_staleness and oversample >= 0, got "
                f"{groups_per_step}, {max_bytes}, {max_staleness} and {oversample}"
            )
        self.groups_per_step, self.max_staleness, self.oversample = groups_per_step, max_staleness, oversample
        self.slots = groups_per_step * (1 + max_staleness) + oversample
        # As many batches as have room for all slots, at the least: else not all could have theirs in time.
        missed = max(MISSES, ceil(oversample / groups_per_step)) if oversample else 0
        self.staleness = max_staleness + missed
        self.max_bytes, self.on_drop = max_bytes, on_drop
        self.in_use = 0
        self.bytes = 0
        self.dropped_stale = 0
        self._admitted: dict[Ticket, None] = {}  # in order, so of growing age; until taken or given up
        self._groups: dict[Ticket, pa.Table] = {}  # in order of arrival
        self._taken = self._released = 0  # groups, since the start
        self._late = -max_staleness  # of tickets of admission versions below it no group is begun, and stragglers stop
        self._backups = Backups(backup_after)
        self._idle: dict[asyncio.Future[Ticket], str] = {}  # producers that wait for a slot, the first first
        self._hungry = False  # the consumer waits
        self._news = asyncio.Event()  # for the consumer: a group came, or a producer is idle
        self._room = asyncio.Event()  # for who waits in put; set and cleared at once

    def __len__(self) -> int:
        return len(self._groups)

    async def admit(self, producer: str) -> Ticket:
        """Waits for a free slot and takes it; or for a group that takes another producer too long.

        A slot that a straggler left stays free until a policy is out that the next batch can be sampled from.
        """
        turn: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._idle[turn] = producer
        self._serve()
        if not turn.done():
            self._news.set()
        try:
            return await turn
        except asyncio.CancelledError:
            self._idle.pop(turn, None)
            if not turn.cancelled():  # its turn had come
                self.give_up(turn.result(), producer)
            raise

    @property
    def _version(self) -> int:
        """The policy version that every producer holds."""
        return self._released // self.groups_per_step

    def _serve(self) -> None:
        """Gives out free slots."""
        now, full = asyncio.get_running_loop().time(), self._backups.full(self._admitted)
        while self.in_use < self.slots and self._version >= self._late:
            turn = next((turn for turn, producer in self._idle.items() if producer not in full), None)
            if turn is None:
                return
            ticket = Ticket(self._version, now, [])
            if self._hand(ticket, turn):
                self._admitted[ticket] = None
                self.in_use += 1
                full |= self._backups.full([ticket])

    def _hand(self, ticket: Ticket, turn: asyncio.Future[Ticket]) -> bool:
        producer = self._idle.pop(turn)
        if turn.cancelled():
            return False
        ticket.holders.append(producer)
        turn.set_result(ticket)
        return True

    async def put(self, ticket: Ticket, group: pa.Table, producer: str) -> bool:
        """Adds a finished group; waits while the bytes bound is reached. False: it was not wanted any more."""
        took = asyncio.get_running_loop().time() - ticket.since
        ticket.bytes = group.get_total_buffer_size()  # found 25 times sooner than nbytes, which adds up slices
        while ticket.wanted and not self._fits(ticket.bytes):
            await self._room.wait()
        if not ticket.wanted:
            return False
        self._groups[ticket] = group
        self.bytes += ticket.bytes
        self._backups.finished(ticket, producer, took)
        self._stop(ticket, late=False)
        self._news.set()
        self._serve()  # if this producer was to finish it before it gets another
        return True

    def _fits(self, size: int) -> bool:
        return self._hungry or not self._groups or self.bytes + size <= self.max_bytes

    def _stop(self, ticket: Ticket, late: bool) -> None:
        ticket.stop(late)
        self._wake_puts()

    def _wake_puts(self) -> None:
        self._room.set()
        self._room.clear()

    def give_up(self, ticket: Ticket, producer: str) -> bool:
        """This producer will not put the group. True if nobody else will: then its slot is free."""
        ticket.holders.remove(producer)
        if ticket.holders or ticket in self._groups or ticket not in self._admitted:
            return False
        del self._admitted[ticket]
        self.in_use -= 1
        self._news.set()  # one less is due
        self._serve()
        return True

    async def take(
        self, count: int, oldest_version: int, useful: Callable[[pa.Table], bool] = lambda group: True
    ) -> Batch:
        """`count` useful groups, each with a token of `oldest_version` or younger: the oldest groups that have arrived,
        unless still older ones would come too late then.

        Which of their tokens are trained on is the consumer's affair.
        """
        if not 1 <= count <= self.slots:
            raise ValueError(f"buffer: take must ask for 1 to {self.slots} groups (its slots), got {count}")
        taken: dict[Ticket, pa.Table] = {}
        useless: list[pa.Table] = []
        self._hungry = True
        self._wake_puts()
        try:
            while len(taken) < count:
                ticket = await self._arrival(count - len(taken))
                group = self._groups.pop(ticket)
                del self._admitted[ticket]
                self.bytes -= ticket.bytes
                if max(group.column("policy_version_max").to_pylist()) < oldest_version:
                    self.dropped_stale += 1
                    self._free_after(self.on_drop, group)
                elif len(useless) < MAX_REFILLS * count and not useful(group):
                    self._free_after(useless.append, group)
                else:
                    taken[ticket] = group
        except asyncio.CancelledError:  # a take that is given up takes nothing
            self._put_back(taken)
            raise
        finally:
            self._hungry = False
        self._count(count)
        return Batch(list(taken.values()), useless)

    def _free_after(self, handle: Callable[[pa.Table], None], group: pa.Table) -> None:
        handle(group)
        self.in_use -= 1
        self._serve()

    async def _arrival(self, left: int) -> Ticket:
        """The ticket to take next, as soon as there is one."""
        while (ticket := self._next(left)) is None:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._back_up()):
                    await self._news.wait()
        return ticket

    def _next(self, left: int) -> Ticket | None:
        """The ticket to take now, when the batch lacks `left` groups: the oldest of those that have arrived; None if
        there is none, or if older ones would have no batch left."""
        age = attrgetter("oldest")
        # Of growing version by themselves, unless some go on from what stragglers began.
        tickets = sorted(self._admitted, key=age) if self.oversample else self._admitted
        oldest = next((ticket for ticket in tickets if ticket in self._groups), None)
        batch, waiting = self._taken // self.groups_per_step, 0
        for version, number in Counter(map(age, tickets)).items():
            if oldest is None or version == oldest.oldest:
                break
            waiting += number
            batches = max(0, version + self.staleness - batch)  # after this one and up to the last that they can be in
            if waiting >= left + self.groups_per_step * batches:
                return None
        return oldest

    def _back_up(self) -> float | None:
        """Gives groups that take too long to a second producer. Returns when the next one will have taken so, if any
        producer waits that could help it: seconds of the loop's clock."""
        if not self._idle:
            return None
        overdue, then = self._backups.overdue(self._admitted, asyncio.get_running_loop().time())
        full = self._backups.full(self._admitted)
        for ticket in overdue:
            busy = full.union(ticket.holders)
            turn = next((turn for turn, producer in self._idle.items() if producer not in busy), None)
            if turn is not None:
                self._hand(ticket, turn)
                full |= self._backups.full([ticket])
        return then

    def _put_back(self, taken: dict[Ticket, pa.Table]) -> None:
        self._admitted = dict.fromkeys(sorted([*taken, *self._admitted], key=lambda ticket: ticket.since))
        self._groups = taken | self._groups
        self.bytes += sum(ticket.bytes for ticket in taken)

    def _count(self, count: int) -> None:
        """That many were taken. Stragglers are those that began so long ago that without over-sampling, they would have
        been in this batch or before."""
        self._taken += count
        self._late = self._taken // self.groups_per_step - self.max_staleness
        if self.oversample:
            for ticket in takewhile(lambda ticket: ticket.version < self._late, self._admitted):
                if ticket not in self._groups:
                    self._stop(ticket, late=True)

    def release(self, count: int) -> None:
        """Frees the slots of `count` groups that were taken."""
        if not 0 <= count <= self._taken - self._released:
            raise ValueError(
                f"buffer: cannot release {count} slots, {self._taken - self._released} taken ones are in use"
            )
        self.in_use -= count
        self._released += count
        self._serve()
