"""Rewards for rows that rollout workers have scored: a further part, which a reward model gives, or others in their
place."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rewards.base import counts
from rewards.pool import Scores
from rollout.schema import SCHEMA

KEYS = ("reward", "reward_status", "reward_parts", "reward_error")


def with_scores(rows: pa.Table, scores: Scores) -> pa.Table:
    """The rows of a group of single completions, with these rewards in the place of what they had."""
    parts = [[{"name": name, "value": values[i]} for name, values in scores.parts.items()] for i in range(len(rows))]
    rows = _with(rows, dict(zip(KEYS, (scores.reward, scores.status, parts, scores.errors), strict=True)))
    logged = [[dict(zip(("name", "value", "text"), one, strict=True)) for one in row] for row in scores.logged]
    return _with(rows, {"reward_ms": [scores.ms] * len(rows), "logged": logged})


def with_part(rows: pa.Table, name: str, weight: float, scores: Sequence[float]) -> pa.Table:
    """The rows with `scores` as the part `name` of their rewards, which grow by weight * score.

    As among reward functions (rewards.pool): a row that failed stays without a reward; one that no function scored has
    this one's alone; and a score that does not count (rewards.base) fails its row, with status nan.

    Raises ValueError: an environment has given a part of that name.
    """
    rewards, status, parts, errors = (rows.column(key).to_pylist() for key in KEYS)
    if any(part["name"] == name for row in parts for part in row):
        raise ValueError(
            f"rewards: each part must have a name of its own, and the environment gives {name} as well; set "
            "rewards.<i>.name"
        )
    summed = [
        _summed(reward, said, own, error, name, weight, score)
        for reward, said, own, error, score in zip(rewards, status, parts, errors, scores, strict=True)
    ]
    return _with(rows, dict(zip(KEYS, zip(*summed, strict=True), strict=True)))


def _with(rows: pa.Table, columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    for key, values in columns.items():
        field = SCHEMA.field(key)
        rows = rows.set_column(SCHEMA.get_field_index(key), field, pa.array(values, field.type))
    return rows


def _summed(
    reward: float | None,
    status: str,
    parts: list[dict[str, Any]],
    error: str | None,
    name: str,
    weight: float,
    score: float,
) -> tuple[float | None, str, list[dict[str, Any]], str | None]:
    parts = [*parts, {"name": name, "value": score if counts(score) else math.nan}]
    if status not in ("ok", "none"):
        return None, status, parts, error
    if not counts(score):
        return None, "nan", parts, f"reward {name!r}: nan: the reward model gave {score}, which is no finite number."
    return (reward or 0.0) + weight * score, "ok", parts, error
