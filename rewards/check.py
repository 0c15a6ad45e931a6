"""The trial: every judge is called once before any model loads, so that a broken one costs seconds and not a run."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rewards import memory
from rewards.base import RewardError
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores


def try_rewards(
    rewards: Sequence[RewardConfig],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    memory_bytes: int = memory.DEFAULT,
) -> Scores:
    """Loads each judge in a worker process and calls it on the first row. Not from inside an event loop.

    Raises RewardError with one line if a judge does not load, raises, dies, is late or returns the wrong shape.
    A None or NaN is accepted: a judge may have no opinion on a dummy completion.
    """
    if not completions:
        raise ValueError("try_rewards: needs at least one completion, got none")
    first = {name: values[:1] for name, values in columns.items()}
    return asyncio.run(_try(rewards, prompts[:1], completions[:1], completion_ids[:1], first, memory_bytes))


async def _try(
    rewards: Sequence[RewardConfig],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    memory_bytes: int,
) -> Scores:
    begin = time.perf_counter()
    async with RewardPool(rewards, memory_bytes=memory_bytes) as pool:
        verdicts = await pool.verdicts(prompts, completions, completion_ids, columns)
        ms = (time.perf_counter() - begin) * 1e3
    for i, verdict in enumerate(verdicts):
        if verdict.status in ("error", "timeout"):
            raise RewardError(pool.sentence(i, verdict))
    return pool.combine(verdicts, ms)
