"""Other rewards for recorded completions: by reward functions in their own processes, and by reward models on the
learner's base, as in a run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from learner.config import RunConfig
from learner.tools.replay.taking import Scoring
from learner.tools.rescore import group_of
from rewards.check import try_rewards
from rewards.config import adapters_of, functions_of
from rewards.pool import RewardPool
from rollout.scored import with_part, with_scores

if TYPE_CHECKING:
    from learner.trainer.trainer import Trainer


def try_on(config: RunConfig, group: pa.Table) -> None:
    """Calls each function once. Not from inside an event loop. Raises RewardError."""
    if functions := functions_of(config.rewards):
        try_rewards(functions, group_of(group), config.rollout.reward_memory)


@asynccontextmanager
async def scoring(config: RunConfig) -> AsyncIterator[Scoring]:
    """What gives groups the rewards of this configuration, in the place of those that they have."""
    functions, models = functions_of(config.rewards), adapters_of(config.rewards)
    workers, memory = config.rollout.reward_workers, config.rollout.reward_memory

    async def score(trainer: "Trainer", groups: list[pa.Table]) -> list[pa.Table]:
        scores = await asyncio.gather(*(pool.score(group_of(group)) for group in groups))
        groups = [with_scores(group, given) for group, given in zip(groups, scores, strict=True)]
        said = await trainer.score(groups) if models else []
        begin = 0
        for place, group in enumerate(groups):
            for model, numbers in zip(models, said, strict=True):
                group = with_part(group, str(model.name), model.weight, numbers[begin : begin + len(group)])
            groups[place], begin = group, begin + len(group)
        return groups

    async with RewardPool(functions, workers=workers, memory_bytes=memory) as pool:
        yield score
