"""What tests of the reward pool ask of it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rewards.call import Group
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores

OneOf = Callable[..., RewardConfig]  # the name of a function of the shared file, and more settings of it


async def score(pool: RewardPool, completions: Sequence[str] = ("a", "bb"), **columns: Sequence[Any]) -> Scores:
    return await pool.score(Group(["p"] * len(completions), completions, [[1]] * len(completions), columns))


async def at_once(pool: RewardPool, completions: Sequence[str]) -> list[Scores]:
    await score(pool, ["a"])  # loads the functions and shows that they are quick
    return await asyncio.gather(*(score(pool, [text, text]) for text in completions))
