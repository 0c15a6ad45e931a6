"""One update for each batch: its rollouts go to disk, the trainer takes a step, and the new policy is fetched."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pyarrow as pa

from cluster.actor import Actor
from cluster.buffer import Batch
from learner.driver.batch_metrics import RewardsFailing, batch_metrics, failing, unscored
from learner.driver.card_turns import CardTurns
from learner.driver.reward_models import RewardModels
from learner.driver.step_metrics import StepMetrics
from learner.driver.step_record import StepRecord
from learner.driver.task_group import start_in
from learner.driver.weight_sync import WeightSync
from learner.trainer.service import TrainerService
from rollout.producer import Pipes
from rollout.schema import group_position
from rollout.weight_sync import Push

MOST_UNSCORED = 10
"""Batches in a row that are passed over. Of data of which a third cannot be scored, a batch of one group is without a
reward each third time, and ten in a row are once in 60,000; where nothing is ever scored, ten batches say so."""


class Updates:
    """Waits for: the learner.

    step: updates so far, which is the version of the learner's policy. agrees: whether the learner's state goes with
    the problems that are counted as consumed; false while an update is under way.
    """

    def __init__(
        self,
        trainer: Actor[TrainerService],
        deadline_s: float,
        pipes: Pipes,
        sync: WeightSync,
        turns: CardTurns,
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
        self._passed: list[pa.Table] = []  # groups of batches without a reward, since the last update
        self._in_a_row, self._warned = 0, False
        self._failing: RewardsFailing | None = None

    async def begin(self, step: int) -> None:
        """The run goes on from that step; what later ones left is deleted, since those will be taken again."""
        self.step = step
        await self._record.begin(step)

    async def first_policy(self, tasks: asyncio.TaskGroup) -> Push:
        """The policy to begin with; the generators were put to sleep as they started."""
        push, _ = await self._sync.fetch(tasks)
        self._record.policy(push.policy_id)
        await self._turns.generators()
        return push

    async def learn(self, batch: Batch, tasks: asyncio.TaskGroup) -> tuple[dict[str, float], Push] | None:
        """The metrics of the update, and its policy; None where the batch was passed over, since none of its
        completions has a reward, or reward functions failed on most (`ends_with`). An update that has begun is finished
        even if the caller is cancelled.
        """
        self._under_way = asyncio.create_task(self._learn(batch, tasks))
        return await asyncio.shield(self._under_way)

    async def settled(self) -> None:
        """Waits until no update is under way."""
        if self._under_way is not None:
            await asyncio.wait({self._under_way})

    def cancel(self) -> None:
        """Gives up the one that is under way."""
        if self._under_way is not None:
            self._under_way.cancel()

    @property
    def passed_over(self) -> bool:
        """Whether batches were, since the last update."""
        return bool(self._passed)

    def ends_with(self) -> RewardsFailing | None:
        """What ends the run: reward functions failed on most completions of a batch, or MOST_UNSCORED batches in a row
        were passed over. Their problems count as consumed, so that a checkpoint which is written now lets the run go on
        behind them: the same batch would end it again."""
        if self._failing is not None:
            return self._failing
        if self._in_a_row < MOST_UNSCORED:
            return None
        completions = sum(map(len, self._passed))
        return RewardsFailing(
            f"rewards: must score some completions: of {MOST_UNSCORED} batches in a row, {completions} completions, "
            "no reward function, reward model or environment scored any; the same command goes on behind these "
            "problems (to see them: gleaner rollouts show RUN). If the function is at fault, correct it and give "
            "resume_allow_changed=[rewards], or another name="
        )

    async def _learn(self, batch: Batch, tasks: asyncio.TaskGroup) -> tuple[dict[str, float], Push] | None:
        """Reward models are asked first: what they say belongs to the facts."""
        async with self._turns.learner():
            groups, spent = await self._reward_models.score(batch.groups, self.step + 1)
            learned = await self._train(groups, batch.useless, tasks)
        if learned is None:
            self._pipes.buffer.pass_over(len(groups))  # not before generators are awake: they go on with it at once
            return None
        return learned[0] | spent, learned[1]

    async def _train(
        self, groups: Sequence[pa.Table], useless: Sequence[pa.Table], tasks: asyncio.TaskGroup
    ) -> tuple[dict[str, float], Push] | None:
        """Metrics and ledger cover all that was generated for the step. The ledger is written meanwhile, and has
        its file before this returns, hence before any checkpoint counts these problems."""
        generated = [*groups, *useless]
        of_step = [*generated, *self._passed]
        at_rest = asyncio.create_task(asyncio.to_thread(self._record.rollouts, self.step + 1, of_step))
        try:
            self._failing = failing(generated)
            if self._failing is not None or unscored(groups):
                await at_rest
                self._pass_over(groups, of_step)
                return None
            metrics = batch_metrics(of_step, self.step)
            metrics["rollout/refilled_groups"] = float(len(useless))
            metrics["rollout/unscored_groups"] = float(len(self._passed))
            self.agrees = False
            metrics |= await self._update(groups)
            await at_rest
            self._finish(generated)
            self.step += 1
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
        """Counts a batch that is not learned from. of_step: all that was generated since the last
        update, which is kept for the ledger of the next."""
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
