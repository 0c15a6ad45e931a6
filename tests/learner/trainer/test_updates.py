"""A batch in several updates: decoupled PPO, against the textbook taken one update after the other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from learner.algo.loss import value_loss
from learner.algo.surrogates import LossConfig
from learner.algo.targets import targets_of
from learner.batch.micro_batch import read
from learner.config.settings import LearnerConfig
from learner.trainer.step import Learned, Update
from rollout.schema import ragged
from tests.learner import naive
from tests.learner.rollouts import make_groups, uniform
from tests.learner.trainers import (
    MAX_LENGTH,
    TEMPERATURE,
    adapter_of,
    advantages_by_hand,
    distance,
    gradient,
    make_trainer,
    masters,
)

RATE = 0.02
SPLIT: dict[str, Any] = {"loss": LossConfig(ratio="clip"), "updates_per_batch": 2, "learning_rate": RATE}


def naive_updates(model: Any, groups: list[pa.Table], advantages: list[list[float]], *, near: str) -> dict[str, Tensor]:
    """The gradient of the last update, after AdamW took those before it. `near`: what PPO's clip holds it near to."""
    weights = {n.replace(".default.", "."): w for n, w in model.named_parameters() if w.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    batch = [
        list(zip(*(ragged(g, n) for n in ("prompt_ids", "completion_ids", "behavior_logprobs")), strict=True))
        for g in groups
    ]
    with torch.no_grad():
        prox = [[naive.logprobs(model, p.tolist(), c.tolist(), TEMPERATURE) for p, c, _ in group] for group in batch]
    for own in ([0, 1], [2]):  # three groups in two updates
        rows = [
            (*row, a, old) for g in own for row, a, old in zip(batch[g], advantages[g], prox[g], strict=True) if a == a
        ]
        total = sum(len(row[1]) for row in rows)
        optimizer.zero_grad()
        for prompt, completion, behavior, advantage, old in rows:
            lp, mu = naive.logprobs(model, prompt.tolist(), completion.tolist(), TEMPERATURE), torch.tensor(behavior)
            stale = (old - mu).exp().clamp(max=2) if near == "prox" else torch.ones(len(lp))
            moved = (lp - (old if near == "prox" else mu)).exp()
            value = stale * torch.min(moved.clamp(max=4) * advantage, moved.clamp(0.8, 1.28) * advantage)
            (-value.sum() / total).backward()
        if own == [0, 1]:
            optimizer.step()
    return {name: weight.grad for name, weight in weights.items()}


@pytest.mark.parametrize("budget", [40, 1000])
async def test_two_updates_are_the_textbooks(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], budget: int
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path, token_budget=budget, **SPLIT)
    found = await gradient(trainer, groups)
    wanted, other = (
        naive_updates(naive.load(tiny_path, adapter_path), groups, advantages_by_hand("batch"), near=near)
        for near in ("prox", "sampler")
    )
    assert distance(found, wanted) < 1e-3
    assert distance(found, other) > 0.05  # so the test can tell
    assert (await adapter_of(trainer)).version == 1


async def test_memory_that_runs_out_in_the_second_update_repeats_that_one_alone(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, calm = (make_trainer(tiny_path, adapter=adapter_path, token_budget=200, **SPLIT) for _ in range(2))
    plain, steps = trainer._updates.updater.step, []

    def step(rate: float, *, loss_is_finite: bool) -> tuple[float, bool]:
        steps.append(rate)
        return plain(rate, loss_is_finite=loss_is_finite)

    def predicting(batch: Any) -> Tensor:
        if len(steps) == 1 and batch.ids.numel() > 30:
            raise torch.OutOfMemoryError("no more")
        return type(trainer._policy).predicting(trainer._policy, batch)

    monkeypatch.setattr(trainer._updates.updater, "step", step)
    monkeypatch.setattr(trainer._policy, "predicting", predicting)
    metrics, wanted = await trainer.step(groups), await calm.step(groups)
    assert metrics["memory/oom_retries"] >= 1
    assert steps == [RATE, RATE]
    assert metrics["loss/trained_tokens"] == wanted["loss/trained_tokens"]
    assert distance(masters(trainer), masters(calm)) < 1e-4


async def test_metrics_of_a_split_batch(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mismatch is that of the policy that sampled, not of what the first update made of it; and an update without
    signal is none."""
    whole = await make_trainer(tiny_path, adapter=adapter_path, learning_rate=RATE).step(groups)
    split, updates = make_trainer(tiny_path, adapter=adapter_path, **SPLIT), list[Any]()
    learn = split._updates.learn

    def seen(*args: Any) -> Any:
        learned = learn(*args)
        updates.extend(learned.policy)
        return learned

    monkeypatch.setattr(split._updates, "learn", seen)
    parts = await split.step(groups)
    losses = [sum(float(part["loss"]) for part in update.parts) for update in updates]
    assert len(losses) == 2
    assert parts["loss/total"] == pytest.approx(sum(losses) / 2)
    for name in ("policy/mismatch_k3", "policy/mismatch_max", "policy/mismatch_max_current", "loss/learning_rate"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-3)
    assert parts["loss/trained_tokens"] == whole["loss/trained_tokens"]
    half = make_trainer(tiny_path, adapter=adapter_path, **SPLIT)
    before = masters(half)
    metrics = await half.step(make_groups([[1, 1], [0, 1]], uniform))
    assert metrics["loss/grad_norm"] > 0
    assert distance(masters(half), before) > 0


def test_groups_are_split_evenly_and_each_update_has_its_own_denominators() -> None:
    groups = make_groups([[0, 1], [1, 0, 1], [0, None], [1, 0], [0, 1]], uniform)
    rows = read(groups)
    config = LearnerConfig(updates_per_batch=2, loss=LossConfig(ratio="clip"))
    found, whole = targets_of(rows, config, MAX_LENGTH), targets_of(rows, LearnerConfig(), MAX_LENGTH)
    assert found.update.tolist() == [0] * 7 + [1] * 4
    scored = np.array([True] * 6 + [False] + [True] * 4)
    for number in (0, 1):
        own = scored & (found.update == number)
        assert found.coefficients[own] == pytest.approx(1 / rows.lengths[own].sum())
    assert found.coefficients[6] == 0
    assert found.advantages.tolist() == whole.advantages.tolist()
    assert (whole.update == 0).all()
    assert targets_of(rows, LearnerConfig(updates_per_batch=5, loss=LossConfig(ratio="clip")), 16).update.tolist() == [
        0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4,
    ]  # fmt: skip


def test_a_batchs_metrics_are_of_all_its_updates() -> None:
    part = value_loss(torch.zeros(1, requires_grad=True), torch.ones(1), torch.zeros(1), weight=1.0, clip=None)[1]
    told = Learned([Update([], 1.0, True), Update([], 3.0, True)], [Update([part], math.nan, False)], {}).metrics()
    assert told["loss/grad_norm"] == 2
    assert told["loss/skipped_nonfinite"] == 1
