"""Every loss against numbers worked by hand, and every weight form against autograd."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.algo.advantage import LOSSES
from learner.algo.loss import kl_to_reference, metrics_of, token_loss
from learner.algo.surrogates import LossConfig
from tests.learner import naive
from tests.learner.tokens import batch_of


def test_slopes_with_a_reference_are_autograds() -> None:
    torch.manual_seed(0)
    behavior, advantages, coefficients = torch.randn(500) - 2, torch.randn(500), torch.rand(500)
    logprobs = (behavior + 0.5 * torch.randn(500)).requires_grad_()
    reference, config = behavior + 0.1 * torch.randn(500), LossConfig(beta=0.2)
    kept = (logprobs - behavior).exp() < 2  # where the KL's ratio is not capped
    wanted_loss = (coefficients * naive.loss(logprobs, behavior, advantages, reference, config))[kept].sum()
    (wanted,) = torch.autograd.grad(wanted_loss, logprobs)
    batch = batch_of(behavior, advantages, coefficients)
    slopes, _ = token_loss(logprobs, torch.zeros(500), batch, config, reference=reference, version=0)
    assert torch.allclose(slopes[kept], wanted[kept], rtol=1e-5, atol=1e-7)


def test_denominators_by_hand() -> None:
    lengths = np.array([2, 3, 5])
    assert LOSSES["dapo"](lengths, 8) == pytest.approx([0.1, 0.1, 0.1])
    assert LOSSES["dr_grpo"](lengths, 8) == pytest.approx([1 / 24] * 3)
    assert LOSSES["grpo"](lengths, 8) == pytest.approx([1 / 6, 1 / 9, 1 / 15])
    for coefficients in LOSSES.values():
        assert coefficients(np.array([1]), 1).tolist() == [1]
        assert coefficients(np.array([0]), 1).tolist() == [1]  # masked: of no token, but no division by 0
        assert coefficients(np.array([], np.int64), 1).shape == (0,)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    # on policy the objective is A: completions of 1 and 3 tokens with A = 2 and -1
    [("dapo", -(2 - 3) / 4), ("dr_grpo", -(2 - 3) / 20), ("grpo", -(2 / 1 - 3 / 3) / 2)],
)
def test_loss_by_hand(kind: str, wanted: float) -> None:
    lengths = np.array([1, 3])
    coefficients = torch.from_numpy(np.repeat(LOSSES[kind](lengths, 10), lengths)).float()
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    advantages = torch.tensor([2.0, -1, -1, -1])
    batch = batch_of(logprobs, advantages, coefficients)
    slopes, parts = token_loss(logprobs, torch.zeros(4), batch, LossConfig(), reference=None, version=0)
    assert parts["loss"].item() == pytest.approx(wanted)
    assert torch.allclose(slopes, -coefficients * advantages)


def test_kl_value_and_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference, behavior = torch.tensor([-1.5, -1.0, -0.5]), torch.tensor([-1.2, -2.0, -0.1])
    ratio = (logprobs - behavior).exp()
    d = reference - logprobs
    k3 = d.exp() - d - 1
    (wanted,) = torch.autograd.grad((ratio * k3).sum(), logprobs)
    kl, found = kl_to_reference(logprobs.detach(), reference, ratio.detach())
    assert kl.tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2, 0], abs=1e-6)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_the_kl_gradient_weighs_a_token_at_most_twice() -> None:
    """rho * (lp - ref) with rho of 0.5, 2 and 5, the last capped; the value is not weighed."""
    logprobs, reference = torch.full((3,), -1.0), torch.full((3,), -1.5)
    kl, slope = kl_to_reference(logprobs, reference, torch.tensor([0.5, 2.0, 5.0]))
    assert slope.tolist() == pytest.approx([0.25, 1.0, 1.0])
    assert kl.tolist() == pytest.approx([math.exp(-0.5) - 0.5] * 3)


def test_kl_gradient_is_that_of_the_kl_itself() -> None:
    """Summed over a whole vocabulary with on-policy weights, no sampling left: KL(policy || reference) by autograd."""
    torch.manual_seed(0)
    logits, other = torch.randn(50, requires_grad=True), torch.randn(50)
    reference = other.log_softmax(-1)
    logs = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((logs.exp() * (logs - reference)).sum(), logits)
    logs = logits.log_softmax(-1)
    _, slopes = kl_to_reference(logs.detach(), reference, torch.ones(50))
    (found,) = torch.autograd.grad(logs, logits, logs.detach().exp() * slopes)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_beta_weighs_the_kl() -> None:
    logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    batch = batch_of(logprobs, torch.zeros(2), torch.tensor([0.5, 0.5]))
    _, parts = token_loss(logprobs, torch.zeros(2), batch, LossConfig(beta=0.1), reference=reference, version=0)
    kl = math.exp(-0.5) - 0.5 + math.e - 2
    assert parts["loss"].item() == pytest.approx(0.05 * kl, rel=1e-5)
    assert metrics_of([parts])["policy/kl"] == pytest.approx(kl / 2, rel=1e-5)


def test_metrics_reduce_over_micro_batches() -> None:
    behavior = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    gap = torch.tensor([0.0, 0.25, -0.5, 2.0])  # the last is masked: exp(2) > 5
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0])
    whole = batch_of(behavior, torch.ones(4), torch.full((4,), 0.25), versions=[3, 3, 2, 2])

    def parts(rows: slice) -> dict[str, Tensor]:
        batch = batch_of(
            whole.behavior[rows], whole.advantages[rows], whole.coefficients[rows], whole.versions[rows].tolist()
        )
        return token_loss((behavior + gap)[rows], entropy[rows], batch, LossConfig(), reference=None, version=3)[1]

    metrics = metrics_of([parts(slice(0, 1)), parts(slice(1, 4))])
    assert metrics == pytest.approx(metrics_of([parts(slice(0, 4))]))
    assert metrics["policy/entropy"] == 2.5
    assert metrics["policy/clip_fraction"] == metrics["policy/masked_fraction"] == 0.25
    assert metrics["policy/mismatch_max"] == 2.0
    assert metrics["policy/mismatch_max_current"] == 0.25
    k3 = sum(math.exp(g) - g - 1 for g in gap.tolist()) / 4
    assert metrics["policy/mismatch_k3"] == pytest.approx(k3, rel=1e-6)
    assert metrics["loss/total"] == pytest.approx(-(1 + math.exp(0.25) + math.exp(-0.5)) / 4, rel=1e-6)


@pytest.mark.parametrize("advantages", [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
def test_tokens_that_an_own_loss_trains_without_an_advantage_unmask_no_other(
    advantages: list[float], tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text("def f(tokens): return tokens.ratio * tokens.advantages - tokens.logprobs, tokens.ratio > 9\n")
    batch = batch_of(torch.zeros(3), torch.tensor(advantages), torch.full((3,), 1 / 3))
    loss = LossConfig(ratio=f"{file}:f")
    slope, parts = token_loss(torch.zeros(3), torch.zeros(3), batch, loss, reference=None, version=0)
    assert slope[1:].count_nonzero() == 2
    assert parts["masked"] == (slope[0] == 0) == advantages[0]


def test_the_loss_is_the_mean_over_updates() -> None:
    batch = batch_of(torch.zeros(2), torch.ones(2), torch.full((2,), 0.5))
    _, parts = token_loss(torch.zeros(2), torch.ones(2), batch, LossConfig(), reference=None, version=0)
    metrics = metrics_of([parts, parts], updates=2)
    assert metrics["loss/total"] == -1
    assert metrics["policy/entropy"] == 1


def test_no_token_no_policy_metric() -> None:
    assert metrics_of([]) == {"loss/total": 0.0, "loss/trained_tokens": 0.0}


def test_a_placeholder_logprob_neither_trains_nor_breaks_a_metric() -> None:
    batch = batch_of(torch.tensor([-9999.0]), torch.ones(1), torch.ones(1), versions=[7])
    slopes, parts = token_loss(torch.tensor([-1.0]), torch.zeros(1), batch, LossConfig(), reference=None, version=0)
    assert slopes.item() == 0
    metrics = metrics_of([parts])
    assert all(math.isfinite(value) for value in metrics.values())
    assert "policy/mismatch_max_current" not in metrics
