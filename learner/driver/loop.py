"""The algorithm as prose: take -> learn -> publish -> (evaluate | checkpoint).

    producers --groups--> Buffer --take--> Trainer.step --adapter--> PolicySlot --> producers

There is one loop. Synchronous training is max_staleness 0: the slots of the consumed groups are released only when the
new policy is with every generator, so nothing is generated before that. With max_staleness k the Buffer
has room for k more batches, and generation goes on while this loop trains.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from cluster.actor import Actor, ClusterLost
from cluster.buffer import MAX_REFILLS, Batch
from learner.algo.advantage import has_signal
from learner.config import RunConfig
from learner.driver.batch_metrics import batch_metrics
from learner.driver.evaluate import Evaluation, evaluate
from learner.driver.failure import first_of, sentence_of
from learner.driver.mismatch_guard import MismatchGuard
from learner.driver.probe import Probe
from learner.driver.run_checkpoints import RunCheckpoints
from learner.driver.step_metrics import Sinks, StepMetrics
from learner.driver.watched_learner import LearnerError
from learner.trainer.service import TrainerService
from rollout import ledger
from rollout.producer import Pipes, Producer
from rollout.schema import Problem, group_position, rewards_of
from rollout.weight_sync import Answer, Push

log = logging.getLogger("learner")

T = TypeVar("T")

LOST_S = 8.0  # that a last checkpoint may take when Ray is about to end the processes


class GuardStopped(RuntimeError):
    """The guard ended the run, after a checkpoint."""


class Loop:
    """The learner's side of the run: consumes groups, produces policies.

    Waits for: groups (Buffer.take), the trainer, and the acknowledgement of each policy.
    Unblocks: producers, by releasing the slots of what was consumed.
    """

    def __init__(
        self,
        config: RunConfig,
        total_steps: int,
        trainer: Actor[TrainerService],
        producers: Sequence[Producer],
        pipes: Pipes,
        sinks: Sinks,
        heldout: Sequence[Problem],
        checkpoints: RunCheckpoints,
        alternating: bool = False,
    ) -> None:
        self.config, self.total_steps, self.trainer, self.alternating = config, total_steps, trainer, alternating
        self.producers, self.pipes, self.sinks, self.heldout = producers, pipes, sinks, heldout
        self.step_metrics, self.guard = StepMetrics(sinks, producers, pipes), MismatchGuard(config.guard)
        self.checkpoints = checkpoints
        self.stop = asyncio.Event()  # set by Ctrl-C or SIGTERM: finish the step, checkpoint, leave
        self.step = 0
        self._agrees = True  # the learner has learned from what is counted, and from nothing else
        self._unwritten: dict[str, float] | None = None  # metrics of the newest step
        self._learning: asyncio.Task[tuple[dict[str, float], Push]] | None = None
        self.evaluations: list[Evaluation] = []
        self._problems = config.num_problems(len(pipes.problems))
        longest = config.rollout.max_prompt_length + config.rollout.max_completion_length - 1
        self.probe = Probe(pipes.problems.at(0).prompt_ids, longest)
        self._answered_s = 0.0  # what the learner's answer to the newest probe took

    async def run(self, resume_from: Path | None, *beside: Coroutine[None, None, None]) -> None:
        """The whole run, from `resume_from` or from the start, to the last step or until stopped. An exception of what
        runs `beside` it ends it. Whatever does, but for the learner's own failure: no step is lost by it."""
        try:
            await self._run(resume_from, *beside)
        except Exception as error:
            await self._save_after(first_of(error))
            raise
        finally:
            if self._learning is not None:
                self._learning.cancel()

    async def _run(self, resume_from: Path | None, *beside: Coroutine[None, None, None]) -> None:
        await self.checkpoints.check_shared()
        if resume_from is not None:
            self.step, self.evaluations = await self.checkpoints.load(resume_from)
        ledger.forget_after(self.sinks.folder / "rollouts", self.step)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(p.run(len(self.producers))) for p in self.producers]
            background += [tasks.create_task(other) for other in beside]
            await self._train(tasks)
            for task in background:
                task.cancel()

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        first, _ = await self._policy(tasks)
        await self._give_the_card_back()  # the generators were put to sleep as they started
        delivery = tasks.create_task(self._deliver(first, release=0))
        await delivery
        self.step_metrics.start()
        if self.step == 0:
            await self._evaluate()
        while not self._done and not self.stop.is_set():
            batch = await self._unless_stopped(self._take())
            if batch is None:
                break
            self._learning = asyncio.create_task(self._learn(batch, tasks))
            metrics, push = await asyncio.shield(self._learning)  # what the learner has begun it ends
            await delivery  # of the policy before this one
            delivery = tasks.create_task(self._deliver(push, release=len(batch.groups)))
            metrics |= self.step_metrics.times(metrics["rollout/tokens"])
            self._unwritten = metrics
            if self._due(self.config.data.eval.every) or self._done:
                await delivery  # what is evaluated must be with every generator
                metrics |= await self._evaluate()
            self._write(metrics)
            reason = self.guard.check(metrics)
            if reason or self._due(self.config.checkpoint.every) or self._done:
                await self._save()
            if reason:
                raise GuardStopped(f"step {self.step}: {reason}")
        await delivery
        if self._done and self.step < self.total_steps:
            self.sinks.progress.note(
                f"epochs: {self.pipes.cursor.consumed} problems were consumed by step {self.step}, since dynamic "
                "sampling replaced groups: the run ends here"
            )
        if self.checkpoints.saved != self.step and self.step > 0:
            await self._save()

    def _write(self, metrics: dict[str, float] | None) -> None:
        """The metrics of the newest step, unless they are written."""
        if metrics is not None:
            if "time/step" not in metrics:
                metrics |= self.step_metrics.times(metrics["rollout/tokens"])
            self.step_metrics.write(self.step, metrics)
        self._unwritten = None

    @property
    def _done(self) -> bool:
        """No step is left: groups that dynamic sampling replaced have used up problems of the epochs, too."""
        return self.step >= self.total_steps or self.pipes.cursor.consumed >= self._problems

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

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

    async def _take(self) -> Batch:
        """One batch, in the order of the problem stream (so that a resumed run sums in the same order)."""
        deadlines, buffer = self.config.cluster.deadlines, self.pipes.buffer
        rounds = 1 + MAX_REFILLS * self.config.rollout.dynamic_sampling
        patience = deadlines.start + rounds * deadlines.group
        try:
            async with asyncio.timeout(patience):
                with self.sinks.timeline.span("wait", "loop", step=self.step + 1):
                    batch = await buffer.take(self.config.learner.groups_per_step, self._oldest, self._useful)
        except TimeoutError:
            raise TimeoutError(
                f"step {self.step + 1}: waited {patience:g} s for "
                f"{self.config.learner.groups_per_step} groups; {len(buffer)} lie in the buffer, {buffer.in_use} of "
                f"{buffer.slots} slots are in use. Raise cluster.deadlines.group if completions are long"
            ) from None
        return Batch(sorted(batch.groups, key=group_position), batch.useless)

    @property
    def _oldest(self) -> int:
        """Tokens of a policy version below it are too old to train on."""
        return self.step - self.pipes.buffer.staleness

    def _useful(self, group: pa.Table) -> bool:
        """With dynamic sampling (DAPO, 2503.14476, section 3.2) groups that teach nothing are replaced by others."""
        return not self.config.rollout.dynamic_sampling or has_signal(rewards_of(group))

    async def _learn(self, batch: Batch, tasks: asyncio.TaskGroup) -> tuple[dict[str, float], Push]:
        """One update, and the policy that comes of it. The metrics are of all that was generated for it; so is what is
        written to the ledger meanwhile, and at rest before this returns, hence before any checkpoint counts it."""
        generated = [*batch.groups, *batch.useless]
        rollouts = self.sinks.folder / "rollouts"
        at_rest = asyncio.create_task(asyncio.to_thread(ledger.write, rollouts, self.step + 1, generated))
        try:
            metrics = batch_metrics(generated, self.step, self._oldest)
            metrics["rollout/refilled_groups"] = float(len(batch.useless))
            async with self._the_card():
                self._agrees = False
                metrics |= await self._update(batch.groups)
                await at_rest
                for group in generated:
                    self.pipes.cursor.finish(group_position(group)[0])
                self.step += 1
                self._agrees, self._unwritten = True, metrics
                with self.sinks.timeline.span("policy", "learner", version=self.step):
                    push, spent = await self._policy(tasks)
        finally:
            await at_rest
        return metrics | spent, push

    async def _update(self, groups: list[pa.Table]) -> dict[str, float]:
        with self.sinks.timeline.span("train", "learner", step=self.step + 1):
            deadline = self.config.cluster.deadlines.step
            metrics = await self.trainer.call(TrainerService.step, deadline, groups, self._oldest)
        self.probe.trained_on(groups, settled=all(producer.feed.evidence.settled for producer in self.producers))
        return metrics

    @asynccontextmanager
    async def _the_card(self) -> AsyncIterator[None]:
        """memory.layout: alternating. Within, the learner has the card to itself and the generators sleep."""
        if self.alternating:
            await asyncio.gather(*(producer.sleep() for producer in self.producers))
        yield
        await self._give_the_card_back()

    async def _give_the_card_back(self) -> None:
        if self.alternating:
            await self.trainer.call(TrainerService.release_cache, self.config.cluster.deadlines.push)
            await asyncio.gather(*(producer.wake() for producer in self.producers))

    async def _policy(self, tasks: asyncio.TaskGroup) -> tuple[Push, dict[str, float]]:
        """The learner's policy as it is now. What it says of the probe tokens is worked out while that travels."""
        update, exported_s = await self.trainer.call(TrainerService.policy, self.config.cluster.deadlines.push)
        spent = {"time/push_export": exported_s, "time/push_learner_probe": self._answered_s}
        ids = self.probe.ids
        expecting = self._expect(update.version, ids)
        try:
            expected = tasks.create_task(expecting)
        except RuntimeError:  # the run is at its end, by another's error
            expecting.close()
            raise
        return Push(update, ids, expected, self.config.kv_dtype), spent

    async def _expect(self, version: int, ids: tuple[int, ...]) -> Answer:
        deadline = self.config.cluster.deadlines.push
        with self.sinks.timeline.span("probe", "learner", concurrent=True, version=version):
            answer = await self.trainer.call(TrainerService.probe, deadline, list(ids))
        self._answered_s = answer.seconds
        return answer

    async def _deliver(self, push: Push, release: int) -> None:
        """Up to every generator; only then may the groups it learned from make room for new ones."""
        version = push.adapter.version
        await self.pipes.policy_slot.publish(version, push)
        deadlines = self.config.cluster.deadlines
        patience = deadlines.push + deadlines.start  # a generator may be restarting
        await self.pipes.policy_slot.acknowledged(version, [p.name for p in self.producers], patience)
        push.shared.forget()  # in the object store; a generator that is restarted later gets a new copy
        self.pipes.buffer.release(release)

    async def _evaluate(self) -> dict[str, float]:
        """Held-out score of the current policy, through the same workers."""
        if not self.heldout or self.config.data.eval.every == 0:
            return {}
        with self.sinks.timeline.span("evaluate", "loop", step=self.step):
            result = await evaluate(self.producers, self.heldout, self.config, self.step)
        self.evaluations.append(result)
        if self.step == 0:
            self.step_metrics.write(0, result.metrics)
        return result.metrics

    async def _save_after(self, error: BaseException) -> None:
        """A checkpoint before a run ends by an error that is not the learner's."""
        if isinstance(error, LearnerError):
            return
        patience = LOST_S if isinstance(error, ClusterLost) else self.config.cluster.deadlines.step
        try:
            async with asyncio.timeout(patience):
                if self._learning is not None:
                    await asyncio.wait({self._learning})
                if self._agrees and self.step > (self.checkpoints.saved or 0):
                    self._write(self._unwritten)
                    await self._save()
        except Exception as also:
            self.sinks.progress.note(f"no checkpoint of step {self.step} could be written: {sentence_of(also)}")

    async def _save(self) -> None:
        await self.checkpoints.save(self.step, self.evaluations)
