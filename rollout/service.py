"""What may be asked of a generator's process: the methods that cluster.actor.Actor.call takes at that border."""

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from rollout.delivery import Answer, Receipt
from rollout.schema import Problem
from rollout.types import Manifest, Sampling, SentPolicy, WeightsInFile


class RolloutService(Protocol):
    """rollout.worker.RolloutWorker is the one that runs a model."""

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        """One group of `sampling.n` completions of the problem, scored, as a table of rollout.schema; None from a
        process that has no policy yet."""

    async def rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
    ) -> pa.Table | None:
        """The groups of several problems, in their order, as rows of one table; otherwise as `rollout`. However many
        are asked for in however many calls, no more of them are generated at once than the engine decodes, or plays, at
        once: groups of `rollout` find a place beside them."""

    async def take_policy(self, policy: SentPolicy) -> Receipt | None:
        """Takes a newer policy (requests under way: see EngineSettings.in_flight). None if the learner has written
        a newer one in its place (rollout.weights), which is published by then.

        Raises ValueLost if it was in the memory of a learner that is gone.
        """

    async def reaches(self, place: WeightsInFile) -> str:
        """Why this process cannot map memory of the learner's, in which there are no weights yet; empty if it can."""

    async def probe(self, token_ids: Sequence[int]) -> Answer:
        """What the newest policy says of token_ids [N], and the tensors in use. Raises NoAdapter before the first."""

    async def share_base(self) -> Manifest:
        """How the learner maps the engine's base (memory.layout: shared)."""

    async def sleep(self) -> None:
        """Frees the engine's device memory; no rollout may be running."""

    async def wake(self) -> None:
        """Ends sleep()."""

    async def close(self) -> None:
        """Ends the engine and the reward processes."""
