"""Rollout groups without a worker: by default small numbers that tell rows apart. For tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rollout.facts import Origin, facts_of
from rollout.schema import Problem, build_group
from rollout.types import Completion


def make_problem(position: int, prompt_ids: Sequence[int] = (3, 1, 2)) -> Problem:
    return Problem(f"train-{position}", f"question {position}", {"answer": "4"}, tuple(prompt_ids), position, 0)


def make_columns(
    position: int = 0,
    *,
    attempt: int = 0,
    completions: Sequence[Completion] | None = None,
    rewards: Sequence[float | None] = (1.0, 0.0),
    **changed: Any,
) -> dict[str, Sequence[Any]]:
    """The columns of a group of len(rewards) completions; by default completion j has j + 1 tokens of version 0."""
    if completions is None:
        completions = [
            Completion(np.arange(t, dtype=np.int32), np.full(t, -0.5, np.float32), "stop", np.zeros(t, np.int32))
            for t in range(1, len(rewards) + 1)
        ]
    facts = facts_of(make_problem(position), completions, Origin("run", 0, attempt, seed=17, generate_ms=2.5))
    return facts | {
        "created_at": [0.0] * len(rewards),
        "completion": ["text"] * len(rewards),
        "reward_ms": [1.5] * len(rewards),
        "reward": rewards,
        "reward_parts": [[("vowels", reward)] for reward in rewards],
        "reward_status": ["error" if reward is None else "ok" for reward in rewards],
        **changed,
    }


def make_group(position: int = 0, **how: Any) -> pa.Table:
    """A group as a table; arguments as for make_columns."""
    return build_group(make_columns(position, **how))
