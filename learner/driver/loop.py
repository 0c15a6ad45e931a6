"""The algorithm as prose: take -> learn -> deliver -> (evaluate | checkpoint).

    producers --groups--> Buffer --take--> Trainer.step --adapter--> PolicySlot --> producers

There is one loop. Synchronous training is max_staleness 0: the slots of the consumed groups are released only when the
new policy is with every generator, so nothing is generated before that. With max_staleness k the Buffer
has room for k more batches, and generation goes on while this loop trains.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

from cluster.actor import ClusterLost
from cluster.deadline import within
from cluster.files import WriteFailed
from learner.driver.batches import Batches
from learner.driver.evaluate import HeldOut
from learner.driver.failure import RunEnded, first_of, sentence_of
from learner.driver.mismatch_guard import MismatchGuard
from learner.driver.run_checkpoints import RunCheckpoints
from learner.driver.schedule import Schedule
from learner.driver.step_metrics import StepMetrics
from learner.driver.updates import Updates
from learner.driver.watched_learner import LearnerError
from learner.driver.weight_sync import WeightSync
from rollout.producer import Producer

T = TypeVar("T")

LOST_S = 8.0  # that a last checkpoint may take when Ray is about to end the processes


class GuardStopped(RunEnded):
    """The guard ended the run, after a checkpoint."""


class Loop:
    """Consumes groups, produces policies; learner.driver.wiring puts its parts together.

    stop: set by Ctrl-C or SIGTERM: finish the step, checkpoint, leave.
    """

    def __init__(
        self,
        schedule: Schedule,
        producers: Sequence[Producer],
        batches: Batches,
        updates: Updates,
        sync: WeightSync,
        held_out: HeldOut,
        checkpoints: RunCheckpoints,
        metrics: StepMetrics,
        guard: MismatchGuard,
    ) -> None:
        self.schedule, self.producers, self.batches = schedule, producers, batches
        self.updates, self.sync, self.held_out = updates, sync, held_out
        self.checkpoints, self.metrics, self.guard = checkpoints, metrics, guard
        self.stop = asyncio.Event()
        self._saving = False

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.updates.step

    async def run(self, resume_from: Path | None, *beside: Coroutine[None, None, None]) -> None:
        """The whole run, from `resume_from` or from the start, to the last step or until stopped.

        beside: runs meanwhile; an exception of it ends the run. Whatever ends the run, its last step is saved first,
        unless the learner itself failed.
        """
        try:
            await self._run(resume_from, *beside)
        except Exception as error:
            if isinstance(first_of(error), OSError):
                self.metrics.check_folder(self.step)
            await self._save_after(first_of(error))
            raise
        finally:
            self.updates.cancel()
            for other in beside:
                other.close()  # where it failed before they began

    async def _run(self, resume_from: Path | None, *beside: Coroutine[None, None, None]) -> None:
        await self.checkpoints.check_shared()
        step = 0
        if resume_from is not None:
            step, self.held_out.evaluations = await self.checkpoints.load(resume_from)
        await self.updates.begin(step)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(p.run(len(self.producers))) for p in self.producers]
            background += [tasks.create_task(other) for other in beside]
            await self._train(tasks)
            for task in background:
                task.cancel()

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        delivery = tasks.create_task(self.sync.deliver(await self.updates.first_policy(tasks), release=0))
        await delivery
        self.metrics.start()
        if self.schedule.evaluates(self.step) and not self.held_out.evaluated(self.step):
            self.metrics.write_late(self.step, await self._unless_stopped(self._evaluate()) or {})
        while not self.schedule.done(self.step) and not self.stop.is_set() and not self.held_out.ends():
            batch = await self._unless_stopped(self.batches.take(self.step))
            if batch is None:
                break
            learned = await self.updates.learn(batch, tasks)
            if learned is None:  # nobody scored it
                if (failing := self.updates.ends_with()) is not None:
                    await self._save()
                    raise failing
                continue
            metrics, push = learned
            await delivery  # of the policy before this one
            delivery = tasks.create_task(self.sync.deliver(push, release=len(batch.groups)))
            self.metrics.hold(metrics | self.metrics.times(metrics["rollout/tokens"]))
            if self.schedule.evaluates(self.step):
                await delivery  # what is evaluated must be with every generator
                self.metrics.add(await self._unless_stopped(self._evaluate()) or {})  # made up when it goes on
            metrics = self.metrics.flush(self.step)
            reason = self.guard.check(metrics)
            if reason or self.schedule.saves(self.step) or self.held_out.spared == self.step:
                await self._save()
            if reason:
                raise GuardStopped(f"step {self.step}: {reason}")
        await delivery
        if early := self.schedule.early_end(self.step) or self.held_out.ends():
            self.metrics.note(early)
        if kept := self.held_out.kept():
            self.metrics.note(kept)
        used_up = self.updates.passed_over and self.schedule.done(self.step)  # by batches without a reward
        if used_up and not self.held_out.evaluated(self.step):
            self.metrics.write_late(self.step, await self._unless_stopped(self._evaluate()) or {})
        if used_up or (self.checkpoints.saved != self.step and self.step > 0):
            await self._save()

    async def _evaluate(self) -> dict[str, float]:
        """The metrics of the held-out problems; none where nothing is held out."""
        scores = await self.held_out.score(self.step)
        if scores:
            self.metrics.completions(self.step, self.held_out.evaluations[-1].samples)
        return scores

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result, or None if the run was asked to stop first."""
        task, stopped = asyncio.ensure_future(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stopped.cancel()
            # Whatever ends the run, nothing of it may still write to a trace that is being closed.
            await asyncio.gather(task, stopped, return_exceptions=True)

    async def _save_after(self, error: BaseException) -> None:
        """A checkpoint before a run ends by an error that is neither the learner's nor another one's."""
        if isinstance(error, LearnerError) or self._saving:
            return
        patience = LOST_S if isinstance(error, ClusterLost) else self.checkpoints.deadline_s
        try:
            async with within(patience):
                await self.updates.settled()
                if self.updates.agrees and self.step > (self.checkpoints.saved or 0):
                    self.metrics.flush(self.step)
                    await self._save()
        except Exception as also:
            said = also.sentence() if isinstance(also, WriteFailed) else sentence_of(also)
            self.metrics.note(f"no checkpoint of step {self.step} could be written: {said}")

    async def _save(self) -> None:
        self._saving = True
        await self.checkpoints.save(self.step, self.held_out.evaluations, self.held_out.spared)
        self._saving = False
