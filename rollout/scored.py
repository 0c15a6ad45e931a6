"""A further part of the reward for rows that rollout workers have scored: what a reward model says of them."""

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rewards.base import counts
from rollout.schema import SCHEMA

KEYS = ("reward", "reward_status", "reward_parts")


def with_part(rows: pa.Table, name: str, weight: float, scores: Sequence[float]) -> pa.Table:
    """The rows with `scores` as the part `name` of their rewards, which grow by weight * score.

    As among reward functions (rewards.pool): a row that failed stays without a reward; one that no function scored has
    this one's alone; and a score that does not count (rewards.base) fails its row, with status nan.

    Raises ValueError: an environment has given a part of that name.
    """
    rewards, status, parts = (rows.column(key).to_pylist() for key in KEYS)
    if any(part["name"] == name for row in parts for part in row):
        raise ValueError(
            f"rewards: each part must have a name of its own, and the environment gives {name} as well; set "
            "rewards.<i>.name"
        )
    summed = [
        _summed(reward, said, own, name, weight, score)
        for reward, said, own, score in zip(rewards, status, parts, scores, strict=True)
    ]
    for index, key in enumerate(KEYS):
        field = SCHEMA.field(key)
        values = pa.array([row[index] for row in summed], field.type)
        rows = rows.set_column(SCHEMA.get_field_index(key), field, values)
    return rows


def _summed(
    reward: float | None, status: str, parts: list[dict[str, Any]], name: str, weight: float, score: float
) -> tuple[float | None, str, list[dict[str, Any]]]:
    parts = [*parts, {"name": name, "value": score if counts(score) else math.nan}]
    if status not in ("ok", "none"):
        return None, status, parts
    if not counts(score):
        return None, "nan", parts
    return (reward or 0.0) + weight * score, "ok", parts
