"""Small trainers, and the gradient that the textbook learner gives for the same groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from learner.algo.surrogates import LossConfig
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig, LoraConfig, OptimizerConfig
from learner.ranks.group import Group
from learner.ranks.rank import RankTrainer, ShardedRank
from learner.trainer.trainer import Trainer
from rollout.schema import ragged
from tests.learner import naive
from tests.learner.rollouts import make_groups

TEMPERATURE, MAX_LENGTH = 0.8, 16
REWARDS: list[list[float | None]] = [[0, 1, 1, 0.5], [1, 1, 1, 1], [0, None, 0, 2]]


def make_trainer(
    path: str,
    *,
    adapter: str | None = None,
    dtype: Any = "float32",
    model: dict[str, Any] | None = None,
    memory_bytes: int | None = None,
    reward_adapters: Sequence[str] = (),
    group: Group | None = None,
    seed: int = 0,
    beside: Trainer | None = None,
    number: int = 0,
    **learner: Any,
) -> Trainer:
    """group: of several ranks, as this one sees it; None: a learner of one process. beside, number: see Trainer."""
    settings = {"lora": LoraConfig(rank=8, alpha=16), "optimizer": OptimizerConfig(max_grad_norm=1e9)} | learner
    kind: Callable[..., Trainer] = Trainer
    if group is not None:
        kind = partial(ShardedRank if group.sharded else RankTrainer, group=group)
    if beside is not None:
        kind = partial(kind, beside=beside, number=number)
    return kind(
        ModelConfig(path=path, adapter=adapter, dtype=dtype, **model or {}),
        LearnerConfig(**settings),
        temperature=TEMPERATURE,
        max_completion_length=MAX_LENGTH,
        total_steps=10,
        seed=seed,
        device="cpu",
        memory_bytes=memory_bytes,
        reward_adapters=reward_adapters,
    )


async def adapter_of(trainer: Trainer) -> Any:
    """What the generators would get now."""
    return (await trainer.outgoing())[0].value


async def probe_of(trainer: Trainer, token_ids: list[int]) -> Any:
    return (await trainer.probe(token_ids))[0]


def masters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer._policy.masters.items()}


async def gradient(trainer: Trainer, groups: list[pa.Table]) -> dict[str, Tensor]:
    """Of the masters, as the optimizer saw it (the gradient norm is not clipped)."""
    await trainer.step(groups)
    return {name: weight.grad.clone() for name, weight in trainer._policy.masters.items() if weight.grad is not None}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    flat = [torch.cat([one[name].flatten() for name in sorted(one)]) for one in (a, b)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def groups_near(model: Any) -> list[pa.Table]:
    """The sampler's logprobs lie around the model's, so that some tokens are clipped and no ratio reaches 2."""
    rng = np.random.default_rng(5)

    def behavior(prompt: list[int], completion: list[int]) -> list[float]:
        with torch.no_grad():
            own = naive.logprobs(model, prompt, completion, TEMPERATURE).numpy()
        return [float(x) for x in own + rng.uniform(-0.6, 0.6, len(own))]

    return make_groups(REWARDS, behavior)


def naive_gradient(
    model: Any,
    reference: Any,
    groups: list[pa.Table],
    config: LossConfig,
    advantages: list[list[float]],
) -> dict[str, Tensor]:
    """Denominators: every scored completion counts, those of the group without signal too."""
    names = ("prompt_ids", "completion_ids", "behavior_logprobs")
    rows = [
        (row, advantage)
        for group, own in zip(groups, advantages, strict=True)
        for row, advantage in zip(
            zip(*(ragged(group, name) for name in names), strict=True),
            own,
            strict=True,
        )
        if not math.isnan(advantage)
    ]
    total = sum(len(row[1]) for row, _ in rows)
    divisors: dict[str, Callable[[int], Any]] = {
        "dapo": lambda n: total, "dr_grpo": lambda n: len(rows) * MAX_LENGTH, "grpo": lambda n: len(rows) * n
    }  # fmt: skip
    for (prompt, completion, behavior), advantage in rows:
        lp = naive.logprobs(model, prompt.tolist(), completion.tolist(), TEMPERATURE)
        ref = None
        if config.beta > 0:
            with torch.no_grad():
                ref = naive.logprobs(reference, prompt.tolist(), completion.tolist(), TEMPERATURE)
        tokens = naive.loss(lp, torch.tensor(behavior), advantage, ref, config)
        (tokens.sum() / divisors[config.kind](len(completion))).backward()
    return {
        name.replace(".default.", "."): weight.grad for name, weight in model.named_parameters() if weight.requires_grad
    }


def advantages_by_hand(kind: str) -> list[list[float]]:
    nan = float("nan")
    centred = [[-0.625, 0.375, 0.375, -0.125], [0.0] * 4, [-2 / 3, nan, -2 / 3, 4 / 3]]
    squares = [sum(a * a for a in group if a == a) for group in centred]
    divisor = {
        "none": [1.0] * 3,
        "group": [(squares[0] / 3) ** 0.5 + 1e-4, 1.0, (squares[2] / 2) ** 0.5 + 1e-4],
        # eleven rewards, sum 8.5, squares 1 + 1 + 0.25 + 4 * 1 + 4
        "batch": [((10.25 - 8.5**2 / 11) / 10) ** 0.5 + 1e-4] * 3,
    }[kind]
    return [[a / d for a in group] for group, d in zip(centred, divisor, strict=True)]
