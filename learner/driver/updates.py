"""One update for each batch: its rollouts go to disk, the trainer takes a step, and the new policy is fetched."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pyarrow as pa

from cluster.actor import Actor
from cluster.buffer import Batch
from learner.driver.batch_metrics import batch_metrics
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
        self._under_way: asyncio.Task[tuple[dict[str, float], Push]] | None = None

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

    async def learn(self, batch: Batch, tasks: asyncio.TaskGroup) -> tuple[dict[str, float], Push]:
        """The metrics of the update, and its policy. An update that has begun is finished even if the caller is
        cancelled."""
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

    async def _learn(self, batch: Batch, tasks: asyncio.TaskGroup) -> tuple[dict[str, float], Push]:
        """Reward models are asked first: what they say belongs to the facts."""
        async with self._turns.learner():
            groups, spent = await self._reward_models.score(batch.groups, self.step + 1)
            metrics, push = await self._train(groups, batch.useless, tasks)
        return metrics | spent, push

    async def _train(
        self, groups: Sequence[pa.Table], useless: Sequence[pa.Table], tasks: asyncio.TaskGroup
    ) -> tuple[dict[str, float], Push]:
        """Metrics and ledger cover all that was generated for the batch. The ledger is written meanwhile, and has
        its file before this returns, hence before any checkpoint counts these problems."""
        generated = [*groups, *useless]
        at_rest = asyncio.create_task(asyncio.to_thread(self._record.rollouts, self.step + 1, generated))
        try:
            metrics = batch_metrics(generated, self.step)
            metrics["rollout/refilled_groups"] = float(len(useless))
            self.agrees = False
            metrics |= await self._update(groups)
            await at_rest
            for group in generated:
                self._pipes.cursor.finish(group_position(group)[0])
            self.step += 1
            self.agrees = True
            self._metrics.hold(metrics)
            with self._pipes.timeline.span("policy", "learner", version=self.step):
                (push, spent), mismatch = await asyncio.gather(self._sync.fetch(tasks), self._record.mismatch())
            self._record.policy(push.policy_id)
            start_in(tasks, asyncio.to_thread(self._record.keep_mismatch, self.step, groups, mismatch))
        finally:
            await at_rest
        return metrics | spent, push

    async def _update(self, groups: Sequence[pa.Table]) -> dict[str, float]:
        await self._sync.answered()
        with self._pipes.timeline.span("train", "learner", step=self.step + 1):
            metrics = await self._step(list(groups))
        self._sync.trained_on(groups)
        return metrics
