"""Every loss against numbers worked by hand, and every weight form against autograd."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from cluster.errors import WrongInput
from learner.algo.advantage import LOSSES
from learner.algo.loss import (
    Taught,
    Tokens,
    explained_variance,
    function_of,
    kl_over_top,
    kl_to_reference,
    kl_weights,
    log_ratio_of,
    metrics_of,
    token_loss,
    value_loss,
    value_metrics_of,
)
from learner.algo.surrogates import SURROGATES, LossConfig
from learner.trainer.loss_trial import try_surrogate
from tests.learner import naive
from tests.learner.tokens import batch_of
from tests.learner.trainers import advantages_by_hand, distance, gradient, make_trainer, naive_gradient


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


def test_what_a_teacher_teaches_is_the_gradient_of_the_reverse_kl() -> None:
    """learner.algorithm: distill. Over all tokens of a vocabulary, weighted by the policy's probabilities, the slopes
    add up to the gradient of KL(policy || teacher) by the logits: the closed form of on-policy distillation."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(50, dtype=torch.float64, requires_grad=True), torch.randn(50).double().log_softmax(0)
    logs = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logs.exp() * (logs - teacher)).sum(), logits, retain_graph=True)
    batch = batch_of(logs.detach(), torch.zeros(50).double(), logs.detach().exp())
    slopes, _ = token_loss(logs, torch.zeros(50), batch, LossConfig(beta=1), reference=teacher, version=0)
    (found,) = torch.autograd.grad(logs, logits, slopes)
    assert (found - wanted).abs().max() < 1e-12
    assert wanted.abs().max() > 0.01


def test_the_kl_over_a_teachers_likeliest_tokens_by_hand() -> None:
    """Policy 1/2, 1/4 and the rest 1/4; teachers 1/4, 1/2, rest 1/4, and 1/4, 1/4, rest 1/2."""
    policy = torch.tensor([[0.5, 0.25]]).expand(2, 2).log()
    found = kl_over_top(policy, torch.tensor([[0.25, 0.5], [0.25, 0.25]]).log())
    two = math.log(2)
    assert found.kl.tolist() == pytest.approx([0.5 * two - 0.25 * two, 0.5 * two - 0.25 * two])
    assert found.slopes[0].tolist() == pytest.approx([0.5 * two, -0.25 * two])
    assert found.slopes[1].tolist() == pytest.approx([0.5 * 2 * two, 0.25 * two])
    assert found.mass.tolist() == [0.75, 0.75]
    share = 1 - 2.0**-14  # float32 knows such a rest well
    small = kl_over_top(torch.tensor([[share]]).log(), torch.tensor([[0.5]]).log())
    assert small.slopes.item() == pytest.approx(share * (math.log(share / 0.5) + 13 * two), rel=1e-4)
    none = kl_over_top(torch.tensor([[-40.0]]), torch.tensor([[0.0]]))  # a teacher that is sure: its rest is 2^-23
    assert none.kl.tolist() == pytest.approx([23 * two])
    assert none.slopes.abs().max() < 1e-15


def test_the_kl_over_likeliest_tokens_takes_the_place_of_the_sampled_ones() -> None:
    """In the loss, not in its gradient by the sampled tokens' logprobs, which is then the objective's alone."""
    logprobs, reference, sums = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.tensor([0.3, 0.5])
    plain = batch_of(logprobs, torch.ones(2), torch.tensor([0.25, 0.5]))
    batch = replace(plain, top_logprobs=torch.tensor([[0.5, 0.25], [0.125, 0.125]]).log())
    config = LossConfig(beta=0.1)
    rest: dict[str, Any] = {"reference": reference, "version": 0}
    slopes, parts = token_loss(logprobs, torch.zeros(2), batch, config, taught=Taught(sums, sums / 2), **rest)
    alone, without = token_loss(logprobs, torch.zeros(2), plain, LossConfig(), reference=None, version=0)
    assert torch.equal(slopes, alone)
    assert kl_weights(batch, config).tolist() == pytest.approx([0.025, 0.05])
    assert parts["loss"].item() == pytest.approx(without["loss"].item() + 0.025 * 0.3 + 0.05 * 0.5)
    metrics = metrics_of([parts, parts])
    assert metrics["policy/kl"] == pytest.approx((math.exp(-0.5) - 0.5 + math.e - 2) / 2)
    assert metrics["policy/top_mass"] == pytest.approx(0.2)
    assert metrics["policy/teacher_top_mass"] == pytest.approx(0.5)


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


def test_a_mismatch_of_nothing_is_zero_and_a_small_one_is_small() -> None:
    behavior = torch.tensor([-1.0, -2.0])
    batch = batch_of(behavior, torch.ones(2), torch.full((2,), 0.5))
    for gap, k3 in ((0.0, 0.0), (0.25, math.exp(0.25) - 1.25)):
        parts = token_loss(behavior + gap, torch.ones(2), batch, LossConfig(), reference=None, version=0)[1]
        assert metrics_of([parts])["policy/mismatch_k3"] == pytest.approx(k3, rel=1e-6, abs=1e-7)


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


# What a surrogate is given: values by hand, and gradients by the logprobs.

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


# The value's loss: by hand, and its slope against autograd's of what TRL writes.


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


# A user's own surrogate: it trains as its paper says, and one that cannot train is refused in one line.

EXAMPLE = f"{Path(__file__).parents[3] / 'examples' / 'my_loss.py'}:topr"


def topr(lp: Tensor, behavior: Tensor, advantage: Any, reference: Tensor | None, config: LossConfig) -> Tensor:
    """[T] TOPR's loss of one completion (2503.14286), in the place of tests.learner.naive.loss."""
    whole = (lp.detach() - behavior).sum().exp()
    weight = 1.0 if advantage >= 0 else min(float(whole), config.bounds.get("cap", 1.0))
    return lp * -weight * float(advantage)


@pytest.mark.parametrize("cap", [None, 1.5])
async def test_the_example_trains_a_step_as_its_paper_says(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], monkeypatch: pytest.MonkeyPatch, cap: float | None
) -> None:
    given: Any = {} if cap is None else {"cap": cap}
    config = LossConfig(ratio=EXAMPLE, bounds=given)
    assert refusal(EXAMPLE, **given) is None
    trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=60)
    found = await gradient(trainer, groups)
    monkeypatch.setattr(naive, "loss", topr)
    model = naive.load(tiny_path, adapter_path)
    assert distance(found, naive_gradient(model, None, groups, config, advantages_by_hand("batch"))) < 2e-5


def refusal(ratio: str, **bounds: Any) -> str | None:
    """What the trial says of a surrogate that cannot train."""
    try:
        try_surrogate(LossConfig.model_validate({"ratio": ratio, "bounds": bounds}))
    except WrongInput as error:
        return str(error)
    return None


def test_those_of_the_table_pass_the_trial() -> None:
    assert {ratio: refusal(ratio) for ratio in SURROGATES} == dict.fromkeys(SURROGATES)


WRONG = """
import torch
def no_setting(tokens): return tokens.weighted(tokens.ratio), tokens.ratio > 2
def objective_alone(tokens): return tokens.weighted(tokens.ratio)
def three(tokens): return tokens.ratio, tokens.ratio, tokens.ratio
def mean(tokens): return tokens.ratio.mean(), tokens.ratio > 2
def by_completion(tokens): return tokens.ratio[: len(tokens.lengths)], tokens.ratio > 2
def in_double(tokens): return tokens.ratio.double(), tokens.ratio > 2
def how_much(tokens): return tokens.ratio, tokens.ratio
def detached(tokens): return tokens.advantages, tokens.ratio > 2
def other_leaf(tokens): return torch.ones(6, requires_grad=True) * 2, tokens.ratio > 2
def infinite(tokens): return tokens.unit / (tokens.ratio > 0.9), tokens.ratio > 2
def no_slope(tokens): return (tokens.unit - 1).sqrt(), tokens.ratio > 2
def raises(tokens):
    return tokens.rho, None
def needs_more(tokens, tau): return tokens.ratio, tokens.ratio > 2
def any_setting(tokens, **settings): return tokens.ratio, tokens.ratio > settings["cap"]
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone", "wrong.py has no function 'gone'; functions there: no_setting, objective_alone, three"),
        ("objective_alone", "must return two tensors, the objective and which tokens were clipped, got a Tensor"),
        ("three", "must return two tensors, .* got a tuple of 3"),
        ("mean", r"must return one objective per token, \[6\] torch.float32 of 6 tokens, got \[\] torch.float32"),
        ("by_completion", r"must return one objective per token, .* got \[3\] torch.float32"),
        ("in_double", r"must return one objective per token, .* got \[6\] torch.float64"),
        ("how_much", r"must say of each token whether it was clipped, \[6\] torch.bool .* got \[6\] torch.float32"),
        ("detached", "returns an objective without gradient: it must be made of tokens.ratio"),
        ("other_leaf", "returns an objective that does not depend on the logprobs"),
        ("infinite", r"must have a finite objective, got \[1, 1, inf, .* for ratios of \[1, 1.11, 0.135"),
        ("no_slope", r"must have a finite gradient, got \[inf, inf"),
        ("raises", r"raised AttributeError: 'Tokens' object has no attribute 'rho' \(wrong.py, line 15\)"),
        ("needs_more", r"raised TypeError: needs_more\(\) missing 1 required positional argument: 'tau'"),
    ],
)
def test_one_that_cannot_train_is_refused_in_one_line(tmp_path: Path, name: str, sentence: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    said = refusal(f"{file}:{name}")
    assert said is not None
    assert re.fullmatch(f"learner.loss.ratio: .*{sentence}.*", said)


def test_a_setting_that_the_function_does_not_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    said = refusal(f"{tmp_path}/wrong.py:no_setting", cap=3)
    assert said is not None
    assert re.fullmatch(r"learner.loss.bounds.cap: .*no_setting has no parameter cap; .* \(got 3.0\)", said)
    assert refusal(f"{tmp_path}/wrong.py:no_setting") is None
    assert refusal(f"{tmp_path}/wrong.py:any_setting", cap=3) is None


def test_a_file_that_is_not_there_or_does_not_import_ends_the_start(tmp_path: Path, tiny_path: str) -> None:
    with pytest.raises(WrongInput, match=r"^learner.loss.ratio: there is no file .*gone.py"):
        make_trainer(tiny_path, loss=LossConfig(ratio=f"{tmp_path}/gone.py:f"))
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(WrongInput, match=r"^learner.loss.ratio: .*broken.py does not import: ModuleNotFoundError"):
        function_of(f"{tmp_path}/broken.py:f")


# TRL's losses that are no setting here, as docs/trl.md says of them: by their papers.
OF_TRL = """
import torch

def luspo(tokens):  # 2602.05261: gspo, each sequence by its length; with kind: grpo
    ratio = tokens.over_completions("mean").ratio
    each = torch.repeat_interleave(tokens.lengths, tokens.lengths)
    low = torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages)
    return each * low, low < ratio * tokens.advantages

def vespo(tokens):  # 2602.10693
    w, good = tokens.over_completions("sum").sg_ratio, tokens.advantages >= 0
    k, lam = torch.where(good, 2.0, 3.0), torch.where(good, 3.0, 2.0)
    return tokens.weighted((lam + k * w.log() - lam * w).exp()), w > torch.inf

def masked(tokens, cap):  # DeepSeek-V3.2's mask of sequences, its threshold as bounds.cap
    far = -tokens.over_completions("mean").log_ratio > cap
    dropped = far & (tokens.advantages < 0)
    return tokens.ratio * tokens.advantages * ~dropped, dropped
"""


@pytest.mark.parametrize("name", ["luspo", "vespo", "masked"])
def test_losses_of_trl_that_are_no_setting_are_a_few_lines(tmp_path: Path, name: str) -> None:
    """Values and slopes token by token, from the papers' formulas in plain numbers."""
    (tmp_path / "of_trl.py").write_text(OF_TRL)
    settings = {"cap": 1.0} if name == "masked" else {}
    assert refusal(f"{tmp_path}/of_trl.py:{name}", **settings) is None
    completions = [([0.1, -0.3], 1.0), ([0.2, -0.1, 0.05], -0.5), ([-1.5, -1.0], -1.0), ([-1.5, -1.0], 2.0)]
    logs = torch.tensor([log for ratios, _ in completions for log in ratios])
    advantages = torch.tensor([a for ratios, a in completions for _ in ratios])
    tokens = Tokens.of(torch.zeros_like(logs), logs, advantages, torch.tensor([len(r) for r, _ in completions]))
    objective, _ = function_of(f"{tmp_path}/of_trl.py:{name}")(tokens, **settings)
    (slopes,) = torch.autograd.grad(objective.sum(), tokens.unit)
    wanted = [by_hand(name, log, logs, a) for logs, a in completions for log in logs]
    assert [objective.tolist(), slopes.tolist()] == [pytest.approx(one, rel=1e-5) for one in zip(*wanted, strict=True)]


def by_hand(name: str, log: float, logs: list[float], a: float) -> tuple[float, float]:
    """Of a token in a completion: the objective, and its derivative by the token's logprob."""
    size, r = len(logs), exp(log)
    if name == "luspo":
        whole = exp(sum(logs) / size)
        bounded = min(whole * a, min(max(whole, 0.8), 1.2) * a)
        return size * bounded, size * whole * a if bounded == whole * a else 0.0
    if name == "vespo":
        whole, (k, lam) = exp(sum(logs)), (2, 3) if a >= 0 else (3, 2)
        weight = exp(lam) * whole**k * exp(-lam * whole)
        return weight * a, weight * a
    kept = a >= 0 or -sum(logs) / size <= 1.0
    return kept * r * a, kept * r * a


def test_settings_of_an_own_function_are_those_that_are_given() -> None:
    assert LossConfig(ratio=EXAMPLE).arguments == {}
    assert LossConfig(ratio=EXAMPLE, bounds={"cap": 3, "band": (0.5, 2)}).arguments == {"cap": 3.0, "band": (0.5, 2.0)}
