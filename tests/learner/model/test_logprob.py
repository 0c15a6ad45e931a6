"""The tiled logprob operation against log_softmax. The learner's logits are the model's own; what no setting of a
config names is found by trying, in every type.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

from learner.model import logprob
from learner.model.logprob import (
    PLAIN,
    Logits,
    Top,
    logits_of,
    policy_logprobs,
    taught_logprobs,
    token_logprobs,
)
from tests.learner.model.test_policy import SMALL, make_policy, save_model
from tests.peak import peak_bytes
from tests.rollout.data.test_model_files import changed, having

CAPPED, SCALED = Logits(cap=3.0), Logits(scale=0.25)


def naive(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, how: Logits = PLAIN
) -> tuple[Tensor, Tensor]:
    logits = how.scale * (hidden @ head.t())
    logits = logits if how.cap is None else how.cap * (logits / how.cap).tanh()
    logs = (logits / temperature).log_softmax(-1)
    return logs.gather(1, targets[:, None]).squeeze(1), -(logs.exp() * logs).sum(-1)


def slopes_of(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, grad: Tensor, how: Logits = PLAIN
) -> tuple[Tensor, Tensor]:
    """Gradients to hidden and head in the type given."""
    h, w = (tensor.detach().clone().requires_grad_() for tensor in (hidden, head))
    found = torch.autograd.grad(naive(h, w, targets, temperature, how)[0], (h, w), grad.to(hidden.dtype))
    return found[0], found[1]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def inputs(
    n: int, v: int, h: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    hidden = torch.randn(n, h).to(dtype).requires_grad_()
    return hidden, (torch.randn(v, h) * 0.7).to(dtype), torch.randint(0, v, (n,)), torch.randn(n)


@settings(max_examples=40)
@given(
    n=st.integers(1, 40),
    v=st.integers(2, 90),
    h=st.integers(1, 24),
    token_tile=st.integers(1, 17),
    vocab_tile=st.integers(1, 100),  # V is mostly no multiple of it, and sometimes smaller
    temperature=st.floats(0.2, 3),
    scale=st.sampled_from([0.0, 0.5, 100.0]),  # every word tied; usual; one word takes it all
    ties=st.booleans(),
    how=st.sampled_from([PLAIN, SCALED, CAPPED, Logits(scale=2.0, cap=30.0)]),
    seed=st.integers(0, 1000),
)
def test_equals_naive(
    n: int, v: int, h: int, token_tile: int, vocab_tile: int, temperature: float, scale: float, ties: bool, how: Logits,
    seed: int,
) -> None:  # fmt: skip
    """Values and both gradients against float64: to 1e-6, or where logits are huge to what rounding them costs."""
    hidden, head, targets, grad = inputs(n, v, h, seed)
    head = (head.round() if ties else head) * scale
    exact = naive(hidden.double(), head.double(), targets, temperature, how)
    truth = slopes_of(hidden.double(), head.double(), targets, temperature, grad, how)
    greatest = how.scale * (hidden @ head.t() / temperature).abs().max().item()
    bound = max(1e-6, 2 * torch.finfo(torch.float32).eps * greatest)
    tiles: Any = {"token_tile": token_tile, "vocab_tile": vocab_tile, "logits": how}
    trained = head.clone().requires_grad_()
    found, entropy = policy_logprobs(hidden, head, targets, temperature, **tiles)
    again, again_entropy = policy_logprobs(hidden, trained, targets, temperature, **tiles)
    no_grad = token_logprobs(hidden, head, targets, temperature, **tiles)
    assert not no_grad.requires_grad
    assert not entropy.requires_grad
    for values, wanted in (((found, again, no_grad), exact[0]), ((entropy, again_entropy), exact[1])):
        for value in values:
            assert (value - wanted).abs().max().item() < bound * (1 + exact[0].abs().max().item())
    frozen_grad = torch.autograd.grad(found, hidden, grad)[0]
    trained_grads = torch.autograd.grad(again, (hidden, trained), grad)
    # of the size of the summands: where p[y] is nearly 1 the true gradient cancels to nearly 0
    slope = grad.norm().item() * how.scale / temperature
    sizes = [slope * t.norm(dim=1).max().item() for t in (head, hidden.detach())]
    for value, i in ((frozen_grad, 0), (trained_grads[0], 0), (trained_grads[1], 1)):
        assert (value - truth[i]).norm().item() <= bound * max(truth[i].norm().item(), sizes[i])


def test_gradients_at_a_real_size() -> None:
    hidden, head, targets, grad = inputs(1500, 9000, 48, 0)
    truth = slopes_of(hidden.double(), head.double(), targets, 0.9, grad)
    (frozen,) = torch.autograd.grad(policy_logprobs(hidden, head, targets, 0.9)[0], hidden, grad)
    head.requires_grad_()
    trained = torch.autograd.grad(policy_logprobs(hidden, head, targets, 0.9)[0], (hidden, head), grad)
    for found, wanted in ((frozen, truth[0]), (trained[0], truth[0]), (trained[1], truth[1])):
        assert relative(found.double(), wanted) < 1e-6


def test_tied_embeddings_get_both_gradients() -> None:
    torch.manual_seed(0)
    table, targets = torch.randn(50, 8), torch.randint(0, 50, (20,))

    def gradient(op: Any) -> Tensor:
        weight = table.clone().requires_grad_()
        hidden = torch.tanh(torch.nn.functional.embedding(torch.arange(20), weight))
        return torch.autograd.grad(op(hidden, weight, targets, 1.0)[0].sum(), weight)[0]

    assert relative(gradient(policy_logprobs), gradient(naive)) < 1e-6


def test_extreme_logits_stay_finite() -> None:
    hidden, head, targets, _ = inputs(4, 30, 8, 0)
    logprobs, entropy = policy_logprobs(hidden * 1e4, head, targets, 0.5, vocab_tile=7)
    torch.autograd.backward(logprobs.sum())
    assert hidden.grad is not None
    assert all(torch.isfinite(t).all() for t in (logprobs, entropy, hidden.grad))


@pytest.mark.parametrize("how", [PLAIN, CAPPED])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_types_keep_float32_logits(dtype: torch.dtype, bound: float, trained: bool, how: Logits) -> None:
    hidden, head, targets, grad = inputs(200, 300, 32, 0, dtype)
    head.requires_grad_(trained)
    wanted, wanted_entropy = naive(hidden.detach().float(), head.detach().float(), targets, 0.7, how)
    wanted_grads = slopes_of(hidden.float(), head.float(), targets, 0.7, grad, how)
    found, entropy = policy_logprobs(hidden, head, targets, 0.7, logits=how, vocab_tile=64)
    found_grads = torch.autograd.grad(found, (hidden, head) if trained else (hidden,), grad)
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted, atol=5e-5)  # logits rounded to the half type would miss by 2e-2
    assert torch.allclose(entropy, wanted_entropy, atol=bound * 10)
    for found_grad, wanted_grad in zip(found_grads, wanted_grads, strict=False):
        assert found_grad.dtype == dtype
        assert relative(found_grad.float(), wanted_grad) < bound


@pytest.mark.parametrize("how", [PLAIN, CAPPED])
@pytest.mark.parametrize("trained", [False, True])
def test_new_memory_is_tiles(trained: bool, how: Logits) -> None:
    """Forward and backward: a few tiles, a few [N, H], and the head's own gradient if it is trained."""
    hidden, head, targets, grad = inputs(600, 20_000, 16, 0)
    head.requires_grad_(trained)

    def work() -> None:
        found, _ = policy_logprobs(hidden, head, targets, 1.0, logits=how, token_tile=128, vocab_tile=1024)
        torch.autograd.backward(found, grad)

    tile, states, weights = 128 * 1024 * 4, 600 * 16 * 4, 20_000 * 16 * 4 if trained else 0
    assert peak_bytes(work) < (2.5 if how == PLAIN else 3.5) * tile + 4 * states + weights + 100_000
    hidden.grad = head.grad = None
    assert peak_bytes(lambda: naive(hidden, head, targets, 1.0)[0].backward(grad)) > 100 * tile


def test_no_grad_takes_one_tile() -> None:
    hidden, head, targets, _ = inputs(600, 20_000, 16, 0)
    work = partial(token_logprobs, hidden, head, targets, 1.0, token_tile=128, vocab_tile=1024)
    assert peak_bytes(work) < 1.1 * 128 * 1024 * 4 + 100_000


# The learner's logits are the model's own; what no setting of a config names is found by trying, in every type.

IDS = torch.tensor([[5, 6, 7, 8, 9, 4, 3]])


@pytest.mark.parametrize(
    ("config", "logits"),
    [
        (LlamaConfig(**SMALL), PLAIN),
        (Gemma2Config(**SMALL, final_logit_softcapping=2.0), Logits(cap=2.0)),
        (Gemma2Config(**SMALL, final_logit_softcapping=None), PLAIN),
        (Gemma3TextConfig(**SMALL), PLAIN),
        (GraniteConfig(**SMALL, logits_scaling=4.0), Logits(scale=0.25)),
        (CohereConfig(**SMALL), Logits(scale=0.0625)),
        (HyperCLOVAXConfig(**SMALL, logits_scaling=0.5), Logits(scale=0.5)),  # which others divide by
    ],
)
def test_logprobs_are_those_of_the_models_own_logits(tmp_path: Path, config: Any, logits: Logits) -> None:
    config.initializer_range = 0.5  # logits far from 0, so that a cap bends them
    path = save_model(config, tmp_path)
    policy = make_policy(path)
    assert policy.logits == logits
    lm = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        wanted = lm(input_ids=IDS).logits[0].log_softmax(-1)[:-1].gather(1, IDS[0, 1:, None])[:, 0]
        states = policy.hidden(IDS)[:-1]
    found = token_logprobs(states, policy.head, IDS[0, 1:], 1.0, logits=policy.logits)
    assert float((found - wanted).abs().max()) < 1e-5


def test_names_of_the_config_are_read() -> None:
    assert logits_of(GraniteConfig(logits_scaling=8.0)) == Logits(scale=0.125)
    assert logits_of(CohereConfig(logit_scale=None)) == PLAIN


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["factor", "cap", "one word"])
def test_what_no_setting_names_is_found_in_every_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str
) -> None:
    """On small weights, whose logits are near 0: in bfloat16 rounding hides each of these from a look at the logits."""
    path = save_model(LlamaConfig(**SMALL, initializer_range=0.02), tmp_path)
    make_policy(path, dtype=dtype)
    plain = LlamaForCausalLM.forward

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(self, *args, **kwargs)
        if kind == "factor":
            out.logits = out.logits * 1.02
        elif kind == "cap":
            out.logits = 200 * (out.logits / 200).tanh()
        else:
            out.logits[..., -1] -= 1.0
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", changed)
    with pytest.raises(ValueError, match="does something to its logits after the output embedding"):
        make_policy(path, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers_that_a_type_does_not_hold_are_told_as_such(tmp_path: Path, dtype: str) -> None:
    path = save_model(LlamaConfig(**SMALL), tmp_path)
    most = torch.full((SMALL["intermediate_size"], SMALL["hidden_size"]), {"float32": 3e38, "float16": 6e4}[dtype])
    changed(tmp_path, having(model__layers__0__mlp__up_proj__weight=most))
    with pytest.raises(ValueError, match=f"^model.dtype: .* numbers in {dtype} that are not finite, though all of its"):
        make_policy(path, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_that_change_before_the_head_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    path = save_model(LlamaConfig(**SMALL), tmp_path)

    def divided(self: Any, input_ids: Any, **_: Any) -> Any:  # as MiniCPM does, by a number of its config
        states = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(states / 1.05))

    monkeypatch.setattr(LlamaForCausalLM, "forward", divided)
    with pytest.raises(ValueError, match="does something to its final states"):
        make_policy(path, dtype=dtype)


# The KL to a teacher over its likeliest tokens.


def kl_of(hidden: Tensor, head: Tensor, top: Top, temperature: float, how: Logits = PLAIN) -> Tensor:
    """From whole softmaxes; the teacher's rest is that of its k logprobs."""
    logits = how.scale * (hidden @ head.t())
    logits = logits if how.cap is None else how.cap * (logits / how.cap).tanh()
    every = (logits / temperature).log_softmax(-1)
    own, teacher = every.gather(1, top.ids), top.logprobs.double()
    kl = (own.exp() * (own - teacher)).sum(-1)
    if top.ids.shape[1] == len(head):
        return kl
    rest = every.exp().scatter(1, top.ids, 0.0).sum(-1)
    return kl + rest * (rest / (1 - teacher.exp().sum(-1))).log()


def likeliest(n: int, v: int, k: int) -> Top:
    logs = torch.randn(n, v, dtype=torch.float64).log_softmax(-1).topk(k)
    return Top(logs.indices, logs.values)


@pytest.mark.parametrize("how", [PLAIN, SCALED, CAPPED, Logits(scale=2.0, cap=30.0)])
@pytest.mark.parametrize("k", [1, 3, 30])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_kl_to_a_teacher_is_that_of_whole_softmaxes(dtype: torch.dtype, bound: float, k: int, how: Logits) -> None:
    """Values and the gradient of both outputs together, of 30 words in tiles of 8; k = 30 is the whole KL."""
    hidden, head, targets, grad = inputs(40, 30, 8, 0, dtype)
    top, of_kl = likeliest(40, 30, k), torch.randn(40)
    targets[:5] = top.ids[:5, 0]  # as a policy that is sure samples
    h, w = (tensor.detach().double().requires_grad_() for tensor in (hidden, head))
    exact = naive(h, w, targets, 0.7, how)[0], kl_of(h, w, top, 0.7, how)
    wanted = torch.autograd.grad(exact, (h, w), (grad.double(), of_kl.double()))
    for trained in (False, True):
        head = head.detach().requires_grad_(trained)
        given = Top(top.ids, top.logprobs.to(dtype))
        found = taught_logprobs(hidden, head, targets, given, 0.7, logits=how, token_tile=7, vocab_tile=8)
        assert (found.kl - exact[1]).abs().max() < bound * 10
        assert (found.logprobs - exact[0]).abs().max() < bound * 10
        assert not any(one.requires_grad for one in (found.mass, found.entropy))
        slopes = torch.autograd.grad(
            (found.logprobs, found.kl), (hidden, head) if trained else (hidden,), (grad.to(dtype), of_kl.to(dtype))
        )
        for one, other in zip(slopes, wanted, strict=False):
            assert relative(one.double(), other) < bound


def test_a_policy_that_is_its_teacher_learns_nothing() -> None:
    hidden, head, targets, _ = inputs(40, 30, 8, 0, torch.float64)
    best = (hidden @ head.t()).detach().log_softmax(-1).topk(4)
    found = taught_logprobs(hidden, head, targets, Top(best.indices, best.values), 1.0)
    (slope,) = torch.autograd.grad(found.kl.sum(), hidden)
    assert slope.abs().max() < 1e-12
    assert found.kl.abs().max() < 1e-12
    assert torch.allclose(found.mass, best.values.exp().sum(-1))


@pytest.mark.parametrize("trained", [False, True])
def test_the_kl_in_bfloat16_and_of_tokens_that_take_it_all(trained: bool) -> None:
    """Near float32 where both are of a usual size; finite and bounded where a rest is 0 for the one or the other."""
    hidden, head, targets, _ = inputs(200, 300, 32, 0, torch.bfloat16)
    head.requires_grad_(trained)
    top = likeliest(200, 300, 5)
    top = Top(top.ids, top.logprobs.float())
    h = hidden.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(kl_of(h, head.detach().double(), top, 0.7).sum(), h)
    found = taught_logprobs(hidden, head, targets, top, 0.7)
    (slope,) = torch.autograd.grad(found.kl.sum(), hidden)
    assert (found.kl.dtype, slope.dtype) == (torch.float32, torch.bfloat16)
    assert relative(slope.double(), wanted) < 1e-2
    sure = Top(top.ids, torch.tensor([0.0, -40, -50, -60, -70]).expand(200, 5))
    for states, teacher in ((hidden * 1e3, top), (hidden, sure), (hidden * 1e3, sure), (hidden * 0, sure)):
        found = taught_logprobs(states, head, targets, teacher, 0.7)
        (slope,) = torch.autograd.grad(found.kl.sum(), hidden)
        assert all(torch.isfinite(one).all() for one in (found.kl, found.mass, slope))
        assert found.kl.min() > -1e-5


@pytest.mark.parametrize("trained", [False, True])
def test_new_memory_for_a_teacher_is_states_and_a_few_rows(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what logprobs take: one more [N, H], and rows of the head for a few tokens at a time."""
    monkeypatch.setattr(logprob, "READ_AT_ONCE", 10_000)
    hidden, head, targets, grad = inputs(600, 20_000, 64, 0)
    head.requires_grad_(trained)
    top = likeliest(600, 20_000, 20)
    top = Top(top.ids, top.logprobs.float())

    def work(*, taught: bool) -> None:
        given = (hidden, head, targets)
        tiles: Any = {"token_tile": 128, "vocab_tile": 1024}
        if not taught:
            torch.autograd.backward(policy_logprobs(*given, 1.0, **tiles)[0], grad)
            return
        found = taught_logprobs(*given, top, 1.0, **tiles)
        torch.autograd.backward((found.logprobs, found.kl), (grad, grad))

    plain = peak_bytes(lambda: work(taught=False))
    hidden.grad = head.grad = None
    more = peak_bytes(lambda: work(taught=True)) - plain
    states, numbers = 600 * 64 * 4, 600 * 20 * 4
    assert 0 < more < 2 * states + 12 * numbers + 3 * 40_000 < 600 * 20 * 64 * 4
