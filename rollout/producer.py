"""Producer: the near end of one rollout worker, beside the Buffer: keeps it busy.

    lane     waits for a slot of the Buffer -> asks the worker for the next group -> puts it

Lanes pull: a worker that is fast, or joined late, takes what there is. A group is made by one worker at a time. What
the run waits for when a worker is slow or lost, and no longer than what: cluster.buffer.

A worker that waits for its first policy has no lanes yet and holds no slot. But slots are
released when every producer has acknowledged the newest policy: while one loads, the others go on with the slots that
max_staleness leaves them, then wait for it. One whose process is lost is not waited for, unless it is the last.

A lost process loses only the groups it had in flight, and those of a policy that it was not
proven to have; each is issued again by its position, at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
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
from rollout.data.problems import Cursor
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

# PolicyFeed: supplies one worker with policies, each delivered, then proven.
#
#     follow   waits for a newer policy -> delivers it, acknowledged by the digest of what was loaded -> proves
#              that the worker generates with it: by its engine's tensors and by a probe
#
# The probe is one request more among those of the lanes, so generation goes on meanwhile; but no group enters the
# Buffer before the policy that it was sampled from is proven (proof_of), hence nothing is learned from another.

log = logging.getLogger("rollout")


class PolicyFeed:
    """The end of PolicySlot at one worker."""

    def __init__(self, worker: SupervisedWorker, policy_slot: PolicySlot[Push], timeline: Timeline) -> None:
        self.worker, self.policy_slot, self.timeline = worker, policy_slot, timeline
        self.receipt: Receipt | None = None  # of the newest policy that was delivered
        self.answer: Answer | None = None  # to the newest probe
        self.evidence = Evidence()
        self._held = self._proven = -1  # versions of policies
        self.losses = 0  # processes of the worker that were lost
        self._proof = asyncio.Condition()
        worker.supply = Supply(self._leave, self._bring_newest, partial(policy_slot.others, worker.name))

    async def first(self) -> Push:
        """Waits for the first policy and delivers it."""
        push = await self.policy_slot.wait_newer(-1)
        await self._bring(self.deliver, push)
        return push

    async def follow(self, push: Push) -> None:
        """Proves the policy that was delivered, then waits for the next, for ever."""
        while True:
            if self._held >= push.policy_id.version:  # else it was overwritten before it was read
                await self._bring(self.prove, push)
            push = await self.policy_slot.wait_newer(push.policy_id.version)
            await self._bring(self.deliver, push)

    async def _bring(self, how: Callable[[Push], Awaitable[object]], push: Push) -> None:
        async def ask() -> None:
            if self._proven < push.policy_id.version:  # else a fresh process got it, or a newer one
                await how(push)

        await self.worker.attempt(ask)

    async def _leave(self) -> None:
        """What the lost process held and had proven says nothing of the next one."""
        if self.policy_slot.version >= 0:  # before the first policy nobody is waited for, nor comes back with it
            await self.policy_slot.leave(self.worker.name)
        async with self._proof:
            self._held = self._proven = -1
            self.losses += 1
            self._proof.notify_all()

    async def _bring_newest(self) -> None:
        """A policy that was published meanwhile did not wait for this worker, so the next one is brought, too."""
        if self.policy_slot.version < 0:
            return
        newest = self.policy_slot.get()
        while not await self.deliver(newest) or newest.policy_id.version < self.policy_slot.version:
            newest = await self.policy_slot.wait_newer(newest.policy_id.version)
        self.policy_slot.back(self.worker.name)
        await self.prove(newest)

    async def deliver(self, push: Push) -> bool:
        """Sends a policy, and acknowledges it when the worker has loaded the very bytes that were sent. False if the
        learner has written newer ones in their place, and has published the policy after this one."""
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
        """Asks the worker which tensors it computes with and what they say of the probe; RuntimeError if that is not
        the policy that was sent."""
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
        """Waits until that version or a newer one is proven of the process that came after so many losses; False if it
        is lost first."""
        async with self._proof:
            await self._proof.wait_for(lambda: self._proven >= version or self.losses > losses)
            return self.losses == losses

    async def idle(self) -> None:
        """Waits until no probe is running."""
        await self.proof_of(self._held, self.losses)


# One rollout worker that is brought back when its process is lost, with the newest policy before anybody asks it.

T = TypeVar("T")

MAX_REVIVALS = 3  # in a row, without one finished group in between: then the fault is not a passing one


class Losses:
    """How often in a row a worker was lost, and of what."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self._reason: str | None = None

    def forget(self) -> None:
        """It has done something useful since."""
        self.count, self._reason = 0, None

    def add(self, error: ActorDied | DeadlineExceeded) -> None:
        """Counts a loss. Raises RuntimeError after too many, or when the same cause comes twice in a row: a fresh
        process would end alike."""
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
    """Awaits start(); while the process is lost in it, awaits again(). Raises RuntimeError, StartFailed,
    DeadlineExceeded."""
    losses = Losses(name)
    while True:
        try:
            return await start()
        except ActorDied as error:
            losses.add(error)
            start = again


async def _nothing() -> None:
    """For a worker that is not supplied with policies."""


def _no_group() -> None:
    """For a call whose loss costs nothing but another call."""


@dataclass(slots=True)
class Supply:
    """What supplies a worker with policies.

    leave: is told that the process is lost. rearm: brings a fresh one the newest policy, if there is one. others:
    whether another worker is supplied meanwhile.
    """

    leave: Callable[[], Awaitable[None]] = _nothing
    rearm: Callable[[], Awaitable[None]] = _nothing
    others: Callable[[], bool] = lambda: False


class SupervisedWorker:
    """The process of one worker through all its lives.

    supply: set by who supplies the worker with policies.
    replacing: what a fresh process is started inside of; set by who must make room for it.
    """

    def __init__(self, actor: RevivableActor[RolloutService], deadlines: Deadlines) -> None:
        self.actor, self.deadlines = actor, deadlines
        self.name = actor.name
        self.supply = Supply()
        self.replacing: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self.restarts = 0
        self._life = 0
        self._losses = Losses(actor.name)  # since the last finished group
        self._revival: asyncio.Task[None] | None = None

    @property
    def away(self) -> bool:
        """Whether its process is lost and no fresh one is ready."""
        return self._revival is not None and not self._revival.done()

    async def present(self) -> None:
        """Waits until it is not away. Raises what its replacement failed of meanwhile."""
        while self._revival is not None and not self._revival.done():
            await asyncio.shield(self._revival)  # it goes on if who waits is cancelled

    async def attempt(self, ask: Callable[[], Awaitable[T]], lost: Callable[[], None] = _no_group) -> T | None:
        """What `ask` gives; None if the process was lost meanwhile (a fresh one is there when this returns, `lost` was
        called long before)."""
        await self.present()  # a fresh process is being given its policy: nothing is asked of it before
        life = self._life
        try:
            return await ask()
        except (ActorDied, DeadlineExceeded) as error:
            lost()
            await self._revived(life, error)
            return None

    async def keep(self) -> None:
        """Replaces the process whenever it is lost, for ever, also while nobody asks anything of it. One that hangs is
        lost, too: its event loop answers while it generates and while it takes a policy."""
        silence_s = self.deadlines.heartbeat / 2
        while True:
            await self.attempt(partial(self.actor.until_ended, silence_s))

    async def replaced_no_more(self) -> None:
        """Gives up the fresh process that is being started, if one is."""
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)

    async def certainly(self, method: Callable[[RolloutService], Awaitable[None]]) -> None:
        """Calls a method that has no arguments and no answer; if the process is lost, once more on a fresh one."""

        async def ask() -> bool:
            await self.actor.call(method, self.deadlines.push)
            return True

        while not await self.attempt(ask):
            pass

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        """One group; losses before it are not held against the worker. Raises ActorDied or DeadlineExceeded if the
        process is lost meanwhile."""
        return self._finished(
            await self.actor.call(RolloutService.rollout, self.deadlines.group, problem, sampling, attempt)
        )

    async def rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int
    ) -> pa.Table:
        """The groups of several problems, of which the last begins once others have ended, `rounds` times; otherwise as
        `rollout`."""
        deadline_s = rounds * self.deadlines.group
        return self._finished(await self.actor.call(RolloutService.rollouts, deadline_s, problems, samplings, attempt))

    def _finished(self, group: pa.Table | None) -> pa.Table:
        if group is None:  # another call was lost just before, and a fresh process got this one
            raise ActorDied(f"{self.name}: its process was replaced before it had a policy")
        self._losses.forget()
        return group

    async def _revived(self, life: int, error: ActorDied | DeadlineExceeded) -> None:
        """Waits for one fresh process for all calls that were lost together; groups that they had are issued again."""
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
            except (ActorDied, DeadlineExceeded) as again:  # lost while it was being brought back
                error = again
        self.restarts += 1
        self._life += 1

    async def _replace(self) -> None:
        """A fresh process. While other workers go on nobody waits for it, and the node that it needs may come back."""
        while True:
            try:
                return await self.actor.revive(self.deadlines.start)
            except DeadlineExceeded as late:
                if not self.supply.others():
                    raise
                log.warning("%s; the other generators go on, and it is tried again", late)


MAX_LOSSES = 5  # of one problem; what was in flight beside a fatal one is lost with it, so one loss is no proof


class ProblemStream(Protocol):
    """Problems without end: rollout.data.problems.Problems, or made-up ones."""

    def __len__(self) -> int:
        """Problems of one epoch."""

    def at(self, position: int) -> Problem:
        """The problem at this position, counted over epochs from 0; the same each time."""


@dataclass(slots=True)
class Pipes:
    """What all producers of a run share: the stream of problems and the two pipes."""

    problems: ProblemStream
    cursor: Cursor
    buffer: Buffer
    policy_slot: PolicySlot[Push]
    timeline: Timeline
    losses: Counter[int] = field(default_factory=Counter)  # position -> processes lost while they worked on it


class Producer:
    """One rollout worker as the rest of the run sees it: `worker` is its process, `feed` brings it policies."""

    def __init__(
        self,
        actor: RevivableActor[RolloutService],
        pipes: Pipes,
        sampling: Callable[[int, int], Sampling],
        deadlines: Deadlines,
    ) -> None:
        if pipes.buffer.runs_ahead:  # a policy, and its probe, may have to wait for the groups that are under way
            deadlines = deadlines.model_copy(update={"push": deadlines.push + deadlines.group})
        self.worker = SupervisedWorker(actor, deadlines)
        self.feed = PolicyFeed(self.worker, pipes.policy_slot, pipes.timeline)
        self.pipes = pipes
        self.sampling = sampling

    @property
    def name(self) -> str:
        """The worker's."""
        return self.worker.name

    async def run(self, workers: int) -> None:
        """Produces until cancelled; returns only by exception (a fault that restarts do not cure)."""
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
            if self.worker.away:  # lost while this lane waited: the slot is another worker's
                buffer.give_up(slot)
                continue
            position, attempt = cursor.issue()
            problem = self.pipes.problems.at(position)
            losses, again = self.feed.losses, partial(self._again, slot, problem, attempt)
            group = await self.request(problem, self.sampling(position, attempt), attempt, again)
            if group is None:
                continue
            if await self.feed.proof_of(max(group.column("policy_version_max").to_pylist()), losses):
                await buffer.put(slot, group)
            else:  # nothing is known of the process that sampled it
                again()

    def _again(self, slot: GroupSlot, problem: Problem, attempt: int) -> None:
        """The group is lost: at once, its slot is free and its position is issued again, to whoever asks first."""
        self._count_loss(problem)
        self.pipes.buffer.give_up(slot)
        self.pipes.cursor.again(problem.position, attempt)

    def _count_loss(self, problem: Problem) -> None:
        """A problem that takes every generator down with it must not go round for ever."""
        self.pipes.losses[problem.position] += 1
        if self.pipes.losses[problem.position] > MAX_LOSSES:
            raise RuntimeError(
                f"problem {problem.id} (position {problem.position}): {self.pipes.losses[problem.position]} generators "
                "were lost while they worked on it; take it out of the data, or raise cluster.patience"
            )

    async def _rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        """One group. Raises ActorDied or DeadlineExceeded if the process is lost meanwhile."""
        with self.pipes.timeline.span("generate", self.name, concurrent=True, position=problem.position):
            return await self.worker.rollout(problem, sampling, attempt)

    async def request(
        self, problem: Problem, sampling: Sampling, attempt: int, lost: Callable[[], None] = lambda: None
    ) -> pa.Table | None:
        """One group; None if the process was lost meanwhile (`lost` is called then; it is alive again when this
        returns)."""
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
        """Groups of several problems, as of SupervisedWorker.rollouts; None and `lost` as of `request`."""
        return await self.worker.attempt(partial(self._rollouts, problems, samplings, attempt, rounds), lost)

    @property
    def away(self) -> bool:
        """See Asks, as the next."""
        return self.worker.away

    async def present(self) -> None:
        await self.worker.present()

    async def sleep(self) -> None:
        """The engine frees its device memory (memory.layout: alternating); no group may be running."""
        await self.feed.idle()  # the probe may be running, if other workers made all of the batch
        await self.worker.certainly(RolloutService.sleep)

    async def wake(self) -> None:
        """The engine takes its device memory again."""
        await self.worker.certainly(RolloutService.wake)
