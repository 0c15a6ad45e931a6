"""Producer: the near end of one rollout worker, beside the Buffer: keeps it busy.

    lane     waits for a slot of the Buffer -> asks the worker for the next group -> puts it

Lanes pull: a worker that is fast, or joined late, takes what there is. A group is made by one worker at a time. What
the run waits for when a worker is slow or lost, and no longer than what: cluster.admission.

A worker that waits for its first policy (rollout.policy_feed) has no lanes yet and holds no slot. But slots are
released when every producer has acknowledged the newest policy: while one loads, the others go on with the slots that
max_staleness leaves them, then wait for it. One whose process is lost is not waited for, unless it is the last.

A lost process (rollout.supervised_worker) loses only the groups it had in flight, and those of a policy that it was not
proven to have; each is issued again by its position, at once.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Protocol

import pyarrow as pa

from cluster.actor import RevivableActor
from cluster.buffer import Buffer
from cluster.config import DeadlineConfig
from cluster.group_slot import GroupSlot
from cluster.policy_slot import PolicySlot
from cluster.telemetry import Timeline
from rollout.data.cursor import Cursor
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


class Producer:
    """One rollout worker as the rest of the run sees it: `worker` is its process, `feed` brings it policies."""

    def __init__(
        self,
        actor: RevivableActor[RolloutService],
        pipes: Pipes,
        sampling: Callable[[int, int], Sampling],
        deadlines: DeadlineConfig,
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
                "were lost while they worked on it; take it out of the data, or raise cluster.deadlines.group"
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
