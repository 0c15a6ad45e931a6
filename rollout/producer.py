"""Producer: the near end of one rollout worker, beside the Buffer. Keeps it busy, supplied with policies, and alive.

    lane     waits for a slot of the Buffer -> asks the worker for the next group -> puts it
    follow   waits for a newer policy in Latest -> delivers it, acknowledged by the digest of what was loaded -> proves
             by a probe that the worker generates with it

The probe is one request more among those of the lanes, so nobody waits for it; but no group enters the Buffer before
the policy that it was sampled from is proven, hence nothing is learned from another.

Lanes pull: a worker that is fast, or joined late, takes what there is. What a slow or lost one holds when the consumer
needs it is made by an idle one as well, and until it is first with one again it holds one group at a time (see
cluster.backups), so it costs the others one slot and that work.

A worker that waits for its first policy has no lanes yet and holds no slot. But slots are released when every producer
has acknowledged the newest policy: while one restarts or loads, the others go on with the slots that max_staleness
leaves them, then wait for it (no longer than deadlines.push + deadlines.start, which ends the run).

A lost process loses only the groups it had in flight; each is issued again by its position. So is a straggler, with
what its worker had of it: the next attempt goes on from there, on whichever worker.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import TypeVar

import pyarrow as pa

from cluster.actor import Actor, ActorDied, DeadlineExceeded
from cluster.buffer import Buffer
from cluster.config import DeadlineConfig
from cluster.latest import Latest
from cluster.telemetry import Timeline
from cluster.ticket import Ticket
from rollout.cursor import Cursor
from rollout.delivery import Answer, Push, Receipt
from rollout.partial import Begun
from rollout.problems import Problems
from rollout.schema import Problem
from rollout.types import Sampling

log = logging.getLogger("rollout")

T = TypeVar("T")

MAX_REVIVALS = 3  # in a row, without one finished group in between: then the fault is not a passing one
MAX_LOSSES = 5  # of one problem; what was in flight beside a fatal one is lost with it, so one loss is no proof


@dataclass(slots=True)
class Pipes:
    """What all producers of a run share: the stream of problems and the two pipes."""

    problems: Problems
    cursor: Cursor
    buffer: Buffer
    latest: Latest[Push]
    timeline: Timeline
    losses: Counter[int] = field(default_factory=Counter)  # position -> processes lost while they worked on it
    begun: dict[int, Begun] = field(default_factory=dict)  # position -> what is there of a straggler


def group_seed(run_seed: int, position: int, attempt: int) -> int:
    """Sampling seed of a group: independent of worker and timing; 47 bits, so neighbours (seed + j) never meet."""
    text = f"{run_seed}-{position}-{attempt}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6]) >> 1


class Producer:
    """One rollout worker as the rest of the house sees it."""

    def __init__(
        self, actor: Actor, pipes: Pipes, sampling: Callable[[int, int], Sampling], deadlines: DeadlineConfig
    ) -> None:
        self.actor, self.pipes, self.sampling, self.deadlines = actor, pipes, sampling, deadlines
        self.restarts = 0
        self.stragglers = 0  # groups stopped since the batch was filled by others
        self.resumed = self.resumed_tokens = 0  # completions that were not begun anew, and what they had by then
        self.receipt: Receipt | None = None  # of the newest policy that was delivered
        self.answer: Answer | None = None  # to the newest probe
        self._held = self._proven = -1  # versions of policies
        self._proof = asyncio.Condition()
        self._life = 0
        self._revivals = 0  # since the last finished group
        self._reviving = asyncio.Lock()

    async def run(self, workers: int) -> None:
        """Produces until cancelled; returns only by exception (a fault that restarts do not cure)."""
        first = await self.pipes.latest.wait_newer(-1)
        await self.deliver(first)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(first))
            for _ in range(ceil(self.pipes.buffer.slots / workers)):
                tasks.create_task(self._lane())

    async def _lane(self) -> None:
        buffer, cursor = self.pipes.buffer, self.pipes.cursor
        while True:
            ticket = await buffer.admit(self.actor.name)
            position, attempt = ticket.work = ticket.work or cursor.issue()
            problem = self.pipes.problems.at(position)
            begun = self.pipes.begun.get(position, ())
            group = await self.request(problem, self.sampling(position, attempt), attempt, ticket, begun)
            if group is not None:
                await self._proof_of(max(group.column("policy_version_max").to_pylist()))
                if await buffer.put(ticket, group, self.actor.name):
                    self._count_resumed(self.pipes.begun.pop(position, ()))
                    continue
            if group is None and ticket.wanted:
                self._count_loss(problem)
            if buffer.give_up(ticket, self.actor.name):
                self.stragglers += not ticket.wanted
                cursor.again(position, attempt)

    def _count_resumed(self, begun: Begun) -> None:
        lengths = [len(completion.token_ids) for completion in begun]
        self.resumed += sum(length > 0 for length in lengths)
        self.resumed_tokens += sum(lengths)

    def _count_loss(self, problem: Problem) -> None:
        """A problem that takes every generator down with it must not go round for ever."""
        self.pipes.losses[problem.position] += 1
        if self.pipes.losses[problem.position] > MAX_LOSSES:
            raise RuntimeError(
                f"problem {problem.id} (position {problem.position}): {self.pipes.losses[problem.position]} generators "
                "were lost while they worked on it; take it out of the data, or raise cluster.deadlines.group"
            )

    async def _follow(self, push: Push) -> None:
        """Proves the policy that was delivered, then waits for the next."""
        while True:
            await self._or_revive(self.prove, push)
            push = await self.pipes.latest.wait_newer(push.adapter.version)
            await self._or_revive(self.deliver, push)

    async def _or_revive(self, bring: Callable[[Push], Awaitable[None]], push: Push) -> None:
        async with self._reviving:  # a fresh process is being given its policy: two pushes at once would race
            life = self._life
        if self._proven >= push.adapter.version:  # as it has been meanwhile
            return
        try:
            await bring(push)
        except (ActorDied, DeadlineExceeded) as error:
            await self._revive(life, error)  # which delivers and proves what is newest by then

    async def deliver(self, push: Push) -> None:
        """Sends a policy, and acknowledges it when the worker has loaded the very bytes that were sent."""
        version = push.adapter.version
        with self.pipes.timeline.span("push", self.actor.name, version=version):
            receipt = await self.actor.call("take_policy", push.shared, deadline_s=self.deadlines.push)
            push.check_digest(self.actor.name, receipt.digest)
        self.receipt, self._held = receipt, version
        await self.pipes.latest.acknowledge(self.actor.name, version)

    async def prove(self, push: Push) -> None:
        """Asks the worker what the policy it generates with says of the probe tokens; DeliveryError if not the same as
        the learner's."""
        with self.pipes.timeline.span("prove", self.actor.name, concurrent=True, version=push.adapter.version):
            answer: Answer = self._present(
                await self.actor.call("probe", push.probe_ids, deadline_s=self.deadlines.push)
            )
            await push.verify(self.actor.name, answer.logprobs)
        self.answer = answer
        async with self._proof:
            self._proven = push.adapter.version
            self._proof.notify_all()

    def _present(self, answer: T | None) -> T:
        """The answer, unless it is that of a fresh process, which has no policy yet."""
        if answer is None:
            raise ActorDied(f"{self.actor.name}: its process died while it was idle")
        return answer

    async def _proof_of(self, version: int) -> None:
        async with self._proof:
            await self._proof.wait_for(lambda: self._proven >= version)

    async def request(
        self, problem: Problem, sampling: Sampling, attempt: int, ticket: Ticket | None = None, begun: Begun = ()
    ) -> pa.Table | None:
        """One group, on from `begun`; None if the process was lost meanwhile (it is alive again when this returns), or
        as soon as the group is not wanted any more."""
        async with self._reviving:  # a fresh process has no policy yet
            life = self._life
        if ticket and not ticket.wanted:
            return None
        group: pa.Table | None = None
        try:
            with self.pipes.timeline.span("generate", self.actor.name, concurrent=True, position=problem.position):
                async with ticket.while_wanted() if ticket else nullcontext():
                    group = self._present(await self._ask(problem, sampling, attempt, ticket, begun))
                    self._revivals = 0
        except (ActorDied, DeadlineExceeded) as error:
            await self._revive(life, error)
        return group

    async def _ask(
        self, problem: Problem, sampling: Sampling, attempt: int, ticket: Ticket | None, begun: Begun
    ) -> pa.Table | None:
        call = asyncio.ensure_future(
            self.actor.call("rollout", problem, sampling, attempt, begun, deadline_s=self.deadlines.group)
        )
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if ticket and ticket.late:
                await self._keep(problem, attempt)
            raise
        finally:
            call.cancel()

    async def _keep(self, problem: Problem, attempt: int) -> None:
        """What the worker has of a straggler, for the next attempt, as soon as the policy that it was sampled from is
        proven; without an answer, that goes on from what this one went on from."""
        with suppress(ActorDied, DeadlineExceeded):
            begun = await self.actor.call("stop", problem.group_id(attempt), deadline_s=self.deadlines.push)
            if begun:
                await self._proof_of(max(int(first.versions.max(initial=-1)) for first in begun))
                self.pipes.begun[problem.position] = begun

    async def _revive(self, life: int, error: Exception) -> None:
        """One fresh process for all calls that were lost together; it gets the newest policy before its first group."""
        async with self._reviving:
            while self._life == life:
                self._revivals += 1
                if self._revivals > MAX_REVIVALS:
                    raise RuntimeError(
                        f"{self.actor.name}: lost {self._revivals} times in a row without finishing a group; "
                        f"last: {error}"
                    ) from error
                log.warning(
                    "%s; restarting it (%d of %d), its groups are issued again", error, self._revivals, MAX_REVIVALS
                )
                try:
                    await self.actor.revive(isinstance(error, DeadlineExceeded), self.deadlines.start)
                    if self.pipes.latest.version >= 0:
                        newest = self.pipes.latest.get()
                        await self.deliver(newest)
                        await self.prove(newest)
                except (ActorDied, DeadlineExceeded) as again:  # lost while it was being brought back
                    error = again
                else:
                    self.restarts += 1
                    self._life += 1

    async def sleep(self) -> None:
        """The engine frees its device memory (memory.layout: alternating); no group may be running."""
        await self._proof_of(self._held)  # the probe may be, if others made all of the batch
        await self._certainly("sleep")

    async def wake(self) -> None:
        """The engine takes its device memory again."""
        await self._certainly("wake")

    async def _certainly(self, method: str) -> None:
        while True:
            async with self._reviving:
                life = self._life
            try:
                await self.actor.call(method, deadline_s=self.deadlines.push)
                return
            except (ActorDied, DeadlineExceeded) as error:
                await self._revive(life, error)
