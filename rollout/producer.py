"""Producer: the near end of one rollout worker, beside the Buffer: keeps it busy.

    lane     waits for a slot of the Buffer -> asks the worker for the next group -> puts it

Lanes pull: a worker that is fast, or joined late, takes what there is. What a slow or lost one holds when the consumer
needs it is made by an idle one as well, and until it is first with one again it holds one group at a time (see
cluster.backups), so it costs the others one slot and that work.

A worker that waits for its first policy (rollout.policy_feed) has no lanes yet and holds no slot. But slots are
released when every producer has acknowledged the newest policy: while one restarts or loads, the others go on with the
slots that max_staleness leaves them, then wait for it (no longer than deadlines.push + deadlines.start, which ends the
run).

A lost process (rollout.supervised_worker) loses only the groups it had in flight; each is issued again by its position.
So is a straggler, with what its worker had of it: the next attempt goes on from there, on whichever worker.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

import pyarrow as pa

from cluster.actor import Actor, ActorDied, DeadlineExceeded
from cluster.buffer import Buffer
from cluster.config import DeadlineConfig
from cluster.group_slot import Ticket
from cluster.policy_slot import PolicySlot
from cluster.telemetry import Timeline
from rollout.data.cursor import Cursor
from rollout.partial import Begun
from rollout.policy_feed import PolicyFeed
from rollout.schema import Problem
from rollout.service import RolloutService
from rollout.supervised_worker import SupervisedWorker
from rollout.types import Sampling
from rollout.weight_sync import Push

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
    begun: dict[int, Begun] = field(default_factory=dict)  # position -> what is there of a straggler


def group_seed(run_seed: int, position: int, attempt: int) -> int:
    """Sampling seed of a group: independent of worker and timing; 47 bits, so neighbours (seed + j) never meet."""
    text = f"{run_seed}-{position}-{attempt}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6]) >> 1


class Producer:
    """One rollout worker as the rest of the run sees it: `worker` is its process, `feed` brings it policies."""

    def __init__(
        self,
        actor: Actor[RolloutService],
        pipes: Pipes,
        sampling: Callable[[int, int], Sampling],
        deadlines: DeadlineConfig,
    ) -> None:
        self.worker = SupervisedWorker(actor, deadlines)
        self.feed = PolicyFeed(self.worker, pipes.policy_slot, pipes.timeline)
        self.pipes, self.sampling = pipes, sampling
        self.stragglers = 0  # groups stopped since the batch was filled by others
        self.resumed = self.resumed_tokens = 0  # completions that were not begun anew, and what they had by then

    @property
    def name(self) -> str:
        """The worker's."""
        return self.worker.name

    async def run(self, workers: int) -> None:
        """Produces until cancelled; returns only by exception (a fault that restarts do not cure)."""
        first = await self.feed.first()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.feed.follow(first))
            for _ in range(ceil(self.pipes.buffer.slots / workers)):
                tasks.create_task(self._lane())

    async def _lane(self) -> None:
        buffer, cursor = self.pipes.buffer, self.pipes.cursor
        while True:
            ticket = await buffer.admit(self.name)
            position, attempt = ticket.work = ticket.work or cursor.issue()
            problem = self.pipes.problems.at(position)
            begun = self.pipes.begun.get(position, ())
            ticket.oldest = min([ticket.oldest, *(int(first.versions.min()) for first in begun if len(first.versions))])
            group = await self.request(problem, self.sampling(position, attempt), attempt, ticket, begun)
            if group is not None:
                await self.feed.proof_of(max(group.column("policy_version_max").to_pylist()))
                if await buffer.put(ticket, group, self.name):
                    self._count_resumed(self.pipes.begun.pop(position, ()))
                    continue
            if group is None and ticket.wanted:
                self._count_loss(problem)
            if buffer.give_up(ticket, self.name):
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

    async def request(
        self, problem: Problem, sampling: Sampling, attempt: int, ticket: Ticket | None = None, begun: Begun = ()
    ) -> pa.Table | None:
        """One group, on from `begun`; None if the process was lost meanwhile (it is alive again when this returns), or
        as soon as the group is not wanted any more."""

        async def ask() -> pa.Table | None:
            group: pa.Table | None = None
            if ticket is None or ticket.wanted:
                with self.pipes.timeline.span("generate", self.name, concurrent=True, position=problem.position):
                    async with ticket.while_wanted() if ticket else nullcontext():
                        group = await self._ask(problem, sampling, attempt, ticket, begun)
                        if group is None:  # another call was lost just before, and a fresh process got this one
                            raise ActorDied(f"{self.name}: its process was replaced before it had a policy")
                        self.worker.finished_group()
            return group

        return await self.worker.attempt(ask)

    async def _ask(
        self, problem: Problem, sampling: Sampling, attempt: int, ticket: Ticket | None, begun: Begun
    ) -> pa.Table | None:
        worker = self.worker
        call = asyncio.ensure_future(
            worker.actor.call(RolloutService.rollout, worker.deadlines.group, problem, sampling, attempt, begun)
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
        worker = self.worker
        with suppress(ActorDied, DeadlineExceeded):
            begun = await worker.actor.call(RolloutService.stop, worker.deadlines.push, problem.group_id(attempt))
            if begun:
                await self.feed.proof_of(max(int(first.versions.max(initial=-1)) for first in begun))
                self.pipes.begun[problem.position] = begun

    async def sleep(self) -> None:
        """The engine frees its device memory (memory.layout: alternating); no group may be running."""
        await self.feed.idle()  # the probe may be running, if others made all of the batch
        await self.worker.certainly(RolloutService.sleep)

    async def wake(self) -> None:
        """The engine takes its device memory again."""
        await self.worker.certainly(RolloutService.wake)
