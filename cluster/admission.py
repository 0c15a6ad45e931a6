"""When a group may be begun, and which group goes into a batch next: the slots of a Buffer and the staleness bound.

There are groups_per_step * (1 + max_staleness) slots. A group takes one when it is begun, and the slot is free again
when the policy that learned from the group is with every producer. That alone bounds staleness, by arithmetic: a group
that was begun at policy version v goes into batch v + max_staleness at the latest (batches and versions count from 0;
batch v is trained by version v and makes version v + 1). Younger groups may overtake it as long as the batches up to
that one have room for all older groups; then the batch waits (earliest deadline first). So no group gets too old, and
none is dropped because its completions are long, which would teach the policy to write short ones. Synchronous training
is max_staleness 0: no slot is free before the newest policy is with every producer.

What a slow worker costs: a batch waits for the groups that are due in it, and nobody makes them in place of the worker
that has them. So a worker that takes longer for a group than the run takes for 1 + max_staleness batches sets the pace
of the whole run.

What a lost worker costs: its groups stay missing until the lost call ends (at once if the process died, after
deadlines.group if it hangs). Then their slots are free and their positions are issued again, before any new one, to
whichever worker asks first; the lost one is among them once a fresh process has the newest policy (deadlines.start,
then deadlines.push to load it and again to prove it, each with deadlines.group where max_staleness is above 0, since
what is under way may come first). The consumer gives up, and ends the run, after deadlines.start +
deadlines.group.

Why nobody waits for ever. Let the consumer wait for its next group; a group is admitted from `admit` until it is taken
or given up.

- An admitted group has not arrived: its producer waits for its worker, and each such wait has a deadline (a call:
  group or push; a fresh process: start). It does not wait for the Buffer, since `put` lets everything in while the
  consumer waits. So the group arrives, or it is given up. Losses are counted, by worker and by problem, and too many
  of them end the run (rollout.producer, rollout.producer).
- All admitted groups have arrived: the one of the oldest version is taken, since no older one is being generated.
- No group is admitted: the slots in use are those of groups that were taken and not released. These are the
  t < groups_per_step groups of this batch, and those of the batch before while its policy is on its way. Together they
  are fewer than 2 * groups_per_step, so with max_staleness >= 1 a slot is free. With max_staleness 0 one is free as
  soon as every producer that has a process has acknowledged that policy, for which the run waits deadlines.push +
  deadlines.start at most.
  A free slot goes to the first lane that asks, of any worker, and a lane makes one group after another: one living
  worker is enough.

So with one hung worker of two: it holds the slots of its lanes, half of all at most, until its calls end; the other one
makes groups with the rest, and the consumer takes them until a batch lacks only groups of the hung one.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Container, Iterable

from cluster.group_slot import GroupSlot


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
                slot = GroupSlot(self.version)
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
        """Undoes `take`."""
        self.admitted = dict.fromkeys([*slots, *self.admitted])

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
