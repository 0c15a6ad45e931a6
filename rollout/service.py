"""The protocols of a generator's process, and of those that only serve generators: the methods that the driver may call
by cluster.actor."""

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from rollout.delivery import Answer, Receipt
from rollout.schema import Problem
from rollout.types import Manifest, Sampling, SentPolicy, WeightsInFile


class Serving(Protocol):
    """A process that only answers generators, and that Ray replaces if it ends: of rewards (rewards.pool.RewardService)
    or of the teacher (rollout.teacher.process.TeacherService)."""

    async def close(self) -> None:
        """Ends what it has started."""


class RolloutService(Protocol):
    """A generator's process as the driver sees it. rollout.worker.RolloutWorker implements it."""

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        """Samples and scores a group of `sampling.n` completions of the problem; returns a table of rollout.schema.

        None if the process has no policy yet, as a fresh one has not.
        """

    async def rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
    ) -> pa.Table | None:
        """The groups of several problems, in their order, as rows of one table; otherwise as `rollout`.

        All calls of this method together generate no more completions at once than the engine decodes at once (or than
        trajectories are played at once), so that calls of `rollout` need not wait for all of them.
        """

    async def take_policy(self, policy: SentPolicy) -> Receipt | None:
        """Loads a newer policy. EngineSettings.in_flight says what becomes of running requests.

        None if the learner has overwritten the policy with a newer one (rollout.weights), which is published by then.
        Raises ValueLost if the policy was in the memory of a learner's process that has ended.
        """

    async def reaches(self, place: WeightsInFile) -> str:
        """Tries to map the learner's memory, before it holds weights. Returns why that fails; "" if it succeeds."""

    async def probe(self, token_ids: Sequence[int]) -> Answer:
        """The logprobs of token_ids [N] under the newest policy, and the digests of the tensors that the engine
        computes with. Raises NoAdapter before the first policy."""

    async def share_base(self) -> Manifest:
        """Describes how the learner can map the engine's base model (memory.layout: shared)."""

    async def sleep(self) -> None:
        """Frees the engine's device memory; no rollout may be running."""

    async def wake(self) -> None:
        """Has the engine take its device memory again."""

    async def close(self) -> None:
        """Ends the engine, the reward processes and the environments."""
