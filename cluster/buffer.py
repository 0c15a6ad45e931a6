"""The two pipes of a run, both in the driver's process: Buffer carries finished groups from the producers to the
driver's loop, PolicySlot carries new policies from the loop to the producers.

The Buffer alone sets the pace of generation and bounds staleness, so the producers and the loop (its only consumer)
need no code for either. A group passes through these calls:

    admit      a producer waits for a free slot before it begins a group; the slot is in use from then on
    put        the producer adds the finished group, and waits while the Buffer holds too many bytes
    give_up    the producer frees the slot of a group that was lost
    take       the consumer waits for a batch of useful groups; groups with too old tokens are dropped
    release    the consumer frees the slots of a batch once the policy that learned from it is with every producer
    pass_over  the consumer frees the slots of a batch from which nothing is learned

The comment above Admission says how many slots there are, why they bound staleness, what a slow or a lost worker costs,
and why no wait is endless.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import pyarrow as pa

from cluster.actor import within


@dataclass(eq=False, slots=True)
class GroupSlot:
    """The right to generate one group; one producer holds it from `admit` until it calls `put` or `give_up`.

    version: Admission.version when the slot was taken. number: how many slots were taken before it. bytes: the size of
    the group in memory; 0 before `put`.
    """

    version: int
    number: int
    bytes: int = 0


# Slots and the staleness bound: when a group may be begun, and which group goes into a batch next.
#
# There are groups_per_step * (1 + max_staleness) slots. A group takes a slot when it is begun, and the slot is free
# again when the policy that learned from the group is with every producer. That alone bounds staleness: a group that
# was begun at policy version v goes into batch v + max_staleness at the latest (batches and versions count from 0;
# batch v is trained by version v and makes version v + 1). Groups of a younger version may overtake it as long as the
# batches up to that batch then still have room for all groups of its version and older ones; when they would not, the
# batch waits (earliest deadline first). Groups of one version overtake each other freely. So no group
# gets too old, and none is dropped because its completions are long, which would teach the policy to write short ones.
# Synchronous training is max_staleness 0: no slot is free before the newest policy is with every producer.
#
# What a slow worker costs: a batch waits for the groups that are due in it, and no other worker generates them a second
# time. So a worker that takes longer for a group than the run takes for 1 + max_staleness batches sets the pace of the
# whole run.
#
# What a lost worker costs: its groups are missing until the loss is noticed (at once if the process died, after half of
# deadlines.heartbeat if its event loop hangs, after deadlines.group if only the call hangs). Then their slots are free
# and their positions are issued again, before any new position, to whichever worker asks first. The lost worker asks
# again once a fresh process has the newest policy. A try takes deadlines.start, then deadlines.push to load the policy
# and deadlines.push to prove it at most (with max_staleness above 0 each push also deadlines.group, since running
# completions may have to finish first); a late start is tried again. The consumer gives up, and ends the run, after
# deadlines.start + deadlines.group (with dynamic sampling 9 * deadlines.group).
#
# Why no wait is endless. Suppose that the consumer waits for its next group, and call a group admitted from `admit`
# until it is taken or given up.
#
# - An admitted group has not arrived: its producer waits for its worker, and each such wait has a deadline (a call:
#   group or push; a fresh process: start). The producer does not wait for the Buffer, since `put` accepts every group
#   while the consumer waits. So the group arrives, or it is given up. Losses are counted, by worker and by problem, and
#   too many of them end the run (rollout.producer).
# - All admitted groups have arrived: the group of the oldest version is taken, since no older group is being generated.
# - No group is admitted: the slots in use are those of groups that were taken and not released. These are the
#   t < groups_per_step groups of this batch, and those of the batch before while its policy is on its way. Together
#   they are fewer than 2 * groups_per_step, so with max_staleness >= 1 a slot is free. With max_staleness 0 a slot is
#   free as soon as every producer that has a process has acknowledged that policy, for which the run waits
#   deadlines.push + deadlines.start at most. A free slot goes to the first lane that asks, of any worker, and a lane
#   generates one group after another: one living worker is enough.
#
# Example: one of two workers hangs. It holds the slots of its lanes, at most half of all, rounded up (so a single slot
# may be its own), until its calls end. The other worker generates groups with the remaining slots, and the consumer
# takes them until a batch lacks only groups of the hung worker.


class Admission:
    """Counts the slots of one Buffer and says which group goes into the batch next. It holds slots, never groups.

    slots: how many there are. in_use: how many are not free. admitted: the slots whose group was neither taken nor
    given up, in the order in which they were taken. runs_ahead: whether groups are generated while a policy is on its
    way (max_staleness above 0).
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.slots = groups_per_step * (1 + max_staleness)
        self.in_use = 0
        self.admitted: dict[GroupSlot, None] = {}  # an ordered set
        self._groups_per_step, self._max_staleness = groups_per_step, max_staleness
        self.runs_ahead = max_staleness > 0
        self._first_version = 0
        self._taken = 0  # groups, since the start
        self._released = 0  # groups, since the start
        self._given = 0  # slots, since the start
        self._waiting: deque[asyncio.Future[GroupSlot]] = deque()  # calls of `ask` without a slot yet

    @property
    def version(self) -> int:
        """The newest policy version that every producer with a process has acknowledged."""
        return self._first_version + self._released // self._groups_per_step

    @property
    def batches(self) -> int:
        """How many batches are complete, counting those before a resumed run began."""
        return self._first_version + self._taken // self._groups_per_step

    def resume(self, version: int) -> None:
        """Starts the counts at the policy version of a resumed run, which is also its number of complete batches. Must
        be called before `ask`."""
        self._first_version = version

    def ask(self) -> asyncio.Future[GroupSlot]:
        """Returns a future of a slot, which is set once a slot is free and all earlier calls have theirs."""
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
        """Frees the slot of a group that was not taken and will not be trained on."""
        del self.admitted[slot]
        self.in_use -= 1
        self._give_out()

    def due(self, arrived: Container[GroupSlot], missing: int) -> GroupSlot | None:
        """Returns the slot whose group goes into this batch next: the oldest slot in `arrived`. None if `arrived` has
        no admitted slot, or if older groups that are being generated need all places that are left up to their last
        batch.

        missing: the number of groups that this batch still lacks.
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
        """Notes that the slot's group is in the batch; the slot stays in use."""
        del self.admitted[slot]

    def put_back(self, slots: Iterable[GroupSlot]) -> None:
        """Undoes `take` for these slots; all slots are then again in the order in which they were taken."""
        self.admitted = dict.fromkeys(sorted([*slots, *self.admitted], key=lambda slot: slot.number))

    def complete(self, count: int) -> None:
        """Notes that a batch of `count` taken groups is complete."""
        self._taken += count

    def release(self, count: int) -> None:
        """Frees the slots of `count` taken groups. Raises ValueError if fewer taken groups hold a slot."""
        self._check_taken(count)
        self.in_use -= count
        self._released += count
        self._give_out()

    def pass_over(self, count: int) -> None:
        """Frees the slots of `count` taken groups from which no policy will come: their batch is not counted."""
        self._check_taken(count)
        self.in_use -= count
        self._taken -= count
        self._give_out()

    def _check_taken(self, count: int) -> None:
        unreleased = self._taken - self._released
        if not 0 <= count <= unreleased:
            raise ValueError(f"buffer: cannot release {count} slots, {unreleased} taken ones are in use")


T = TypeVar("T")


class PolicySlot(Generic[T]):
    """Holds the newest policy with its version, and which version each worker has acknowledged, for one asyncio event
    loop. A newer policy replaces an older one that nobody fetched.

    version: of the newest policy; -1 before the first. acknowledgements: by worker name, the last acknowledged version.
    """

    def __init__(self) -> None:
        self.version = -1
        self.acknowledgements: dict[str, int] = {}
        self._away: set[str] = set()
        self._value: T | None = None
        # Two conditions, so that an acknowledgement does not wake the tasks that wait for a newer version.
        self._newer = asyncio.Condition()
        self._acknowledged = asyncio.Condition()

    def get(self) -> T:
        """Returns the newest value. A call before the first `publish` is a bug of the caller."""
        assert self._value is not None, "nothing was published yet"
        return self._value

    async def publish(self, version: int, value: T) -> None:
        """Replaces the value and wakes all who wait for a newer version. Raises ValueError unless the version grows."""
        if version <= self.version:
            raise ValueError(f"policy_slot: version must grow, got {version} after {self.version}")
        async with self._newer:
            self.version, self._value = version, value
            self._newer.notify_all()

    async def wait_newer(self, version: int) -> T:
        """Waits for a value newer than `version`, and returns the newest; versions in between are skipped."""
        async with self._newer:
            await self._newer.wait_for(lambda: self.version > version)
            return self.get()

    async def acknowledge(self, name: str, version: int) -> None:
        """Notes that worker `name` holds `version` now."""
        async with self._acknowledged:
            self.acknowledgements[name] = version
            self._acknowledged.notify_all()

    async def leave(self, name: str) -> None:
        """Excludes worker `name` from `acknowledged` until `back`, unless all workers are away."""
        async with self._acknowledged:
            self._away.add(name)
            self._acknowledged.notify_all()

    def back(self, name: str) -> None:
        """Includes worker `name` in `acknowledged` again. The worker must hold the newest version, since older versions
        may have been reported as acknowledged by all."""
        assert self.acknowledgements[name] == self.version, f"{name} came back without v{self.version}"
        self._away.discard(name)

    def others(self, name: str) -> bool:
        """Whether any worker other than `name` has acknowledged a version and is not away."""
        return bool(self.acknowledgements.keys() - self._away - {name})

    async def acknowledged(self, version: int, names: list[str], deadline_s: float) -> None:
        """Waits until every worker in `names` that is not away, and at least one, holds `version` or a newer version.
        Raises TimeoutError, which names the late workers and the versions that they hold."""

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


MAX_REFILLS = 8  # `take` skips at most this many batches' worth of useless groups, then takes every group


class Batch(NamedTuple):
    """What `Buffer.take` returns. groups: those to train on. useless: those that were skipped, which hold no slot."""

    groups: list[pa.Table]
    useless: list[pa.Table]


class Buffer:
    """Bounded queue of finished groups (a pa.Table each, by value), for one asyncio event loop and one consumer.

    Args: groups_per_step: groups of one batch. max_staleness: the bound, in policy versions. max_bytes: Arrow bytes
    that waiting groups may take (more while the consumer waits). on_drop: is called with each group that `take` drops
    as too old.

    bytes: Arrow bytes of the waiting groups. dropped_stale: how many groups were dropped as too old.
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
        self._groups: dict[GroupSlot, pa.Table] = {}  # those that wait to be taken
        self._news = asyncio.Event()  # wakes the consumer: a group arrived, or a slot was given up
        self._consumer_waits = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def runs_ahead(self) -> bool:
        """Whether groups are generated while a policy is on its way (max_staleness above 0)."""
        return self._admission.runs_ahead

    @property
    def slots(self) -> int:
        """How many groups may be admitted and not yet released at one time."""
        return self._admission.slots

    @property
    def in_use(self) -> int:
        """How many slots are not free."""
        return self._admission.in_use

    def resume(self, version: int) -> None:
        """Starts the counts at the policy version of a resumed run. Must be called before the first `admit`."""
        self._admission.resume(version)

    async def admit(self) -> GroupSlot:
        """Waits for a free slot and takes it."""
        turn = self._admission.ask()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the future was set just before this task was cancelled
                self.give_up(turn.result())
            raise

    async def put(self, slot: GroupSlot, group: pa.Table) -> None:
        """Adds a finished group. Waits while it would take the waiting groups beyond `max_bytes`, unless the consumer
        waits or no other group does."""
        slot.bytes = group.get_total_buffer_size()  # 25 times faster than nbytes, which adds up slices
        while not self._fits(slot.bytes):
            await self._consumer_waits.wait()
        self._groups[slot] = group
        self.bytes += slot.bytes
        self._news.set()

    def _fits(self, size: int) -> bool:
        return self._consumer_waits.is_set() or not self._groups or self.bytes + size <= self.max_bytes

    def give_up(self, slot: GroupSlot) -> None:
        """Frees the slot of a group that will not come. Does nothing if the group was already put."""
        if slot in self._admission.admitted and slot not in self._groups:
            self._admission.free(slot)
            self._news.set()

    async def take(
        self, count: int, oldest_version: int, useful: Callable[[pa.Table], bool] = lambda group: True
    ) -> Batch:
        """Waits for `count` useful groups, in the order of Admission.due. A group with a token of a policy older than
        `oldest_version` is dropped; a group that is not `useful` is skipped (at most MAX_REFILLS * count of them)."""
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
        except asyncio.CancelledError:  # the groups taken so far go back; dropped and useless ones are gone
            self._put_back(taken)
            raise
        finally:
            self._consumer_waits.clear()
        self._admission.complete(count)
        return Batch(list(taken.values()), useless)

    async def _arrival(self, missing: int) -> GroupSlot:
        """Waits for the slot whose group goes into the batch next."""
        while (slot := self._admission.due(self._groups, missing)) is None:
            self._news.clear()
            await self._news.wait()
        return slot

    def _put_back(self, taken: dict[GroupSlot, pa.Table]) -> None:
        self._admission.put_back(taken)
        self._groups = taken | self._groups
        self.bytes += sum(slot.bytes for slot in taken)

    def release(self, count: int) -> None:
        """Frees the slots of `count` taken groups, whose policy is with every producer now."""
        self._admission.release(count)

    def pass_over(self, count: int) -> None:
        """Frees the slots of a batch of `count` groups from which nothing is learned. Another batch takes its place,
        for the same policy version and with the same staleness bound."""
        self._admission.pass_over(count)
