"""The driver's training loop: takes a batch of groups, has the learner train on it, delivers the new policy to every
generator, and evaluates and saves when that is due.

    producers --groups--> Buffer --take--> Trainer.step --policy--> PolicySlot --> producers

The same loop trains synchronously and asynchronously. With max_staleness 0 the slots of a trained batch are released
only when every generator holds the new policy, so nothing is generated before that. With max_staleness k the Buffer has
room for k more batches, and generation continues while the learner trains.

Loop is the order of events; Training, Batches, Schedule, WeightSync and Probe, below it, are its parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cluster.actor import Actor, ClusterLost, within
from cluster.buffer import MAX_REFILLS, Batch, Buffer
from cluster.files import WriteFailed
from cluster.telemetry import Timeline
from learner.algo.advantage import has_signal
from learner.config import RunConfig
from learner.driver.arrangement import Turns
from learner.driver.evaluate import HeldOut, RewardModels
from learner.driver.failure import LearnerError, RunEnded, first_of, sentence_of
from learner.driver.metrics import MismatchGuard, batch_metrics, failing, unscored
from learner.driver.record import RunCheckpoints, StepMetrics, StepRecord
from learner.trainer.service import TrainerService
from rollout.delivery import Answer, Push
from rollout.producer import Cursor, Pipes, Producer
from rollout.schema import group_position, ragged, rewards_of

T = TypeVar("T")

LOST_S = 8.0  # seconds that the last checkpoint may take when Ray is about to end the processes


class Loop:
    """Trains from the first step to the last. learner.driver.launch.wire makes its parts and connects them.

    stop: event that Ctrl-C or SIGTERM sets; the loop then finishes its step, saves a checkpoint and returns.
    """

    def __init__(
        self,
        schedule: Schedule,
        producers: Sequence[Producer],
        batches: Batches,
        training: Training,
        sync: WeightSync,
        held_out: HeldOut,
        checkpoints: RunCheckpoints,
        metrics: StepMetrics,
        guard: MismatchGuard,
    ) -> None:
        self.schedule, self.producers, self.batches = schedule, producers, batches
        self.training, self.sync, self.held_out = training, sync, held_out
        self.checkpoints, self.metrics, self.guard = checkpoints, metrics, guard
        self.stop = asyncio.Event()
        self._saving = False

    @property
    def step(self) -> int:
        """Number of steps taken, which is the version of the learner's policy."""
        return self.training.step

    async def run(self, resume_from: Path | None, *beside: Coroutine[None, None, None]) -> None:
        """Trains from the checkpoint `resume_from`, or from the start, to the last step or until `stop` is set.

        beside: coroutines that run meanwhile; an exception of one of them ends the run. Whatever error ends the
        run, a checkpoint of its last step is saved first, unless there is one, the learner itself or a save failed, or
        the weights and the consumed problems are not of the same step.
        """
        try:
            await self._run(resume_from, *beside)
        except Exception as error:
            if isinstance(first_of(error), OSError):
                self.metrics.check_folder(self.step)
            await self._save_after(first_of(error))
            raise
        finally:
            self.training.cancel()
            for other in beside:
                other.close()  # a coroutine that was never awaited, since the run failed early, would cause a warning

    async def _run(self, resume_from: Path | None, *beside: Coroutine[None, None, None]) -> None:
        await self.checkpoints.check_shared()
        step = 0
        if resume_from is not None:
            step, self.held_out.evaluations = await self.checkpoints.load(resume_from)
        await self.training.begin(step)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(p.run(len(self.producers))) for p in self.producers]
            background += [tasks.create_task(other) for other in beside]
            await self._train(tasks)
            for task in background:
                task.cancel()

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        delivery = tasks.create_task(self.sync.deliver(await self.training.first_policy(tasks), release=0))
        await delivery
        self.metrics.start()
        if self.schedule.evaluates(self.step) and not self.held_out.evaluated(self.step):
            self.metrics.write_late(self.step, await self._unless_stopped(self._evaluate()) or {})
        while not self.schedule.done(self.step) and not self.stop.is_set() and not self.held_out.ends():
            batch = await self._unless_stopped(self.batches.take(self.step))
            if batch is None:
                break
            learned = await self.training.learn(batch, tasks)
            if learned is None:  # the batch was passed over: it has no reward, or reward functions failed on most of it
                if (failing := self.training.ends_with()) is not None:
                    await self._save()
                    raise failing
                continue
            metrics, push = learned
            await delivery  # the policy before this one must be with every generator before this one is published
            delivery = tasks.create_task(self.sync.deliver(push, release=len(batch.groups)))
            self.metrics.hold(metrics | self.metrics.times(metrics["rollout/tokens"]))
            if self.schedule.evaluates(self.step):
                await delivery  # every generator must hold the policy that is evaluated
                # If the run is stopped here, the resumed run evaluates this policy before its first step.
                self.metrics.add(await self._unless_stopped(self._evaluate()) or {})
            metrics = self.metrics.flush(self.step)
            reason = self.guard.check(metrics)
            if reason or self.schedule.saves(self.step) or self.held_out.spared == self.step:
                await self._save()
            if reason:
                raise RunEnded(f"step {self.step}: {reason}")
        await delivery
        if early := self.schedule.early_end(self.step) or self.held_out.ends():
            self.metrics.note(early)
        if kept := self.held_out.kept():
            self.metrics.note(kept)
        # Batches that were passed over since the last step may use up the problems: that step then was the last.
        used_up = self.training.passed_over and self.schedule.done(self.step)
        if used_up and not self.held_out.evaluated(self.step):
            self.metrics.write_late(self.step, await self._unless_stopped(self._evaluate()) or {})
        if used_up or (self.checkpoints.saved != self.step and self.step > 0):
            await self._save()

    async def _evaluate(self) -> dict[str, float]:
        """The metrics of the held-out problems; empty where no problems are held out."""
        scores = await self.held_out.score(self.step)
        if scores:
            self.metrics.completions(self.step, self.held_out.evaluations[-1].samples)
        return scores

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None if the run was asked to stop first."""
        task, stopped = asyncio.ensure_future(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stopped.cancel()
            # When the run ends, neither task may still write to the timeline, which is then closed.
            await asyncio.gather(task, stopped, return_exceptions=True)

    async def _save_after(self, error: BaseException) -> None:
        """Saves a checkpoint before `error` ends the run, unless the learner failed or the error came from a save."""
        if isinstance(error, LearnerError) or self._saving:
            return
        patience = LOST_S if isinstance(error, ClusterLost) else self.checkpoints.deadline_s
        try:
            async with within(patience):
                await self.training.settled()
                if self.training.agrees and self.step > (self.checkpoints.saved or 0):
                    self.metrics.flush(self.step)
                    await self._save()
        except Exception as also:
            said = also.sentence() if isinstance(also, WriteFailed) else sentence_of(also)
            self.metrics.note(f"no checkpoint of step {self.step} could be written: {said}")

    async def _save(self) -> None:
        self._saving = True
        await self.checkpoints.save(self.step, self.held_out.evaluations, self.held_out.spared)
        self._saving = False


# Training: what happens to one batch. Its rollouts go to disk, the learner takes a step, and the new policy is fetched.

MOST_UNSCORED = 10
"""Number of batches in a row without any reward that ends the run. Where a third of the data cannot be scored and a
batch is one group, chance makes ten such batches in a row once in 60,000."""


class Training:
    """Has the learner take one step for each batch. Waits for the learner, for the thread that writes the ledger, and
    with memory.layout: alternating for the generators to sleep and to wake.

    step: number of steps so far, which is the version of the learner's policy. agrees: whether the learner's weights
    and the problems that count as consumed are of one and the same step; false while a step is under way.
    """

    def __init__(
        self,
        trainer: Actor[TrainerService],
        deadline_s: float,
        pipes: Pipes,
        sync: WeightSync,
        turns: Turns,
        metrics: StepMetrics,
        record: StepRecord,
        reward_models: RewardModels,
    ) -> None:
        self.step, self.agrees = 0, True
        self._step: Callable[[list[pa.Table]], Awaitable[dict[str, float]]] = lambda groups: trainer.call(
            TrainerService.step, deadline_s, groups
        )
        self._pipes, self._reward_models = pipes, reward_models
        self._sync, self._turns, self._metrics, self._record = sync, turns, metrics, record
        self._under_way: asyncio.Task[tuple[dict[str, float], Push] | None] | None = None
        self._passed: list[pa.Table] = []  # groups of the batches that were passed over since the last step
        self._in_a_row, self._warned = 0, False
        self._failing: RunEnded | None = None

    async def begin(self, step: int) -> None:
        """Continues from this step. The records of later steps are deleted, since those steps will be taken again."""
        self.step = step
        await self._record.begin(step)

    async def first_policy(self, tasks: asyncio.TaskGroup) -> Push:
        """The policy that the run begins with. Wakes the generators, if they were put to sleep as they started."""
        push, _ = await self._sync.fetch(tasks)
        self._record.policy(push.policy_id)
        await self._turns.generators()
        return push

    async def learn(self, batch: Batch, tasks: asyncio.TaskGroup) -> tuple[dict[str, float], Push] | None:
        """Has the learner take a step on a batch, and returns the step's metrics and the new policy. Returns None where
        the batch was passed over, since none of its completions has a reward, or reward functions failed on most of
        them; `ends_with` says whether that ends the run. A step that has begun is finished even if the caller is
        cancelled.
        """
        self._under_way = asyncio.create_task(self._learn(batch, tasks))
        return await asyncio.shield(self._under_way)

    async def settled(self) -> None:
        """Waits until no step is under way."""
        if self._under_way is not None:
            await asyncio.wait({self._under_way})

    def cancel(self) -> None:
        """Cancels the step that is under way."""
        if self._under_way is not None:
            self._under_way.cancel()

    @property
    def passed_over(self) -> bool:
        """Whether batches were passed over since the last step."""
        return bool(self._passed)

    def ends_with(self) -> RunEnded | None:
        """The error that ends the run, else None: reward functions failed on most completions of a batch, or
        MOST_UNSCORED batches in a row were passed over. The problems of these batches count as consumed, so that a run
        that is resumed from a checkpoint written now does not meet, and fail on, the same batch again."""
        if self._failing is not None:
            return self._failing
        if self._in_a_row < MOST_UNSCORED:
            return None
        completions = sum(map(len, self._passed))
        return RunEnded(
            f"rewards: must score some completions: of {MOST_UNSCORED} batches in a row, {completions} completions, "
            "no reward function, reward model or environment scored any; the same command goes on behind these "
            "problems (to see them: gleaner rollouts show RUN). If the function is at fault, correct it and give "
            "resume_allow_changed=[rewards], or another name="
        )

    async def _learn(self, batch: Batch, tasks: asyncio.TaskGroup) -> tuple[dict[str, float], Push] | None:
        """Has reward models score the batch before the step: their scores are recorded with the rollouts."""
        async with self._turns.learner():
            groups, spent = await self._reward_models.score(batch.groups, self.step + 1)
            learned = await self._train(groups, batch.useless, tasks)
        if learned is None:
            # Only here, where the generators are awake again: producers begin new groups as soon as slots are free.
            self._pipes.buffer.pass_over(len(groups))
            return None
        return learned[0] | spent, learned[1]

    async def _train(
        self, groups: Sequence[pa.Table], useless: Sequence[pa.Table], tasks: asyncio.TaskGroup
    ) -> tuple[dict[str, float], Push] | None:
        """The step on `groups`; None as in `learn`. Metrics and ledger cover all groups that were generated for the
        step: useless ones, and those of batches that were passed over, too. The ledger's file is written by a thread
        during the step and is complete when this returns, so before a checkpoint counts these problems."""
        generated = [*groups, *useless]
        of_step = [*generated, *self._passed]
        at_rest = asyncio.create_task(asyncio.to_thread(self._record.rollouts, self.step + 1, of_step))
        try:
            self._failing = failing(generated)
            if self._failing is not None or unscored(groups):
                await at_rest
                self._pass_over(groups, of_step)
                return None
            metrics = batch_metrics(of_step, self.step) | self._metrics.watch.batch(of_step)
            metrics["rollout/refilled_groups"] = float(len(useless))
            metrics["rollout/unscored_groups"] = float(len(self._passed))
            self.agrees = False
            metrics |= await self._update(groups)
            await at_rest
            self._finish(generated)
            self.step += 1
            if self._pipes.curriculum is not None:
                self._pipes.curriculum.learned(self.step, of_step)
            self.agrees, self._passed, self._in_a_row = True, [], 0
            self._metrics.hold(metrics)
            with self._pipes.timeline.span("policy", "learner", version=self.step):
                (push, spent), mismatch = await asyncio.gather(self._sync.fetch(tasks), self._record.mismatch())
            self._record.policy(push.policy_id)
            start_in(tasks, asyncio.to_thread(self._record.keep_mismatch, self.step, groups, mismatch))
        finally:
            await at_rest
        return metrics | spent, push

    def _finish(self, groups: Sequence[pa.Table]) -> None:
        for group in groups:
            self._pipes.cursor.finish(group_position(group)[0])

    def _pass_over(self, groups: Sequence[pa.Table], of_step: list[pa.Table]) -> None:
        """Counts a batch that the learner does not train on. of_step: all groups that were generated since the last
        step; they are kept for the ledger of the next."""
        self._finish(of_step[: len(of_step) - len(self._passed)])
        self._passed = of_step
        self._in_a_row += 1
        if not self._warned and self._failing is None:
            self._warned = True
            self._metrics.note(
                f"step {self.step + 1}: none of the {sum(map(len, groups))} completions of a batch has a reward (each "
                "function gave None), so it is passed over and another is taken; rollout/unscored_groups counts the "
                f"groups, and {MOST_UNSCORED} such batches in a row end the run"
            )

    async def _update(self, groups: Sequence[pa.Table]) -> dict[str, float]:
        await self._sync.answered()
        with self._pipes.timeline.span("train", "learner", step=self.step + 1):
            metrics = await self._step(list(groups))
        self._sync.trained_on(groups)
        return metrics


# Batches: the groups of one step, out of the Buffer.


class Batches:
    """Takes the groups of each step out of the Buffer. It waits for them at most as long as a generator may take to
    start and a group may take behind others; with dynamic sampling nine times the latter, for groups that are
    replaced."""

    def __init__(self, config: RunConfig, buffer: Buffer, timeline: Timeline) -> None:
        self._config, self._buffer, self._timeline = config, buffer, timeline
        self._size = config.learner.groups_per_step

    async def take(self, step: int) -> Batch:
        """The batch of the step after `step`. Its groups are in the order of the problem stream, so that a resumed run
        adds gradients in the same order. Raises TimeoutError, which names what is missing."""
        config, buffer = self._config, self._buffer
        batches = 1 + MAX_REFILLS * config.rollout.dynamic_sampling
        patience = config.cluster.deadlines.start + batches * config.group_deadline_s
        try:
            async with within(patience):
                with self._timeline.span("wait", "loop", step=step + 1):
                    batch = await buffer.take(self._size, step - config.max_staleness, self._useful)
        except TimeoutError:
            raise TimeoutError(
                f"step {step + 1}: waited {patience:g} s for {self._size} groups; {len(buffer)} lie in the buffer, "
                f"{buffer.in_use} of {buffer.slots} slots are in use. Raise cluster.patience if completions are "
                "long"
            ) from None
        return Batch(sorted(batch.groups, key=group_position), batch.useless)

    def _useful(self, group: pa.Table) -> bool:
        """Whether the group goes into the batch. Dynamic sampling (DAPO, 2503.14476, section 3.2) replaces groups whose
        rewards are all equal."""
        return not self._config.rollout.dynamic_sampling or has_signal(rewards_of(group))


# Schedule: after which steps a run evaluates, saves and ends.


class Schedule:
    """Says after which steps a run evaluates, saves and ends, by the number of steps and of problems consumed.

    total_steps: number of steps after which the run is done at the latest. problems: number of problems in all epochs,
    after which it is done as well; inf without `epochs`.
    """

    def __init__(self, config: RunConfig, total_steps: int, cursor: Cursor, problems: float) -> None:
        self.total_steps = total_steps
        self._config, self._cursor, self._problems = config, cursor, problems

    def done(self, step: int) -> bool:
        """Whether the run is done: all steps are taken, or all problems of its epochs consumed. Groups that dynamic
        sampling replaced or that have no reward consume problems, too."""
        return step >= self.total_steps or self._cursor.consumed >= self._problems

    def evaluates(self, step: int) -> bool:
        """Whether the policy after this step is evaluated: every data.eval.every steps, and after the last."""
        return _due(step, self._config.data.eval.every) or self.done(step)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint of this step is saved: every checkpoint.every steps, and after the last."""
        return _due(step, self._config.checkpoint.every) or self.done(step)

    def early_end(self, step: int) -> str | None:
        """A sentence for the user if all problems were consumed before all steps were taken, else None."""
        if not self.done(step) or step >= self.total_steps:
            return None
        return (
            f"epochs: {self._cursor.consumed} problems were consumed by step {step}, since groups were replaced by "
            "dynamic sampling or had no reward: the run ends here"
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# A task in a TaskGroup that may be ending already, because another of its tasks failed.


def start_in(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """tasks.create_task(work). If the group is ending and takes no more tasks, `work` is closed and RuntimeError
    raised: Python before 3.13 leaves the coroutine open, and later warns that it was never awaited."""
    try:
        return tasks.create_task(work)
    except RuntimeError:
        work.close()
        raise


# Weight sync, the driver's part: each policy goes from the learner to every generator, with probe tokens as proof.


class WeightSync:
    """Fetches each policy from the learner, and delivers it to every generator.

    It waits for the learner's policy and for every generator's acknowledgement of it. It then lets producers go on, by
    releasing the slots of the groups that the policy was trained on.

    stays: whether whole weights stay in the learner's memory, where generators read them (rollout.weights).
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Actor[TrainerService],
        producers: Sequence[Producer],
        pipes: Pipes,
        *,
        stays: bool,
        without_base_s: float,
    ) -> None:
        self._trainer, self._producers, self._pipes = trainer, producers, pipes
        self._dtype, self._stays = config.kv_dtype, stays
        longest = config.rollout.max_prompt_length + config.rollout.max_completion_length - 1
        self.probe = Probe(pipes.problems.at(0).prompt_ids, longest)
        deadlines = config.cluster.deadlines
        self._push_s = deadlines.push
        self._probe_s = deadlines.push + without_base_s
        under_way_s = config.group_deadline_s if config.max_staleness > 0 else 0.0
        self._patience_s = deadlines.push + deadlines.start + under_way_s  # all generators may be restarting
        self._expected: asyncio.Future[Answer] | None = None  # the learner's answer to the newest probe

    async def fetch(self, tasks: asyncio.TaskGroup) -> tuple[Push, dict[str, float]]:
        """The learner's present policy, and as metrics the seconds that the learner took to export it and to answer the
        probe before. The learner computes the logprobs of the new probe while the policy is on its way."""
        policy, exported = await self._trainer.call(TrainerService.outgoing, self._push_s, self._stays)
        answered_s = self._expected.result().seconds if self._expected is not None else 0.0  # of the previous probe
        spent = {"time/push_export": exported.seconds, "time/push_learner_probe": answered_s}
        ids = self.probe.ids
        self._expected = start_in(tasks, self._expect(exported.policy_id.version, ids))
        return Push(policy, exported.policy_id, ids, self._expected, self._dtype), spent

    async def answered(self) -> None:
        """Waits until the learner has answered the newest probe. To be called before each step: an actor may take two
        calls that are a few milliseconds apart in either order, and would answer the probe with the next policy."""
        if self._expected is not None:
            await asyncio.wait({self._expected})

    async def _expect(self, version: int, ids: tuple[int, ...]) -> Answer:
        with self._pipes.timeline.span("probe", "learner", concurrent=True, version=version):
            return await self._trainer.call(TrainerService.probe, self._probe_s, list(ids))

    def trained_on(self, groups: Sequence[pa.Table]) -> None:
        """To be called after each step with the groups that it trained on, from which new probe tokens may be taken."""
        self.probe.trained_on(groups, settled=all(producer.feed.evidence.settled for producer in self._producers))

    async def deliver(self, push: Push, release: int) -> None:
        """Delivers the policy to every generator, then frees the slots of the `release` groups that it was trained on.
        The policy before it must have been delivered already: the policy after it may overwrite that one in the
        learner's memory (rollout.weights)."""
        version = push.policy_id.version
        await self._pipes.policy_slot.publish(version, push)
        names = [producer.name for producer in self._producers]
        await self._pipes.policy_slot.acknowledged(version, names, self._patience_s)
        self._pipes.buffer.release(release)


# The probe: tokens whose logprobs the learner and the generators compute, to prove that they hold the same policy.

TOKENS = 64
LIFE = 16  # policy versions for which tokens are kept at least: rollout.delivery compares answers to the same tokens


class Probe:
    """Chooses the probe tokens: of a prompt at first, then of a batch that was trained on, where the policy moves most.

    The same tokens are kept for several policy versions. The policy continues to move on them after the step of their
    own batch: with Adam's beta_1 = 0.9, two thirds of what a batch changes come in the ten steps after it.

    prompt: token ids of the first probe. longest: number of tokens that a probe may have. ids: the present probe.
    """

    def __init__(self, prompt: Sequence[int], longest: int) -> None:
        self._length = min(TOKENS, longest)
        self.ids = self._filled(prompt)
        self._age: int | None = None  # policy versions since `ids` were taken from a batch; None: they are the prompt's

    def trained_on(self, groups: Sequence[pa.Table], settled: bool) -> None:
        """To be called after each step, with the groups that it trained on. settled: whether the present tokens have
        shown that no generator is frozen (rollout.delivery.Evidence)."""
        signals = [group for group in groups if _teaches(rewards_of(group))]
        if self._age is not None:
            self._age += 1
        if signals and (self._age is None or (settled and self._age >= LIFE)):
            self._age, self.ids = 0, self._of(signals[0])

    def _of(self, group: pa.Table) -> tuple[int, ...]:
        """The ids at the prompt's end, and at the start of the completion whose reward is farthest from the mean."""
        rewards = rewards_of(group)
        chosen = int(np.nanargmax(np.abs(rewards - np.nanmean(rewards))))
        completion = ragged(group, "completion_ids")[chosen][: self._length * 3 // 4]
        return self._filled([*ragged(group, "prompt_ids")[chosen].tolist(), *completion.tolist()][-self._length :])

    def _filled(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens, repeated up to the probe's length, since a mean over a few tokens says little."""
        return tuple((list(tokens) * (self._length // len(tokens) + 1))[: self._length])


def _teaches(rewards: npt.NDArray[np.float64]) -> bool:
    """Whether the policy moves on a group: its rewards differ, or it is a single completion, which PPO trains on."""
    return has_signal(rewards) or (len(rewards) == 1 and bool(np.isfinite(rewards[0])))
