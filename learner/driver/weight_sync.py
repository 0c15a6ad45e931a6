"""Weight sync, the driver's part: each policy out of the learner, to every generator, with the tokens that prove it."""

import asyncio
from collections.abc import Sequence

import pyarrow as pa

from cluster.actor import Actor
from learner.config import RunConfig
from learner.driver.probe import Probe
from learner.driver.task_group import start_in
from learner.trainer.service import TrainerService
from rollout.producer import Pipes, Producer
from rollout.weight_sync import Answer, Push


class WeightSync:
    """Waits for: the learner's policy, and every generator's acknowledgement of it.

    Unblocks: producers, by releasing the slots of the groups that a policy has learned from.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Actor[TrainerService],
        producers: Sequence[Producer],
        pipes: Pipes,
        *,
        stays: bool,
    ) -> None:
        self._trainer, self._producers, self._pipes = trainer, producers, pipes
        self._dtype, self._stays = config.kv_dtype, stays
        longest = config.rollout.max_prompt_length + config.rollout.max_completion_length - 1
        self.probe = Probe(pipes.problems.at(0).prompt_ids, longest)
        deadlines = config.cluster.deadlines
        self._push_s = deadlines.push
        # The learner may be without its base until a lost generator is replaced.
        without = deadlines.start if config.memory.base == "shared" else 0.0
        self._probe_s = deadlines.push + without
        under_way_s = config.group_deadline_s if config.max_staleness > 0 else 0.0
        self._patience_s = deadlines.push + deadlines.start + under_way_s  # a generator may be restarting
        self._expected: asyncio.Future[Answer] | None = None  # to the newest probe

    async def fetch(self, tasks: asyncio.TaskGroup) -> tuple[Push, dict[str, float]]:
        """The learner's policy as it is now, and the seconds that it took, as metrics. The learner scores the probe
        tokens while the policy is on its way."""
        policy, exported = await self._trainer.call(TrainerService.outgoing, self._push_s, self._stays)
        answered_s = self._expected.result().seconds if self._expected is not None else 0.0  # the probe before
        spent = {"time/push_export": exported.seconds, "time/push_learner_probe": answered_s}
        ids = self.probe.ids
        self._expected = start_in(tasks, self._expect(exported.policy_id.version, ids))
        return Push(policy, exported.policy_id, ids, self._expected, self._dtype), spent

    async def answered(self) -> None:
        """Waits until the learner has answered the newest probe, which must come before its next step: an actor takes
        calls that are a few milliseconds apart in either order, and would answer with the policy after."""
        if self._expected is not None:
            await asyncio.wait({self._expected})

    async def _expect(self, version: int, ids: tuple[int, ...]) -> Answer:
        with self._pipes.timeline.span("probe", "learner", concurrent=True, version=version):
            return await self._trainer.call(TrainerService.probe, self._probe_s, list(ids))

    def trained_on(self, groups: Sequence[pa.Table]) -> None:
        """After each step: the probe may go on to tokens of these groups."""
        self.probe.trained_on(groups, settled=all(producer.feed.evidence.settled for producer in self._producers))

    async def deliver(self, push: Push, release: int) -> None:
        """Brings the policy to every generator, then frees the slots of the `release` groups that it learned from. The
        one before it must have been brought to all of them: the next one may take its place."""
        version = push.policy_id.version
        await self._pipes.policy_slot.publish(version, push)
        names = [producer.name for producer in self._producers]
        await self._pipes.policy_slot.acknowledged(version, names, self._patience_s)
        self._pipes.buffer.release(release)
