"""Rollout groups made up for the learner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rollout.schema import SCHEMA, build_group, ragged

Behavior = Callable[[list[int], list[int]], Sequence[float]]


def make_group(
    prompt: list[int],
    completions: list[list[int]],
    rewards: Sequence[float | None],
    behavior: Behavior,
    *,
    position: int = 0,
    version: int = 0,
    cut: Sequence[int] = (),
    masks: Sequence[Sequence[bool] | None] | None = None,
    samples: Sequence[int] | None = None,
) -> pa.Table:
    """One group; `behavior` gives the sampler's logprobs of a completion after a prompt. `cut`: those that were stopped
    at the greatest length. `masks`: which tokens the policy sampled; None: all. `samples`: the trajectory that a
    completion is a row of; None: each of its own."""
    n = len(completions)
    zeros, empty = [0.0] * n, [""] * n
    return build_group(
        {
            "run_id": ["run"] * n,
            "group_id": [f"0-{position}-0"] * n,
            "problem_id": [f"p{position}"] * n,
            "epoch": [0] * n,
            "position": [position] * n,
            "attempt": [0] * n,
            "sample": samples or list(range(n)),
            "problem": ['{"messages": "?", "columns": {}}'] * n,
            "completion": empty,
            "prompt_ids": [prompt] * n,
            "completion_ids": completions,
            "behavior_logprobs": [list(behavior(prompt, c)) for c in completions],
            "token_versions": [[version] * len(c) for c in completions],
            "policy_version_min": [version] * n,
            "policy_version_max": [version] * n,
            "finish_reason": ["length" if i in cut else "stop" for i in range(n)],
            "reward": rewards,
            "reward_parts": [[]] * n,
            "loss_mask": masks or [None] * n,
            "turns": [[]] * n,
            "messages": [None] * n,
            "env_metrics": [[]] * n,
            "reward_status": ["error" if r is None else "ok" for r in rewards],
            "reward_error": [None] * n,
            "logged": [[]] * n,
            "routed_experts": [None] * n,
            "teacher_prompt_ids": [None] * n,
            "teacher_logprobs": [None] * n,
            "teacher_top_ids": [None] * n,
            "teacher_top_logprobs": [None] * n,
            "reward_ms": zeros,
            "generate_ms": zeros,
            "worker": [0] * n,
            "seed": [0] * n,
            "created_at": zeros,
        }
    )


def make_groups(
    rewards: Sequence[Sequence[float | None]],
    behavior: Behavior,
    *,
    seed: int = 0,
    vocab: int = 260,
    prompt_length: int = 9,
    max_completion: int = 16,
    version: int = 0,
) -> list[pa.Table]:
    """A group per row of rewards, with random tokens and completion lengths 1 to max_completion."""
    rng = np.random.default_rng(seed)
    groups = []
    for position, row in enumerate(rewards):
        prompt = rng.integers(0, vocab, rng.integers(2, prompt_length + 1)).tolist()
        lengths = rng.integers(1, max_completion + 1, len(row))
        completions = [rng.integers(0, vocab, n).tolist() for n in lengths]
        groups.append(make_group(prompt, completions, row, behavior, position=position, version=version))
    return groups


def uniform(prompt: list[int], completion: list[int]) -> list[float]:
    """Behaviour of a sampler that knows nothing."""
    return [-float(np.log(260))] * len(completion)


def taught(group: pa.Table, prompt: list[int] | None) -> pa.Table:
    """The group with the prompt that its teacher is given; None: with none."""
    place, field = SCHEMA.get_field_index("teacher_prompt_ids"), SCHEMA.field("teacher_prompt_ids")
    return group.set_column(place, field, pa.array([prompt] * len(group), field.type))


def random_logs(prompt: list[int], completion: list[int]) -> np.ndarray:
    """[T, V] logprobs of a teacher that knows nothing of language."""
    logits = np.random.default_rng(prompt + completion).normal(size=(len(completion), 260))
    return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)))


def said(group: pa.Table, logs: Callable[[list[int], list[int]], np.ndarray], top: int) -> pa.Table:
    """The group with what model.teacher says of it. logs: prompt and completion -> [T, V] the teacher's logprobs."""
    rows = zip(ragged(group, "prompt_ids"), ragged(group, "completion_ids"), strict=True)
    columns: dict[str, list[Any]] = {"logprobs": [], "top_ids": [], "top_logprobs": []}
    for prompt, completion in rows:
        known = logs(prompt.tolist(), completion.tolist())
        best = np.argsort(-known, axis=1, kind="stable")[:, :top]
        columns["logprobs"].append(known[np.arange(len(completion)), completion].tolist())
        columns["top_ids"].append(best.ravel().tolist() if top else None)
        columns["top_logprobs"].append(np.take_along_axis(known, best, 1).ravel().tolist() if top else None)
    for name, values in columns.items():
        place, field = SCHEMA.get_field_index(f"teacher_{name}"), SCHEMA.field(f"teacher_{name}")
        group = group.set_column(place, field, pa.array(values, field.type))
    return group


def observed(group: pa.Table, changed: float = 0.0) -> pa.Table:
    """The group with every third token of a completion as an observation, but for the first and the last; `changed`:
    what is recorded as its logprob."""
    ids = ragged(group, "completion_ids")
    masks = [[i % 3 != 1 or i == len(row) - 1 for i in range(len(row))] for row in ids]
    behavior = [
        np.where(mask, row, changed).astype(np.float32)
        for mask, row in zip(masks, ragged(group, "behavior_logprobs"), strict=True)
    ]
    for name, values in {"loss_mask": masks, "behavior_logprobs": behavior}.items():
        place, field = SCHEMA.get_field_index(name), SCHEMA.field(name)
        group = group.set_column(place, field, pa.array(values, field.type))
    return group
