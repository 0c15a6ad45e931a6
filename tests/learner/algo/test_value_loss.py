"""The value's loss: by hand, and its slope against autograd's of what TRL writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.algo.loss import explained_variance, value_loss, value_metrics_of


def test_by_hand_with_and_without_a_clip() -> None:
    values, returns, old = torch.tensor([1.0, 0.5, 0.5, -1.0]), torch.tensor([2.0, 2.0, 0.0, -2.0]), torch.zeros(4)
    slopes, parts = value_loss(values, returns, old, weight=0.25, clip=None)
    assert slopes.tolist() == [-0.25, -0.375, 0.125, 0.25]
    assert float(parts["loss"]) == pytest.approx((1 + 2.25 + 0.25 + 1) / 8)
    # At most 0.6 from 0: the first and the last have come too far towards their returns, the others have not.
    slopes, parts = value_loss(values, returns, old, weight=0.25, clip=0.6)
    assert slopes.tolist() == [0, -0.375, 0.125, 0]
    assert float(parts["loss"]) == pytest.approx((1.4**2 + 2.25 + 0.25 + 1.4**2) / 8)
    metrics = value_metrics_of([parts, parts], updates=2)
    assert metrics == {"value/loss": pytest.approx(float(parts["loss"])), "value/clip_fraction": 0.5}
    assert value_metrics_of([], updates=1) == {}


def test_a_value_that_went_too_far_away_from_its_return_still_comes_back() -> None:
    slopes, _ = value_loss(torch.tensor([-1.0]), torch.tensor([2.0]), torch.zeros(1), weight=1.0, clip=0.2)
    assert slopes.tolist() == [-3.0]


@pytest.mark.parametrize("clip", [0.2, 5.0])
def test_the_slope_is_autograds(clip: float) -> None:
    torch.manual_seed(0)
    values, returns, old = torch.randn(64, requires_grad=True), torch.randn(64), torch.randn(64)
    clipped = torch.clamp(values, old - clip, old + clip)
    loss = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
    torch.autograd.backward(loss)
    slopes, parts = value_loss(values.detach(), returns, old, weight=1 / 64, clip=clip)
    assert values.grad is not None
    assert torch.allclose(slopes, values.grad, atol=1e-7)
    assert float(parts["loss"]) == pytest.approx(float(loss.detach()))


def test_explained_variance() -> None:
    returns = np.array([0.0, 2.0, 4.0])
    assert explained_variance(returns + 7, returns) == 1
    assert explained_variance(np.ones(3), returns) == 0
    assert explained_variance(-returns, returns) == -3
    assert explained_variance(returns, np.ones(3)) is None
