"""What a surrogate is given: values by hand, and gradients by the logprobs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.algo.loss import Tokens, log_ratio_of

LOGPROBS, BEHAVIOR = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])


@pytest.fixture
def tokens() -> Tokens:
    """Completions of two tokens and one."""
    advantages = torch.tensor([2.0, 2.0, -1.0])
    return Tokens.of(LOGPROBS, log_ratio_of(LOGPROBS, BEHAVIOR), advantages, torch.tensor([2, 1]))


def slopes(objective: Tensor, tokens: Tokens) -> list[float]:
    (found,) = torch.autograd.grad(objective.sum(), tokens.unit)
    return found.tolist()


def test_values_and_gradients_by_the_logprobs(tokens: Tokens) -> None:
    ratios = [math.exp(0.5), math.exp(-1), 1.0]
    assert tokens.sg_ratio.tolist() == pytest.approx(ratios)
    assert tokens.ratio.tolist() == pytest.approx(ratios)
    assert slopes(tokens.ratio, tokens) == pytest.approx(ratios)
    assert tokens.logprobs.tolist() == LOGPROBS.tolist()
    assert slopes(tokens.logprobs, tokens) == [1, 1, 1]
    assert slopes(tokens.logprobs * tokens.logprobs, tokens) == [-2, -4, -6]
    assert tokens.weighted(tokens.ratio).tolist() == pytest.approx([2 * ratios[0], 2 * ratios[1], -1])
    assert slopes(tokens.weighted(tokens.ratio), tokens) == pytest.approx([2 * ratios[0], 2 * ratios[1], -1])
    assert not any(x.requires_grad for x in (tokens.sg_logprobs, tokens.sg_ratio, tokens.log_ratio))


def test_ratios_of_whole_completions(tokens: Tokens) -> None:
    product, mean = tokens.over_completions("sum"), tokens.over_completions("mean")
    assert product.log_ratio.tolist() == [-0.5, -0.5, 0]
    assert product.sg_ratio.tolist() == pytest.approx([math.exp(-0.5)] * 2 + [1])
    assert mean.log_ratio.tolist() == [-0.25, -0.25, 0]
    assert mean.ratio.tolist() == pytest.approx([math.exp(-0.25)] * 2 + [1])
    assert slopes(mean.ratio, tokens) == pytest.approx([math.exp(-0.25)] * 2 + [1])
    stale = torch.ones(3)
    moved = replace(tokens, stale=stale).over_completions("sum")
    kept = ("sg_logprobs", "unit", "advantages", "lengths")
    assert [name for name in kept if getattr(moved, name) is not getattr(tokens, name)] == []
    assert moved.stale is stale


def test_nothing_leads_back_to_the_model() -> None:
    logits = torch.randn(3, requires_grad=True)
    tokens = Tokens.of(logits.log_softmax(-1), torch.zeros(3), torch.ones(3), torch.tensor([3]))
    torch.autograd.backward(tokens.weighted(tokens.logprobs).sum())
    assert logits.grad is None
