"""The driver's side of one rollout worker: keeps it busy with groups, supplies it with policies, replaces its process.

Producer runs several lanes. Each lane waits for a slot of the Buffer, asks the worker for the next group, waits until
the policy that sampled the group is proven, and puts the group into the Buffer. Lanes pull work, so a fast worker, or
a worker that joins late, takes whatever there is to do. cluster.buffer says how long the run waits for a slow or lost
worker.

PolicyFeed delivers each new policy to the worker and proves that the worker generates with it. SupervisedWorker starts
a fresh process when the worker's process is lost.

A producer starts its lanes after the first policy was delivered, and holds no slot before. Slots are released when
every producer has acknowledged the newest policy: while one worker loads it, the others go on with the slots that
max_staleness leaves them, then wait. Nobody waits for a worker whose process is lost, unless no other worker is left.

A lost process costs the groups that it was generating, and the groups sampled from a policy that it was not yet proven
to hold. The position of each such group is issued again at once.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Protocol, TypeVar

import pyarrow as pa

from cluster.actor import ActorDied, DeadlineExceeded, RevivableActor, StartFailed
from cluster.buffer import Buffer, GroupSlot, PolicySlot
from cluster.config import Deadlines
from cluster.telemetry import Timeline
from rollout.data.curriculum import Curriculum
from rollout.delivery import (
    Answer,
    Evidence,
    Push,
    Receipt,
    check_digest,
)
from rollout.schema import Problem
from rollout.service import RolloutService
from rollout.types import Sampling

# PolicyFeed waits for a newer policy, delivers it to the worker, and acknowledges it by the digest of the bytes that
# the worker loaded. Then it proves by the engine's tensors and by a probe that the worker generates with the policy.
#
# The probe is one more request beside those of the lanes, so generation goes on meanwhile. No group enters the Buffer
# before the policy that sampled it is proven (proof_of), so the learner never trains on samples of another policy.

log = logging.getLogger("rollout")


class PolicyFeed:
    """Carries policies from the PolicySlot to one worker.

    receipt: the worker's answer to the newest policy that was delivered. answer: its answer to the newest probe.
    losses: how many processes of the worker were lost so far.
    """

    def __init__(self, worker: SupervisedWorker, policy_slot: PolicySlot[Push], timeline: Timeline) -> None:
        self.worker, self.policy_slot, self.timeline = worker, policy_slot, timeline
        self.receipt: Receipt | None = None
        self.answer: Answer | None = None
        self.evidence = Evidence()
        self._held = self._proven = -1  # newest version that the process has loaded, and that it is proven to hold
        self.losses = 0
        self._proof = asyncio.Condition()
        worker.supply = Supply(self._leave, self._bring_newest, partial(policy_slot.others, worker.name))

    async def first(self) -> Push:
        """Waits for the first policy and delivers it."""
        push = await self.policy_slot.wait_newer(-1)
        await self._bring(self.deliver, push)
        return push

    async def follow(self, push: Push) -> None:
        """Proves the policy `push`, which was delivered, then delivers and proves each newer one, for ever."""
        while True:
            # Else the learner overwrote the policy before the worker read it, or the process was lost since: the fresh
            # one is brought the newest policy, and proven to have it, by _bring_newest.
            if self._held >= push.policy_id.version:
                await self._bring(self.prove, push)
            push = await self.policy_slot.wait_newer(push.policy_id.version)
            await self._bring(self.deliver, push)

    async def _bring(self, how: Callable[[Push], Awaitable[object]], push: Push) -> None:
        async def ask() -> None:
            if self._proven < push.policy_id.version:  # else a fresh process was already brought this policy or a newer
                await how(push)

        await self.worker.attempt(ask)

    async def _leave(self) -> None:
        """Forgets what the lost process held and was proven to hold, and has nobody wait for this worker."""
        if self.policy_slot.version >= 0:  # before the first policy nobody waits for a worker
            await self.policy_slot.leave(self.worker.name)
        async with self._proof:
            self._held = self._proven = -1
            self.losses += 1
            self._proof.notify_all()

    async def _bring_newest(self) -> None:
        """Delivers the newest policy to a fresh process, and proves it.

        While the process was away nobody waited for this worker, so a newer policy may be published during the
        delivery; then that one is delivered, too.
        """
        if self.policy_slot.version < 0:
            return
        newest = self.policy_slot.get()
        while not await self.deliver(newest) or newest.policy_id.version < self.policy_slot.version:
            newest = await self.policy_slot.wait_newer(newest.policy_id.version)
        self.policy_slot.back(self.worker.name)
        await self.prove(newest)

    async def deliver(self, push: Push) -> bool:
        """Sends a policy, and acknowledges it when the worker has loaded the very bytes that were sent.

        False if the learner has meanwhile written newer weights over these and published a newer policy.
        """
        name, version = self.worker.name, push.policy_id.version
        with self.timeline.span("push", name, version=version):
            receipt = await self.worker.actor.call(
                RolloutService.take_policy, self.worker.deadlines.push, push.policy.argument()
            )
            if receipt is None:
                return False
            check_digest(push.policy_id, name, receipt.digest)
        self.receipt, self._held = receipt, version
        await self.policy_slot.acknowledge(name, version)
        return True

    async def prove(self, push: Push) -> None:
        """Asks the worker for the digests of the tensors that it computes with and for its logprobs of the probe.

        Raises RuntimeError if they are not those of the policy that was sent.
        """
        name, version = self.worker.name, push.policy_id.version
        with self.timeline.span("prove", name, concurrent=True, version=version):
            answer = await self.worker.actor.call(RolloutService.probe, self.worker.deadlines.push, push.probe_ids)
            await push.verify(name, answer, self.evidence)
        if answer.held.unread and self.answer is None:
            log.warning(
                "%s: %d tensors cannot be read back from its engine, first %s: only logprobs prove that they arrive",
                name,
                len(answer.held.unread),
                answer.held.unread[0],
            )
        self.answer = answer
        async with self._proof:
            self._proven = max(self._proven, version)
            self._proof.notify_all()

    async def proof_of(self, version: int, losses: int) -> bool:
        """Waits until the worker's process is proven to hold the policy `version` or a newer one.

        losses: the value of self.losses when the process was asked. False if that process is lost before the proof.
        """
        async with self._proof:
            await self._proof.wait_for(lambda: self._proven >= version or self.losses > losses)
            return self.losses == losses

    async def idle(self) -> None:
        """Waits until no probe is running."""
        await self.proof_of(self._held, self.losses)


# The process of a rollout worker: a lost one is replaced, and the fresh one gets the newest policy before any request.

T = TypeVar("T")

MAX_REVIVALS = 3  # fresh processes in a row without a finished group; if more are needed, the fault is a lasting one


class Losses:
    """Counts how often in a row the process of a worker was lost, and remembers the last cause.

    count: losses since the last finished group.
    """

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self._reason: str | None = None

    def forget(self) -> None:
        """Resets the count, after the worker has finished a group."""
        self.count, self._reason = 0, None

    def add(self, error: ActorDied | DeadlineExceeded) -> None:
        """Counts a loss. Raises RuntimeError after MAX_REVIVALS fresh processes, or when an actor died of the same
        cause twice in a row, since another process would die of it too. Raises StartFailed again if an input is
        wrong."""
        self.count += 1
        if isinstance(error, StartFailed) and error.wrong_input:
            raise error
        before, self._reason = self._reason, error.reason if isinstance(error, ActorDied) else None
        if self._reason is not None and self._reason == before:
            raise RuntimeError(f"{error} (twice in a row, so it is not tried again)") from error
        if self.count > MAX_REVIVALS:
            raise RuntimeError(
                f"{self.name}: lost {self.count} times in a row without finishing a group; last: {error}"
            ) from error
        log.warning("%s; starting a fresh process (%d of %d)", error, self.count, MAX_REVIVALS)


async def until_started(name: str, start: Callable[[], Awaitable[None]], again: Callable[[], Awaitable[None]]) -> None:
    """Awaits start(); whenever the process is lost in it, awaits again(), which starts a fresh one.

    Raises RuntimeError, StartFailed, DeadlineExceeded.
    """
    losses = Losses(name)
    while True:
        try:
            return await start()
        except ActorDied as error:
            losses.add(error)
            start = again


async def _nothing() -> None:
    """The default of Supply: nobody supplies the worker with policies."""


def _no_group() -> None:
    """The default of `attempt`: no group is lost with the call."""


@dataclass(slots=True)
class Supply:
    """The callbacks by which a SupervisedWorker tells its PolicyFeed about lost and fresh processes.

    leave: awaited when the process is lost.
    rearm: awaited when a fresh process is ready; brings it the newest policy, if there is one.
    others: says whether another worker holds a policy and is not being replaced.
    """

    leave: Callable[[], Awaitable[None]] = _nothing
    rearm: Callable[[], Awaitable[None]] = _nothing
    others: Callable[[], bool] = lambda: False


class SupervisedWorker:
    """One rollout worker whose process is replaced whenever it dies, or misses a deadline.

    supply: set by the PolicyFeed of the worker.
    replacing: gives the context in which a fresh process is started; set by whoever must make room for that process.
    restarts: how often a fresh process took the place of a lost one.
    """

    def __init__(self, actor: RevivableActor[RolloutService], deadlines: Deadlines) -> None:
        self.actor, self.deadlines = actor, deadlines
        self.name = actor.name
        self.supply = Supply()
        self.replacing: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self.restarts = 0
        self._life = 0
        self._losses = Losses(actor.name)
        self._revival: asyncio.Task[None] | None = None

    @property
    def away(self) -> bool:
        """Whether the process is lost and no fresh process is ready."""
        return self._revival is not None and not self._revival.done()

    async def present(self) -> None:
        """Waits while the process is being replaced. Raises the error of the replacement if it fails."""
        while self._revival is not None and not self._revival.done():
            await asyncio.shield(self._revival)  # the replacement goes on if the caller is cancelled

    async def attempt(self, ask: Callable[[], Awaitable[T]], lost: Callable[[], None] = _no_group) -> T | None:
        """The result of `ask`, or None if the process was lost meanwhile.

        lost: called at once when the process is lost. None is returned only when a fresh process is ready.
        """
        await self.present()  # nothing is asked of a fresh process before it has its policy
        life = self._life
        try:
            return await ask()
        except (ActorDied, DeadlineExceeded) as error:
            lost()
            await self._revived(life, error)
            return None

    async def keep(self) -> None:
        """Replaces the process whenever it is lost, for ever, also while nobody asks anything of it.

        A process whose event loop gives no answer counts as lost, since the event loop of a healthy process answers
        also while it generates or loads a policy.
        """
        silence_s = self.deadlines.heartbeat / 2
        while True:
            await self.attempt(partial(self.actor.until_ended, silence_s))

    async def replaced_no_more(self) -> None:
        """Gives up the fresh process that is being started, if one is."""
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)

    async def certainly(self, method: Callable[[RolloutService], Awaitable[None]]) -> None:
        """Calls a method without arguments and result, again on a fresh process whenever the process is lost."""

        async def ask() -> bool:
            await self.actor.call(method, self.deadlines.push)
            return True

        while not await self.attempt(ask):
            pass

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        """Asks for one group; when it arrives, the count of losses begins anew. Raises ActorDied or DeadlineExceeded if
        the process is lost meanwhile."""
        return self._finished(
            await self.actor.call(RolloutService.rollout, self.deadlines.group, problem, sampling, attempt)
        )

    async def rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int
    ) -> pa.Table:
        """Asks for the groups of several problems in one call; otherwise as `rollout`.

        rounds: how many times the deadline of one group the call may take, since the worker decodes only some of the
        problems at once.
        """
        deadline_s = rounds * self.deadlines.group
        return self._finished(await self.actor.call(RolloutService.rollouts, deadline_s, problems, samplings, attempt))

    def _finished(self, group: pa.Table | None) -> pa.Table:
        if group is None:  # the process was replaced between two calls, and the fresh one has no policy yet
            raise ActorDied(f"{self.name}: its process was replaced before it had a policy")
        self._losses.forget()
        return group

    async def _revived(self, life: int, error: ActorDied | DeadlineExceeded) -> None:
        """Starts one replacement for all calls that were lost with the same process, and waits for it."""
        if self._life == life and not self.away:
            self._revival = asyncio.create_task(self._revive(error))
        await self.present()

    async def _revive(self, error: ActorDied | DeadlineExceeded) -> None:
        while True:
            self._losses.add(error)
            await self.supply.leave()
            try:
                async with self.replacing():
                    await self._replace()
                await self.supply.rearm()
                break
            except (ActorDied, DeadlineExceeded) as again:  # the fresh process was lost, too
                error = again
        self.restarts += 1
        self._life += 1

    async def _replace(self) -> None:
        """Starts a fresh process. While other workers go on, a late start is tried again, since nobody waits for it and
        the node that it needs may come back."""
        while True:
            try:
                return await self.actor.revive(self.deadlines.start)
            except DeadlineExceeded as late:
                if not self.supply.others():
                    raise
                log.warning("%s; the other generators go on, and it is tried again", late)


class Cursor:
    """Hands out positions of the stream in order, and lost positions again.

    The state is a low-water mark, `low`, below which every position is done, and the set of positions done above it. It
    is saved with the weights in each checkpoint, so that a run which is resumed trains on each problem exactly once.
    """

    def __init__(self) -> None:
        self.restore(0, ())

    def restore(self, low: int, done: Iterable[int]) -> None:
        """Continues from a saved state: every position that is not done in it will be issued again."""
        self.low = low
        self._done = set(done)
        self._next = low
        self._again: list[tuple[int, int]] = []  # heap of (position, attempt)

    def issue(self) -> tuple[int, int]:
        """The next (position, attempt): lost and dropped positions come before new ones of the stream."""
        if self._again:
            return heapq.heappop(self._again)
        self._next = max(self._next, self.low)  # `finish` may raise `low` beyond _next, over restored positions
        while self._next in self._done:
            self._next += 1
        self._next += 1
        return self._next - 1, 0

    def again(self, position: int, attempt: int) -> None:
        """Has the position issued once more, as the next attempt, since this attempt was lost or dropped."""
        heapq.heappush(self._again, (position, attempt + 1))

    def finish(self, position: int) -> None:
        """Marks a position as done, since the learner has consumed its group. Raises ValueError if it was done."""
        if position < self.low or position in self._done:
            raise ValueError(f"cursor: position {position} was consumed twice")
        self._done.add(position)
        while self.low in self._done:
            self._done.remove(self.low)
            self.low += 1

    @property
    def consumed(self) -> int:
        """How many positions the learner has consumed."""
        return self.low + len(self._done)

    def state(self) -> dict[str, object]:
        """The arguments for `restore`, as values that JSON can hold."""
        return {"low": self.low, "done": sorted(self._done)}


# The run ends when more groups of one position of the stream than this were lost. A generator that dies loses all
# groups that it was generating, so a single loss does not prove that the problem is to blame.
MAX_LOSSES = 5


class ProblemStream(Protocol):
    """An endless stream of problems: rollout.data.problems.Problems, or a test's own."""

    def __len__(self) -> int:
        """How many problems one epoch has."""

    def at(self, position: int) -> Problem:
        """The problem at this position, counted over epochs from 0; the same each time."""


@dataclass(slots=True)
class Pipes:
    """What all producers of a run share: the stream of problems, Buffer and PolicySlot.

    losses: position -> how many groups of this position were lost with their generator. curriculum: the order of
    `problems`, where data.curriculum is set.
    """

    problems: ProblemStream
    cursor: Cursor
    buffer: Buffer
    policy_slot: PolicySlot[Push]
    timeline: Timeline
    losses: Counter[int] = field(default_factory=Counter)
    curriculum: Curriculum | None = None

    def problem(self, position: int) -> Problem:
        """The problem at this position of the stream."""
        return self.problems.at(position) if self.curriculum is None else self.curriculum.at(position)


class Producer:
    """One rollout worker as the driver sees it.

    worker: its process. feed: brings it policies. sampling: (position, attempt) -> how to sample that group.
    """

    def __init__(
        self,
        actor: RevivableActor[RolloutService],
        pipes: Pipes,
        sampling: Callable[[int, int], Sampling],
        deadlines: Deadlines,
    ) -> None:
        if pipes.buffer.runs_ahead:  # a policy and its probe may have to wait for groups that are being generated
            deadlines = deadlines.model_copy(update={"push": deadlines.push + deadlines.group})
        self.worker = SupervisedWorker(actor, deadlines)
        self.feed = PolicyFeed(self.worker, pipes.policy_slot, pipes.timeline)
        self.pipes = pipes
        self.sampling = sampling

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.worker.name

    async def run(self, workers: int) -> None:
        """Produces groups until cancelled, or until an error that fresh processes do not cure is raised.

        workers: number of rollout workers of the run; it decides how many lanes this one has. Slots go to the lane that
        asked first.
        """
        try:
            first = await self.feed.first()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.feed.follow(first))
                tasks.create_task(self.worker.keep())
                for _ in range(ceil(self.pipes.buffer.slots / workers)):
                    tasks.create_task(self._lane())
        finally:
            await self.worker.replaced_no_more()

    async def _lane(self) -> None:
        buffer, cursor = self.pipes.buffer, self.pipes.cursor
        while True:
            await self.worker.present()
            slot = await buffer.admit()
            if self.worker.away:  # the process was lost while this lane waited: another worker may use the slot
                buffer.give_up(slot)
                continue
            position, attempt = cursor.issue()
            problem = self.pipes.problem(position)
            losses, again = self.feed.losses, partial(self._again, slot, problem, attempt)
            group = await self.request(problem, self.sampling(position, attempt), attempt, again)
            if group is None:
                continue
            if await self.feed.proof_of(max(group.column("policy_version_max").to_pylist()), losses):
                await buffer.put(slot, group)
            else:  # the process was lost before its policy was proven, so the group may be another policy's
                again()

    def _again(self, slot: GroupSlot, problem: Problem, attempt: int) -> None:
        """Frees the slot of a lost group, and has its position issued again to the first worker that asks."""
        self._count_loss(problem)
        self.pipes.buffer.give_up(slot)
        self.pipes.cursor.again(problem.position, attempt)

    def _count_loss(self, problem: Problem) -> None:
        """Raises RuntimeError when a problem was lost too often, since it may be what kills the generators."""
        self.pipes.losses[problem.position] += 1
        if self.pipes.losses[problem.position] > MAX_LOSSES:
            raise RuntimeError(
                f"problem {problem.id} (position {problem.position}): {self.pipes.losses[problem.position]} generators "
                "were lost while they worked on it; take it out of the data, or raise cluster.patience"
            )

    async def _rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        with self.pipes.timeline.span("generate", self.name, concurrent=True, position=problem.position):
            return await self.worker.rollout(problem, sampling, attempt)

    async def request(
        self, problem: Problem, sampling: Sampling, attempt: int, lost: Callable[[], None] = lambda: None
    ) -> pa.Table | None:
        """One group; None if the process was lost meanwhile. lost: as for SupervisedWorker.attempt."""
        return await self.worker.attempt(partial(self._rollout, problem, sampling, attempt), lost)

    async def _rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int
    ) -> pa.Table:
        with self.pipes.timeline.span("generate", self.name, concurrent=True, problems=len(problems)):
            return await self.worker.rollouts(problems, samplings, attempt, rounds)

    async def requests(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int,
        lost: Callable[[], None],
    ) -> pa.Table | None:  # fmt: skip
        """The groups of several problems in one table (SupervisedWorker.rollouts); None if the process was lost."""
        return await self.worker.attempt(partial(self._rollouts, problems, samplings, attempt, rounds), lost)

    @property
    def away(self) -> bool:
        """See SupervisedWorker.away."""
        return self.worker.away

    async def present(self) -> None:
        """See SupervisedWorker.present."""
        await self.worker.present()

    async def sleep(self) -> None:
        """Has the engine free its device memory (memory.layout: alternating); no group may be running."""
        await self.feed.idle()  # the probe may still be running if other workers made the whole batch
        await self.worker.certainly(RolloutService.sleep)

    async def wake(self) -> None:
        """Has the engine take its device memory again."""
        await self.worker.certainly(RolloutService.wake)
