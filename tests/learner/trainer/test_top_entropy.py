"""learner.loss.top_entropy: the objective is of the least certain tokens of the batch alone, however it is split."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from learner.algo.loss import most_uncertain
from learner.algo.surrogates import LossConfig
from rollout.schema import ragged
from tests.learner import naive
from tests.learner.trainers import (
    TEMPERATURE,
    advantages_by_hand,
    distance,
    gradient,
    groups_near,
    make_trainer,
)

Row = tuple[list[int], list[int], list[float], float]


def rows_of(groups: list[pa.Table], *, every: bool) -> list[Row]:
    """Prompt, completion, sampler's logprobs and advantage; every: of groups without signal, too."""
    names = ("prompt_ids", "completion_ids", "behavior_logprobs")
    rows = [
        (*(values.tolist() for values in row), advantage)
        for group, own in zip(groups, advantages_by_hand("batch"), strict=True)
        for row, advantage in zip(zip(*(ragged(group, name) for name in names), strict=True), own, strict=True)
    ]
    return [row for row in rows if not math.isnan(row[3]) and (every or row[3] != 0)]


def entropies(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    logs = (model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0] / TEMPERATURE).log_softmax(-1)
    found: Tensor = -(logs.exp() * logs).sum(-1)[len(prompt) - 1 : -1].detach()
    return found


def naive_gradient(
    model: Any, reference: Any, groups: list[pa.Table], config: LossConfig, share: float
) -> dict[str, Tensor]:
    rows = rows_of(groups, every=config.beta > 0)
    total = sum(len(row[1]) for row in rows_of(groups, every=True))
    known = [entropies(model, row[0], row[1]) for row in rows]
    counted = [own for own, row in zip(known, rows, strict=True) if row[3] != 0]
    ordered = torch.cat(counted).sort(descending=True).values
    least = ordered[math.ceil(share * len(ordered)) - 1]
    for (prompt, completion, behavior, advantage), own in zip(rows, known, strict=True):
        lp = naive.logprobs(model, prompt, completion, TEMPERATURE)
        objective = naive.loss(lp, torch.tensor(behavior), advantage, None, config) * (own >= least)
        if config.beta > 0:
            with torch.no_grad():
                ref = naive.logprobs(reference, prompt, completion, TEMPERATURE)
            ratio, d = (lp - torch.tensor(behavior)).exp(), ref - lp
            objective = objective + config.beta * ratio * (d.exp() - d - 1)
        (objective.sum() / total).backward()
    return {
        name.replace(".default.", "."): weight.grad for name, weight in model.named_parameters() if weight.requires_grad
    }


@pytest.mark.parametrize("budget", [30, 1000])
@pytest.mark.parametrize(("share", "beta"), [(0.25, 0.0), (0.6, 0.2)])
async def test_its_gradient_is_the_textbooks(
    tiny_path: str, adapter_path: str, share: float, beta: float, budget: int
) -> None:
    config = LossConfig(ratio="clip", beta=beta, top_entropy=share)
    model = naive.load(tiny_path, adapter_path)
    near = groups_near(model)
    trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=budget)
    found = await gradient(trainer, near)
    wanted = naive_gradient(model, naive.load(tiny_path, adapter_path), near, config, share)
    assert distance(found, wanted) < 5e-5
    every = await gradient(
        make_trainer(tiny_path, adapter=adapter_path, loss=LossConfig(ratio="clip", beta=beta)), near
    )
    assert distance(found, every) > 0.1


async def test_the_updates_of_a_batch_have_the_tokens_of_its_first_policy(
    tiny_path: str, adapter_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = groups_near(naive.load(tiny_path, adapter_path))
    loss = LossConfig(ratio="clip", top_entropy=0.3)
    trainer = make_trainer(
        tiny_path, adapter=adapter_path, loss=loss, updates_per_batch=2, learning_rate=0.05, groups_per_step=3
    )
    seen: list[Tensor] = []
    learn = trainer._updates._passes.learn

    def noted(batches: Any, **how: Any) -> Any:
        seen.append(how["learned"])
        return learn(batches, **how)

    monkeypatch.setattr(trainer._updates._passes, "learn", noted)
    metrics = await trainer.step(near)
    assert len(seen) == 2
    assert seen[0] is seen[1]
    tokens = sum(len(row[1]) for row in rows_of(near, every=False))
    assert int(seen[0].sum()) == math.ceil(0.3 * tokens)
    assert 0 < metrics["policy/top_entropy"] < math.log(1000)
    assert metrics["policy/masked_fraction"] < 0.3  # the tokens that are left out are not lost to a ratio


def test_the_share_is_of_the_tokens_that_are_known() -> None:
    nan = math.nan
    entropies = torch.tensor([0.5, nan, 2.0, 1.0, nan, 1.0, 0.0])
    alone = most_uncertain(entropies, 0.2)
    assert alone is not None
    assert (alone.tokens.nonzero().tolist(), alone.least) == ([[2]], 2.0)
    found = most_uncertain(entropies, 0.21)  # two of five, and the one that is equal to the second
    assert found is not None
    assert found.tokens.tolist() == [False, False, True, True, False, True, False]
    whole = most_uncertain(entropies, 0.999)
    assert whole is not None
    assert int(whole.tokens.sum()) == 5
    assert most_uncertain(torch.tensor([nan, nan]), 0.5) is None
