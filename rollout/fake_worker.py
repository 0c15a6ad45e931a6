"""A rollout worker without a model: any Engine, no tokenizer, no reward processes. For learner.driver.local."""

from collections.abc import Sequence

import pyarrow as pa

from rollout.engine import Engine
from rollout.facts import Origin, facts_of
from rollout.schema import Problem, build_group
from rollout.service import RolloutService
from rollout.shared_base.manifest import Manifest
from rollout.side_by_side import side_by_side
from rollout.types import Sampling, SentPolicy, Weights, WeightsInFile
from rollout.weight_sync import Answer, Receipt


class FakeWorker(RolloutService):
    """Its reward is 1 for a completion of an odd number of tokens, else 0; its texts are the numbers of the tokens."""

    def __init__(self, engine: Engine, rank: int = 0) -> None:
        self.engine, self._rank = engine, rank

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        completions = await self.engine.generate(problem.prompt_ids, sampling)
        rewards = [float(len(c.token_ids) % 2) for c in completions]
        rows = facts_of(problem, completions, Origin("run", self._rank, attempt, sampling.seed, 1.0)) | {
            "completion": [" ".join(map(str, c.token_ids)) for c in completions],
            "reward": rewards,
            "reward_parts": [[("odd", reward)] for reward in rewards],
            "reward_status": ["ok"] * len(rewards),
            "reward_ms": [0.0] * len(rewards),
        }
        return build_group(rows)

    async def rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
    ) -> pa.Table | None:
        asked = zip(problems, samplings, strict=True)
        groups = await side_by_side(self.rollout(problem, sampling, attempt) for problem, sampling in asked)
        made = [group for group in groups if group is not None]
        return pa.concat_tables(made).combine_chunks() if len(made) == len(groups) else None

    async def reaches(self, place: WeightsInFile) -> str:
        return "it is no process of its own"

    async def take_policy(self, policy: SentPolicy) -> Receipt | None:
        assert not isinstance(policy, WeightsInFile), "the fake trainer sends adapters"
        if isinstance(policy, Weights):
            digest = await self.engine.load_weights(policy)
        else:
            digest = await self.engine.load_adapter(policy)
        return Receipt(digest, 2.0, 1.0)

    async def probe(self, token_ids: Sequence[int]) -> Answer:
        return Answer(await self.engine.probe(token_ids), await self.engine.held(), 3.0)

    async def share_base(self) -> Manifest:
        return await self.engine.share_base()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def close(self) -> None:
        await self.engine.close()
