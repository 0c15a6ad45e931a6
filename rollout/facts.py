"""What the generator knows of a group, in the columns of rollout.schema: everything but text and rewards."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout.schema import Problem
from rollout.types import Completion


class Origin(NamedTuple):
    """How a group came about. seed: None counts as -1. generate_ms: milliseconds that its sampling took. version: of
    the newest policy, which counts for a completion without a token."""

    run_id: str
    worker: int
    attempt: int
    seed: int | None
    generate_ms: float
    version: int = 0


def facts_of(problem: Problem, completions: Sequence[Completion], by: Origin) -> dict[str, Sequence[Any]]:
    """Schema column -> G values, one for each completion of the group."""
    size = len(completions)
    same: dict[str, Any] = {
        "run_id": by.run_id,
        "group_id": problem.group_id(by.attempt),
        "problem_id": problem.id,
        "epoch": problem.epoch,
        "position": problem.position,
        "attempt": by.attempt,
        "problem": problem.to_json(),
        "prompt_ids": list(problem.prompt_ids),
        "generate_ms": by.generate_ms,
        "worker": by.worker,
        "seed": -1 if by.seed is None else by.seed,
        "created_at": time.time(),
    }
    facts: dict[str, Sequence[Any]] = {key: [value] * size for key, value in same.items()}
    return facts | {
        "loss_mask": [None] * size,
        "turns": [[]] * size,
        "messages": [None] * size,
        "env_metrics": [[]] * size,
        "reward_error": [None] * size,
        "logged": [[]] * size,
        "sample": list(range(size)),
        "completion_ids": [c.token_ids for c in completions],
        "behavior_logprobs": [c.logprobs for c in completions],
        "token_versions": [c.versions for c in completions],
        "policy_version_min": [_least(c.versions, by.version) for c in completions],
        "policy_version_max": [-_least(-c.versions, -by.version) for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
    }


def _least(versions: npt.NDArray[np.int32], default: int) -> int:
    return int(versions.min()) if len(versions) else default
