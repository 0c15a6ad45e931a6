"""The trial: every reward function is called before any model loads, so that a broken one costs seconds, not a run."""

import asyncio
import time
from collections.abc import Sequence

from rewards import memory
from rewards.base import RewardError
from rewards.call import Group, Verdict
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores

PATIENCE_S = 30.0  # for the first call of a late function
FIRST_CALL = (
    "Only its first call is late: what a function imports or loads within a call counts; move that to the top of its "
    "file, whose loading is not charged."
)


def try_rewards(rewards: Sequence[RewardConfig], group: Group, memory_bytes: int = memory.DEFAULT) -> Scores:
    """Loads each function in a worker process and calls it on the group. Not from inside an event loop.

    Give two completions or more, so that a function which returns a list of length 1 for any is found out. Raises
    RewardError, with one line for each function that does not load, raises, dies, is late or returns the wrong shape. A
    None or NaN is accepted: a function may have no number for a dummy completion.
    """
    if not group.completions:
        raise ValueError("try_rewards: needs at least one completion, got none")
    return asyncio.run(_try(rewards, group, memory_bytes))


async def _try(rewards: Sequence[RewardConfig], group: Group, memory_bytes: int) -> Scores:
    begin = time.perf_counter()
    async with RewardPool(rewards, memory_bytes=memory_bytes) as pool:
        verdicts = await pool.verdicts(group)
        ms = (time.perf_counter() - begin) * 1e3
    wrong = []
    for i, verdict in enumerate(verdicts):
        if verdict.status in ("error", "timeout"):
            sentence = pool.sentence(i, verdict)
            slow = verdict.status == "timeout" and await _slow_at_first(rewards[i], group, memory_bytes)
            wrong.append(f"{sentence} {FIRST_CALL}" if slow else sentence)
    if wrong:
        raise RewardError("\n".join(wrong))
    return pool.combine(verdicts, len(group.completions), ms)


async def _slow_at_first(reward: RewardConfig, group: Group, memory_bytes: int) -> bool:
    """Whether a function that was late is late at its first call only: then what took long is what it imports or loads
    inside that call."""
    patient = reward.model_copy(update={"timeout_s": max(PATIENCE_S, reward.timeout_s)})
    async with RewardPool([patient], memory_bytes=memory_bytes) as pool:
        if not _answered(await pool.verdicts(group)):
            return False
        begin = time.perf_counter()
        second = await pool.verdicts(group)
    return _answered(second) and time.perf_counter() - begin <= reward.timeout_s


def _answered(verdicts: Sequence[Verdict]) -> bool:
    return all(verdict.status in ("ok", "nan") for verdict in verdicts)
