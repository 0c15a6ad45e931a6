"""Groups through gleaner's own reward processes, and the same functions called directly."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewards.call import Group
from rewards.config import RewardConfig
from rewards.pool import RewardPool

PROMPT = [{"role": "user", "content": "How much is it?"}]
Value = float | None


def group_of(texts: Sequence[str], **columns: Any) -> Group:
    """Completions of one problem, as of a model with a chat template; their ids are as many as the text has words."""
    return Group.of(PROMPT, texts, [[hash(word) % 1000 for word in text.split()] for text in texts], columns)


async def asked(uses: Mapping[str, Mapping[str, Any]], groups: Sequence[Group]) -> dict[str, list[list[Value]]]:
    """What each function says of each group, by its `use`, with its args."""
    rewards = [
        RewardConfig(use=use, args=dict(args), name=f"r{i}", timeout_s=120)
        for i, (use, args) in enumerate(uses.items())
    ]
    async with RewardPool(rewards) as pool:
        verdicts = [await pool.verdicts(group) for group in groups]
    return {use: [of_group[i].values for of_group in verdicts] for i, use in enumerate(uses)}


def same(found: Sequence[Sequence[Value]], wanted: Sequence[Sequence[Value]]) -> bool:
    """Equal values of all groups; nan is equal to itself."""

    def key(value: Value) -> Any:
        return value if value is None else "nan" if math.isnan(value) else float(value)

    return [[key(one) for one in group] for group in found] == [[key(one) for one in group] for group in wanted]


def each(function: Callable[..., Any], texts: Sequence[str], **given: Any) -> list[Value]:
    """A grader of one text called directly; nan where it raises."""
    found: list[Value] = []
    for text in texts:
        try:
            told = function(text, **given)
        except Exception:
            told = math.nan
        told = told["score"] if isinstance(told, Mapping) else told
        found.append(float(told[0] if isinstance(told, tuple | list) else told))
    return found
