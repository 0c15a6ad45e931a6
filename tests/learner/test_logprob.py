"""The tiled logprob operation against log_softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.logprob import policy_logprobs, token_logprobs


def naive(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logs = (hidden.float() @ head.float().t() / temperature).log_softmax(-1)
    return logs.gather(1, targets[:, None]).squeeze(1), -(logs.exp() * logs).sum(-1)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def inputs(
    n: int, v: int, h: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    hidden = torch.randn(n, h).to(dtype).requires_grad_()
    return hidden, (torch.randn(v, h) * 0.7).to(dtype), torch.randint(0, v, (n,)), torch.randn(n)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    v=st.integers(2, 90),
    h=st.integers(1, 24),
    token_tile=st.integers(1, 17),
    vocab_tile=st.integers(1, 100),  # V is mostly no multiple of it, and sometimes smaller
    temperature=st.floats(0.2, 3),
    seed=st.integers(0, 1000),
)
def test_equals_naive(n: int, v: int, h: int, token_tile: int, vocab_tile: int, temperature: float, seed: int) -> None:
    hidden, head, targets, grad = inputs(n, v, h, seed)
    wanted, wanted_entropy = naive(hidden, head, targets, temperature)
    (wanted_grad,) = torch.autograd.grad(wanted, hidden, grad)
    tiles = {"token_tile": token_tile, "vocab_tile": vocab_tile}
    found, entropy = policy_logprobs(hidden, head, targets, temperature, **tiles)
    (found_grad,) = torch.autograd.grad(found, hidden, grad)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=2e-5)
    assert torch.allclose(entropy, wanted_entropy, rtol=1e-4, atol=5e-5)
    # against the size of its summands: where p[y] is nearly 1 the true gradient cancels to nearly 0
    scale = (grad.norm() * head.norm(dim=1).max() / temperature).item()
    assert (found_grad - wanted_grad).norm().item() < 1e-5 * max(wanted_grad.norm().item(), scale)
    no_grad = token_logprobs(hidden, head, targets, temperature, **tiles)
    assert not no_grad.requires_grad
    assert torch.allclose(no_grad, wanted, rtol=1e-5, atol=2e-5)


def test_gradient_at_a_real_size() -> None:
    hidden, head, targets, grad = inputs(1500, 9000, 48, 0)
    (wanted,) = torch.autograd.grad(naive(hidden, head, targets, 0.9)[0], hidden, grad)
    (found,) = torch.autograd.grad(policy_logprobs(hidden, head, targets, 0.9)[0], hidden, grad)
    assert relative(found, wanted) < 1e-5


def test_extreme_logits_stay_finite() -> None:
    hidden, head, targets, _ = inputs(4, 30, 8, 0)
    logprobs, entropy = policy_logprobs(hidden * 1e4, head, targets, 0.5, vocab_tile=7)
    torch.autograd.backward(logprobs.sum())
    assert hidden.grad is not None
    assert all(torch.isfinite(t).all() for t in (logprobs, entropy, hidden.grad))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_types_keep_float32_logits(dtype: torch.dtype, bound: float) -> None:
    hidden, head, targets, grad = inputs(200, 300, 32, 0, dtype)
    exact = hidden.detach().float().requires_grad_()
    wanted, wanted_entropy = naive(exact, head, targets, 0.7)
    (wanted_grad,) = torch.autograd.grad(wanted, exact, grad)
    found, entropy = policy_logprobs(hidden, head, targets, 0.7, vocab_tile=64)
    (found_grad,) = torch.autograd.grad(found, hidden, grad)
    assert found.dtype == torch.float32
    assert found_grad.dtype == dtype
    assert torch.allclose(found, wanted, atol=5e-5)  # logits rounded to the half type would miss by 2e-2
    assert torch.allclose(entropy, wanted_entropy, atol=bound * 10)
    assert relative(found_grad.float(), wanted_grad) < bound


def test_memory_kept_for_backward_does_not_grow_with_the_vocabulary() -> None:
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    hidden, head, targets, _ = inputs(64, 5000, 16, 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        policy_logprobs(hidden, head, targets, 1.0)
    assert saved == [64 * 16]


def test_trainable_head_is_refused() -> None:
    hidden, head, targets, _ = inputs(2, 3, 4, 0)
    with pytest.raises(ValueError, match="head: must be frozen"):
        policy_logprobs(hidden, head.requires_grad_(), targets, 1.0)
