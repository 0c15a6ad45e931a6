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
ever, is said where slots are counted (Admission).
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import pyarrow as pa

from cluster.actor import within

# The right to generate one group.


@dataclass(eq=False, slots=True)
class GroupSlot:
    """A slot of the Buffer, in the hands of one producer from `admit` until it calls `put` or `give_up`.

    version: Admission.version when the slot was taken. number: of slots that were taken before it. bytes: that the
    group keeps in memory, from `put` on.
    """

    version: int
    number: int
    bytes: int = 0


# When a group may be begun, and which group goes into a batch next: the slots of a Buffer and the staleness bound.
#
# There are groups_per_step * (1 + max_staleness) slots. A group takes one when it is begun, and the slot is free again
# when the policy that learned from the group is with every producer. That alone bounds staleness, by arithmetic: a
# group that was begun at policy version v goes into batch v + max_staleness at the latest (batches and versions count
# from 0; batch v is trained by version v and makes version v + 1). Younger groups may overtake it as long as the
# batches up to that one have room for all older groups; then the batch waits (earliest deadline first). So no group
# gets too old, and none is dropped because its completions are long, which would teach the policy to write short ones.
# Synchronous training is max_staleness 0: no slot is free before the newest policy is with every producer.
#
# What a slow worker costs: a batch waits for the groups that are due in it, and nobody makes them in place of the
# worker that has them. So a worker that takes longer for a group than the run takes for 1 + max_staleness batches sets
# the pace of the whole run.
#
# What a lost worker costs: its groups stay missing until the lost call ends (at once if the process died, after
# deadlines.group if it hangs). Then their slots are free and their positions are issued again, before any new one, to
# whichever worker asks first; the lost one is among them once a fresh process has the newest policy (deadlines.start,
# then deadlines.push to load it and again to prove it, each with deadlines.group where max_staleness is above 0, since
# what is under way may come first). The consumer gives up, and ends the run, after deadlines.start +
# deadlines.group.
#
# Why nobody waits for ever. Let the consumer wait for its next group; a group is admitted from `admit` until it is
# taken or given up.
#
# - An admitted group has not arrived: its producer waits for its worker, and each such wait has a deadline (a call:
#   group or push; a fresh process: start). It does not wait for the Buffer, since `put` lets everything in while the
#   consumer waits. So the group arrives, or it is given up. Losses are counted, by worker and by problem, and too many
#   of them end the run (rollout.producer, rollout.producer).
# - All admitted groups have arrived: the one of the oldest version is taken, since no older one is being generated.
# - No group is admitted: the slots in use are those of groups that were taken and not released. These are the
#   t < groups_per_step groups of this batch, and those of the batch before while its policy is on its way. Together
#   they
#   are fewer than 2 * groups_per_step, so with max_staleness >= 1 a slot is free. With max_staleness 0 one is free as
#   soon as every producer that has a process has acknowledged that policy, for which the run waits deadlines.push +
#   deadlines.start at most.
#   A free slot goes to the first lane that asks, of any worker, and a lane makes one group after another: one living
#   worker is enough.
#
# So with one hung worker of two: it holds the slots of its lanes, half of all at most, until its calls end; the other
# one makes groups with the rest, and the consumer takes them until a batch lacks only groups of the hung one.


class Admission:
    """The slots of one Buffer."""

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.slots = groups_per_step * (1 + max_staleness)
        self.in_use = 0
        self.admitted: dict[GroupSlot, None] = {}  # an ordered set: neither taken nor given up
        self._groups_per_step, self._max_staleness = groups_per_step, max_staleness
        self.runs_ahead = max_staleness > 0
        self._first_version = 0
        self._taken = 0  # groups, since the start
        self._released = 0
        self._given = 0
        self._waiting: deque[asyncio.Future[GroupSlot]] = deque()  # producers

    @property
    def version(self) -> int:
        """The policy version that every producer holds."""
        return self._first_version + self._released // self._groups_per_step

    @property
    def batches(self) -> int:
        """How many are complete, those before a resumed run too."""
        return self._first_version + self._taken // self._groups_per_step

    def resume(self, version: int) -> None:
        """The run goes on from this policy version, so that many batches are complete. To be called before `ask`."""
        self._first_version = version

    def ask(self) -> asyncio.Future[GroupSlot]:
        """A slot, as soon as one is free and all who asked before have theirs."""
        turn: asyncio.Future[GroupSlot] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._give_out()
        return turn

    def _give_out(self) -> None:
        while self._waiting and self.in_use < self.slots:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                slot = GroupSlot(self.version, self._given)
                self._given += 1
                self.admitted[slot] = None
                self.in_use += 1
                turn.set_result(slot)

    def free(self, slot: GroupSlot) -> None:
        """Nothing will be learned from its group."""
        del self.admitted[slot]
        self.in_use -= 1
        self._give_out()

    def due(self, arrived: Container[GroupSlot], missing: int) -> GroupSlot | None:
        """Whose group goes into this batch next: of those in `arrived` the oldest. None if there is none, or if older
        groups that are being generated need all of the room that is left up to their last batch.

        missing: groups that this batch lacks.
        """
        first: GroupSlot | None = next((slot for slot in self.admitted if slot in arrived), None)
        if first is None:
            return None
        older = Counter(slot.version for slot in self.admitted if slot.version < first.version)
        generating = 0
        for version in sorted(older):
            generating += older[version]
            later_batches = max(0, version + self._max_staleness - self.batches)
            if generating >= missing + self._groups_per_step * later_batches:
                return None
        return first

    def take(self, slot: GroupSlot) -> None:
        """Its group is in the batch; the slot stays in use."""
        del self.admitted[slot]

    def put_back(self, slots: Iterable[GroupSlot]) -> None:
        """Undoes `take`: the slots are again in the order in which they were given out."""
        self.admitted = dict.fromkeys(sorted([*slots, *self.admitted], key=lambda slot: slot.number))

    def complete(self, count: int) -> None:
        """That many groups were taken, and no more are for now."""
        self._taken += count

    def release(self, count: int) -> None:
        """Frees the slots of `count` groups that were taken."""
        self._check_taken(count)
        self.in_use -= count
        self._released += count
        self._give_out()

    def pass_over(self, count: int) -> None:
        """Frees them where no policy comes of these groups: their batch does not count as one."""
        self._check_taken(count)
        self.in_use -= count
        self._taken -= count
        self._give_out()

    def _check_taken(self, count: int) -> None:
        unreleased = self._taken - self._released
        if not 0 <= count <= unreleased:
            raise ValueError(f"buffer: cannot release {count} slots, {unreleased} taken ones are in use")


# The pipe that carries policies up: one slot that holds the newest value; newest wins, nobody polls.

T = TypeVar("T")


class PolicySlot(Generic[T]):
    """One slot with a version, and who has acknowledged which version, for one asyncio event loop."""

    def __init__(self) -> None:
        self.version = -1
        self.acknowledgements: dict[str, int] = {}
        self._away: set[str] = set()
        self._value: T | None = None
        self._newer = asyncio.Condition()  # two, so that an acknowledgement does not wake all who wait for a version
        self._acknowledged = asyncio.Condition()

    def get(self) -> T:
        """The newest value; before the first publish there is none, which is a bug of the caller."""
        assert self._value is not None, "nothing was published yet"
        return self._value

    async def publish(self, version: int, value: T) -> None:
        """Replaces the value; versions only grow."""
        if version <= self.version:
            raise ValueError(f"policy_slot: version must grow, got {version} after {self.version}")
        async with self._newer:
            self.version, self._value = version, value
            self._newer.notify_all()

    async def wait_newer(self, version: int) -> T:
        """The newest value once it is newer than `version`; versions in between are skipped."""
        async with self._newer:
            await self._newer.wait_for(lambda: self.version > version)
            return self.get()

    async def acknowledge(self, name: str, version: int) -> None:
        """`name` holds `version` now."""
        async with self._acknowledged:
            self.acknowledgements[name] = version
            self._acknowledged.notify_all()

    async def leave(self, name: str) -> None:
        """Nobody waits for `name` until it returns, unless all are away."""
        async with self._acknowledged:
            self._away.add(name)
            self._acknowledged.notify_all()

    def back(self, name: str) -> None:
        """`name` is waited for again. It must hold the newest version: older ones may count as acknowledged by all."""
        assert self.acknowledgements[name] == self.version, f"{name} came back without v{self.version}"
        self._away.discard(name)

    def others(self, name: str) -> bool:
        """Whether anybody but `name` has a value and is not away."""
        return bool(self.acknowledgements.keys() - self._away - {name})

    async def acknowledged(self, version: int, names: list[str], deadline_s: float) -> None:
        """Waits until every name that is not away holds `version` or newer, and one at least; TimeoutError says who
        does not and what it holds."""

        def late() -> list[str]:
            present = [name for name in names if name not in self._away] or names
            return [name for name in present if self.acknowledgements.get(name, -1) < version]

        async with self._acknowledged:
            try:
                async with within(deadline_s):
                    await self._acknowledged.wait_for(lambda: not late())
            except TimeoutError:
                held = ", ".join(f"{name} (holds v{self.acknowledgements.get(name, -1)})" for name in late())
                raise TimeoutError(
                    f"policy v{version} not acknowledged after {deadline_s:g} s by {held}; see its log, or raise "
                    "cluster.patience"
                ) from None


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
