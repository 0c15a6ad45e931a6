"""Autograd of the surrogates against the slopes that were derived by hand, in float64: bounds on their edges included.
And what a row of the table alone changes: configuration, --help, documentation, training.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from learner.algo import surrogates
from learner.algo.loss import Tokens, log_ratio_of, token_loss
from learner.algo.surrogates import SURROGATES, LossConfig, Surrogate
from learner.config import load
from learner.config.settings import LearnerConfig
from tests.learner import hand_slopes, naive
from tests.learner.tokens import batch_of
from tests.learner.weighted import BOUNDS, RATIOS, clip, gspo
from tests.loss_table import table

LIMIT = 1e-7
PLACEHOLDER = -9999.0  # what some samplers write in place of a logprob


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Completions of 1 to 4 tokens, near the sampler and far from it."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    n = sum(lengths)

    def numbers(one: st.SearchStrategy[float]) -> Tensor:
        return double(draw(st.lists(one, min_size=n, max_size=n)))

    behavior = numbers(st.one_of(st.floats(-8, 0), st.just(PLACEHOLDER)))
    gaps = st.one_of(st.floats(-3, 3), st.floats(-0.01, 0.01), st.floats(-30, 30), st.just(0.0))
    advantages = st.one_of(st.floats(0.01, 3), st.floats(-3, -0.01), st.just(0.0))
    return {
        "behavior": behavior,
        "logprobs": torch.where(behavior == PLACEHOLDER, -1.0, behavior + numbers(gaps)),
        "advantages": numbers(advantages),
        "coefficients": numbers(st.floats(1e-6, 1)),
        "lengths": torch.tensor(lengths),
    }


def bounds_at(draw: Any, ratios: list[float]) -> Any:
    """Bounds like those that a configuration may have, many of them exactly on a token's ratio or right beside it."""
    edges = sorted({edge for r in ratios for edge in (r, math.nextafter(r, 0), math.nextafter(r, math.inf))})

    def within(low: float, high: float) -> float:
        on_edge = [edge for edge in edges if low <= edge <= high]
        free = st.floats(low, high)
        return float(draw(st.one_of(st.sampled_from(on_edge), free) if on_edge else free))

    low, high = within(0, 1), within(1, 8)
    return {
        "cap": within(1, 8), "band": (within(0, 1), within(1, 8)), "epsilon": (1 - low, high - 1),
        "delta": within(math.nextafter(high, math.inf), 9), "temperature": (draw(st.floats(0.1, 4)), within(0.1, 4)),
        "divergence": draw(st.floats(0.01, 1)),
    }  # fmt: skip


def ratios_of(case: dict[str, Any]) -> list[float]:
    """Every number that some surrogate compares with a bound."""
    log_ratio = log_ratio_of(case["logprobs"], case["behavior"])
    tokens = Tokens.of(case["logprobs"], log_ratio, case["advantages"], case["lengths"])
    found = [tokens, tokens.over_completions("sum"), tokens.over_completions("mean")]
    return [r for one in found for r in one.sg_ratio.tolist() if 1e-6 < r < 10]


def apart(ratio: str, case: dict[str, Any], bounds: Any, proximal: Tensor | None = None) -> float:
    """How far slopes, loss and counts of token_loss are from those of the formulas by hand, at most: of numbers above 1
    the share."""
    bounds = {name: bounds[name] for name in SURROGATES[ratio].settings}
    config = LossConfig.model_construct(
        ratio=ratio, bounds=bounds
    )  # without validation: any bounds, as the draw has them
    n, c, a = len(case["logprobs"]), case["coefficients"], case["advantages"]
    batch = batch_of(case["behavior"], a, c, lengths=case["lengths"].tolist())
    slopes, parts = token_loss(
        case["logprobs"], torch.zeros(n), batch, config, reference=None, version=0, proximal=proximal
    )
    wanted = hand_slopes.weigh(ratio, case["logprobs"], case["behavior"], a, case["lengths"], bounds, proximal)
    slopes_by_hand, loss_by_hand = -c * wanted.weight * a, -(c * wanted.objective).sum()
    differences = [
        ((slopes - slopes_by_hand) / slopes_by_hand.abs().clamp(min=1)).abs().max(),
        (parts["loss"] - loss_by_hand) / loss_by_hand.abs().clamp(min=1),
        parts["clipped"] - wanted.clipped.sum(),
        parts["masked"] - ((wanted.weight == 0) & (a != 0)).sum(),
    ]
    return float(torch.stack([one.double() for one in differences]).abs().max())  # nan if one of them is


def test_every_surrogate_has_slopes_by_hand() -> None:
    assert list(SURROGATES) == list(hand_slopes.RATIOS)


@pytest.mark.parametrize("ratio", SURROGATES)
@settings(max_examples=25)
@given(data=st.data())
def test_autograd_gives_the_slopes_that_were_derived_by_hand(ratio: str, data: st.DataObject) -> None:
    case = data.draw(cases())
    assert apart(ratio, case, bounds_at(data.draw, ratios_of(case))) <= LIMIT


@pytest.mark.parametrize("ratio", SURROGATES)
@settings(max_examples=15)
@given(case=cases())
def test_with_the_settings_of_the_papers_too(ratio: str, case: dict[str, Any]) -> None:
    assert apart(ratio, case, SURROGATES[ratio].settings) <= LIMIT


@given(data=st.data())
def test_decoupled_ppo_too(data: st.DataObject) -> None:
    case = data.draw(cases())
    stale = double(data.draw(st.lists(st.floats(-2, 2), min_size=(n := len(case["logprobs"])), max_size=n)))
    proximal = case["behavior"] + stale
    near = case | {"behavior": proximal, "logprobs": proximal + (case["logprobs"] - case["behavior"])}
    edges = [*ratios_of(near), *(near["behavior"] - case["behavior"]).exp().tolist()]
    assert apart("clip", near | {"behavior": case["behavior"]}, bounds_at(data.draw, edges), proximal) <= LIMIT


@pytest.mark.parametrize("ratio", SURROGATES)
def test_bounds_on_every_edge(ratio: str) -> None:
    """Ratios of 0.5, 1 and 2 exactly, a bound on each of them and right beside it, advantages of either sign and 0."""
    grid = [(math.log(r), a) for r in (0.5, 1.0, 2.0) for a in (1.0, -1.0, 0.0)]
    case = {
        "behavior": torch.zeros(9, dtype=torch.float64),
        "logprobs": double([gap for gap, _ in grid]),
        "advantages": double([a for _, a in grid]),
        "coefficients": torch.full((9,), 0.25, dtype=torch.float64),
        "lengths": torch.ones(9, dtype=torch.int64),
    }
    ratios = [float(x) for x in case["logprobs"].exp()]
    low, high = ratios[0], ratios[-1]
    beside = [(math.nextafter(x, 0), x, math.nextafter(x, 9)) for x in (low, high)]
    for below in beside[0]:
        for above in beside[1]:
            epsilon = (1 - below, above - 1)
            for delta in (math.nextafter(above, 9), 3.0):
                bounds = {
                    "cap": above, "band": (below, above), "epsilon": epsilon, "delta": delta, "divergence": 0.25,
                    "temperature": (below, above),
                }  # fmt: skip
                assert apart(ratio, case, bounds) <= LIMIT, bounds


@pytest.mark.parametrize(
    ("gaps", "weights"), [([5.0, 20.0], [math.exp(5), math.exp(20)]), ([0.5, 1.0], [1.6487, 2.7183])]
)
def test_a_band_without_upper_end_drops_no_token_above_one(gaps: list[float], weights: list[float]) -> None:
    config = LossConfig(ratio="icepop", bounds={"band": (0.75, math.inf)})
    batch = batch_of(torch.zeros(2), torch.ones(2), torch.ones(2))
    slopes, parts = token_loss(torch.tensor(gaps), torch.zeros(2), batch, config, reference=None, version=0)
    assert slopes.tolist() == pytest.approx([-one for one in weights], rel=1e-4)
    assert float(parts["masked"]) == 0


@pytest.mark.parametrize("length", [5, 40])  # of tokens at e^20 each: beyond what float32 holds
def test_a_ratio_that_overflowed_is_outside_of_it(length: int) -> None:
    config = LossConfig(ratio="sequence_mask", bounds={"band": (0.75, math.inf)})
    batch = batch_of(torch.full((length,), -20.0), torch.ones(length), torch.ones(length), lengths=[length])
    slopes, parts = token_loss(torch.zeros(length), torch.zeros(length), batch, config, reference=None, version=0)
    assert slopes.tolist() == [0.0] * length
    assert float(parts["masked"]) == length


def test_a_new_row_is_all_that_a_variant_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def squared(tokens: Tokens, cap: float) -> surrogates.Objective:
        return tokens.weighted(tokens.ratio.square().clamp(max=cap)), tokens.ratio.square() > cap

    with pytest.raises(ValidationError, match=r"ratio\n.*must be one of masked, .* clip, or a function of your own"):
        LearnerConfig.model_validate({"loss": {"ratio": "squared"}})
    row = Surrogate(squared, "sg(min(r^2, cap)) A log π", "nobody's", {"cap": 1.5})
    monkeypatch.setitem(SURROGATES, "squared", row)
    config = LearnerConfig.model_validate({"loss": {"ratio": "squared"}}).loss
    assert config.arguments == {"cap": 1.5}
    with pytest.raises(ValidationError, match="band: belongs to ratio: .* squared has none"):
        LossConfig(ratio="squared", bounds={"band": (0.5, 2)})
    assert "| squared | sg(min(r^2, cap)) A log π | cap 1.5 | nobody's |" in table()
    batch = batch_of(torch.zeros(2), torch.ones(2), torch.ones(2))
    slopes, _ = token_loss(torch.tensor([1.1, 2.0]).log(), torch.zeros(2), batch, config, reference=None, version=0)
    assert slopes.tolist() == pytest.approx([-1.21, -1.5])
    assert not slopes.requires_grad


def test_the_table_is_what_help_and_errors_say() -> None:
    names = " | ".join(SURROGATES)
    assert f"learner.loss.ratio = masked  ({names} | path/file.py:function)" in load.describe()
    assert "learner.loss.kind = dapo  (dapo | dr_grpo | grpo)" in load.describe()
    assert "learner.loss.advantage = batch  (group | batch | none)" in load.describe()
    for wrong, near in (("truncate", "; did you mean truncated?"), ("my_loss.py", ""), (":f", ""), ("my_loss.py:", "")):
        with pytest.raises(ValidationError) as caught:
            LearnerConfig.model_validate({"loss": {"ratio": wrong}})
        (line,) = load.sentences(caught.value, LearnerConfig)
        names = ", ".join(SURROGATES)
        rule = f"must be one of {names}, or a function of your own as path/file.py:function{near}"
        assert line == f"loss.ratio: {rule} (got '{wrong}')"


# Every ratio against numbers worked by hand, and its weights against autograd of what the papers and TRL write.

NO_LENGTHS = torch.empty(0, dtype=torch.int64)  # for ratios that look at one token at a time
PAPERS = BOUNDS["gspo"]


@pytest.mark.parametrize(
    ("name", "weights", "clipped"),
    [
        ("masked", [0, 0.5, 1, 1.9, 2, 2, 0], [0, 4, 5, 6]),
        ("truncated", [0.4, 0.5, 1, 1.9, 2, 2, 2], [4, 5, 6]),
        ("icepop", [0, 0.5, 1, 1.9, 2.5, 5, 0], [0, 6]),
        ("cispo", [0.4, 0.5, 1, 1.9, 2.5, 5, 5], [6]),
    ],
)
def test_weights_without_a_sign_by_hand(name: Any, weights: list[float], clipped: list[int]) -> None:
    ratio = torch.tensor([0.4, 0.5001, 1.0, 1.9, 2.5, 4.9999, 5.1])
    found = RATIOS[name](ratio.log(), torch.full((7,), -3.0), NO_LENGTHS, LossConfig(ratio=name).arguments)
    assert found.weight.tolist() == pytest.approx(weights, rel=3e-4)
    assert found.objective.tolist() == pytest.approx([-3 * w for w in weights], rel=3e-4)
    assert found.clipped.nonzero().flatten().tolist() == clipped


@pytest.mark.parametrize("epsilon", [None, (0.2, 0.28)])
def test_clip_by_hand(epsilon: tuple[float, float] | None) -> None:
    ratio = torch.tensor([0.5, 1.2, 1.5, 0.5, 0.9, 1.5])
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    given: Any = {} if epsilon is None else {"epsilon": epsilon}
    found = clip(ratio.log(), advantage, NO_LENGTHS, LossConfig(ratio="clip", bounds=given).arguments)
    assert found.weight.tolist() == pytest.approx([0.5, 1.2, 0, 0, 0.9, 1.5])
    assert found.objective.tolist() == pytest.approx([1.0, 2.4, 2.56, -1.6, -1.8, -3.0])
    assert found.clipped.tolist() == [False, False, True, True, False, False]


def test_gspo_by_hand() -> None:
    """Completions of 2, 1 and 3 tokens: s = sqrt(1.21 * 1) = 1.1, 1.5, and 1 from ratios that cancel out."""
    ratio = torch.tensor([1.21, 1.0, 1.5, 4.0, 0.5, 0.5])
    advantage = torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0, -1.0])
    lengths = torch.tensor([2, 1, 3])
    found = gspo(ratio.log(), advantage, lengths, LossConfig(ratio="gspo", bounds={"epsilon": (0.2, 0.28)}).arguments)
    assert found.weight.tolist() == pytest.approx([1.1, 1.1, 0, 1, 1, 1])
    assert found.objective.tolist() == pytest.approx([2.2, 2.2, 2.56, -1, -1, -1])
    assert found.clipped.tolist() == [False, False, True, False, False, False]
    narrow = gspo(torch.tensor([3.9e-4, 4.1e-4, 2e-4]), torch.ones(3), torch.tensor([1, 1, 1]), PAPERS)
    assert narrow.clipped.tolist() == [False, True, False]
    narrow = gspo(torch.tensor([-2.9e-4, -3.1e-4]), -torch.ones(2), torch.tensor([1, 1]), PAPERS)
    assert narrow.clipped.tolist() == [False, True]


@pytest.mark.parametrize("ratio", ["clip", "gspo"])
def test_a_token_that_the_sampler_found_unlikely_cannot_outweigh_a_batch(ratio: Any) -> None:
    """A gap of 5 nats, A < 0: its weight was e^5 = 148. The bound is INTELLECT-2's 4, or `delta`; A > 0 is PPO's."""
    gap, advantage, one = torch.tensor([5.0, 5.0, 1.0]), torch.tensor([-2.0, 2.0, -2.0]), torch.tensor([1, 1, 1])
    epsilon = (0.2, 0.28)
    found = RATIOS[ratio](gap, advantage, one, LossConfig(ratio=ratio, bounds={"epsilon": epsilon}).arguments)
    assert found.weight.tolist() == pytest.approx([0, 0, math.e])
    assert found.objective.tolist() == pytest.approx([-8, 2.56, -2 * math.e])
    assert found.clipped.tolist() == [True, True, False]
    lower = LossConfig(ratio=ratio, bounds={"epsilon": epsilon, "delta": 2})
    narrow = RATIOS[ratio](gap, advantage, one, lower.arguments)
    assert narrow.weight.tolist() == [0, 0, 0]
    assert narrow.objective.tolist() == pytest.approx([-4, 2.56, -4])


def test_gmpo_by_hand() -> None:
    """Two completions of 2 tokens. A > 0: 4 counts as 2, with 0.5 their mean is 1. A < 0: 0.1 counts as 0.5, 8 as 8:
    2. The tokens that are clipped have no gradient."""
    ratio, advantage = torch.tensor([4.0, 0.5, 0.1, 8.0]), torch.tensor([3.0, 3.0, -1.0, -1.0])
    arguments = LossConfig(ratio="gmpo", bounds={"epsilon": (0.5, 1.0)}).arguments
    found = RATIOS["gmpo"](ratio.log(), advantage, torch.tensor([2, 2]), arguments)
    assert found.weight.tolist() == pytest.approx([0, 1, 0, 2])
    assert found.objective.tolist() == pytest.approx([3, 3, -2, -2])
    assert found.clipped.tolist() == [True, False, True, False]
    low, high = BOUNDS["gmpo"]["epsilon"]
    assert (1 - low, 1 + high) == pytest.approx((math.exp(-0.4), math.exp(0.4)), abs=1e-4)


def test_sapo_by_hand() -> None:
    """At r = 1 the gate is a half and the weight 1; at r = 1 + ln 3 / τ it is 3/4 and the weight 3/4 r."""
    ratio = torch.tensor([1.0, 1 + math.log(3), 1 + math.log(3) / 2])
    arguments = LossConfig(ratio="sapo", bounds={"temperature": (1, 2)}).arguments
    found = RATIOS["sapo"](ratio.log(), torch.tensor([1.0, 1.0, -1.0]), NO_LENGTHS, arguments)
    assert found.weight.tolist() == pytest.approx([1, 0.75 * (1 + math.log(3)), 0.75 * (1 + math.log(3) / 2)])
    assert found.objective.tolist() == pytest.approx([2, 3, -1.5])
    assert not found.clipped.any()


def test_dppo_by_hand() -> None:
    """A token whose probability went from 0.5 to 0.7 is dropped where it was to become likelier; one from 0.001 to 0.1
    is not, but its ratio of 100 counts 20; and so the other way round."""
    before, now = torch.tensor([0.5, 0.5, 0.001, 0.7, 0.7, 0.1]), torch.tensor([0.7, 0.6, 0.1, 0.5, 0.6, 0.001])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    tokens = Tokens.of(now.log(), (now / before).log(), advantage, NO_LENGTHS)
    objective, clipped = SURROGATES["dppo"].function(tokens, **SURROGATES["dppo"].settings)
    assert objective.tolist() == pytest.approx([0, 1.2, 20, 0, -6 / 7, -0.01], rel=1e-5)
    assert clipped.tolist() == [True, False, True, True, False, False]
    against = Tokens.of(now.log(), (now / before).log(), -advantage, NO_LENGTHS)  # moved against their advantages
    objective, _ = SURROGATES["dppo"].function(against, **SURROGATES["dppo"].settings)
    assert objective.tolist() == pytest.approx([-1.4, -1.2, -20, 5 / 7, 6 / 7, 0.01], rel=1e-5)


def test_sequence_ratios_by_hand() -> None:
    """Completions of 2, 1 and 2 tokens: s = 2 * 1.25 = 2.5, 3.5, and 4 * 0.02 = 0.08."""
    logs, advantage = torch.tensor([2.0, 1.25, 3.5, 4.0, 0.02]).log(), torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0])
    lengths = torch.tensor([2, 1, 2])
    mask, truncate = RATIOS["sequence_mask"], RATIOS["sequence_truncate"]
    found = mask(logs, advantage, lengths, LossConfig(ratio="sequence_mask").arguments)
    assert found.weight.tolist() == pytest.approx([2.5, 2.5, 0, 0.08, 0.08], rel=1e-5)
    assert found.objective.tolist() == pytest.approx([2.5, 2.5, 0, 0.08, 0.08], rel=1e-5)
    assert found.clipped.tolist() == [False, False, True, False, False]
    found = mask(logs, advantage, lengths, LossConfig(ratio="sequence_mask", bounds={"band": (0.1, 4)}).arguments)
    assert found.weight.tolist() == pytest.approx([2.5, 2.5, 3.5, 0, 0], rel=1e-5)
    found = truncate(logs, advantage, lengths, LossConfig(ratio="sequence_truncate").arguments)
    assert found.weight.tolist() == pytest.approx([2.5, 2.5, 3, 0.08, 0.08], rel=1e-5)
    assert found.clipped.tolist() == [False, False, True, False, False]
    far = mask(torch.full((20,), 20.0), torch.ones(20), torch.tensor([20]), LossConfig(ratio="sequence_mask").arguments)
    assert far.objective.tolist() == [0] * 20  # e^400 is no number of float32


@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_ratio_on_its_bound_is_within_it(name: str, advantage: float) -> None:
    """All bounds at 1, where exp(0) is exact; a gate of temperature 2 is 1 there, too."""
    bounds: Any = {
        "band": (1.0, 1.0), "cap": 1.0, "epsilon": (0.0, 0.0), "delta": 1.0, "divergence": 0.0, "temperature": (2, 2),
    }  # fmt: skip
    found = RATIOS[name](torch.zeros(2), torch.full((2,), advantage), torch.tensor([1, 1]), bounds)
    assert found.weight.tolist() == [1, 1]
    assert found.objective.tolist() == [advantage] * 2
    assert not found.clipped.any()


def test_a_token_without_advantage_is_not_clipped_and_no_ratio_is_infinite() -> None:
    found = clip(torch.tensor([-3.0, 1.0, 3.0]), torch.zeros(3), NO_LENGTHS, LossConfig(ratio="clip").arguments)
    assert not found.clipped.any()
    assert found.objective.tolist() == [0, 0, 0]
    far = log_ratio_of(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-9999.0, 9998.0, -1.5]))
    assert far.tolist() == [20, -20, 0.5]


LENGTHS = [100, 1, 249, 150]  # of completions: 500 tokens
CHOICES: list[dict[str, Any]] = [
    *({"ratio": ratio} for ratio in RATIOS if ratio != "gspo"),
    {"ratio": "gmpo", "bounds": {"epsilon": (0.1, 0.2)}},
    {"ratio": "sapo", "bounds": {"temperature": (3, 1)}},
    {"ratio": "dppo", "bounds": {"divergence": 0.05, "cap": 2}},
    {"ratio": "gspo", "bounds": {"epsilon": (0.2, 0.28)}},
    {"ratio": "gspo", "bounds": {"epsilon": (0.1, 0.1), "delta": 1.3}},
    {"ratio": "clip", "bounds": {"epsilon": (0.1, 0.4), "delta": 1.5}},
    {"ratio": "masked", "bounds": {"cap": 1.5, "band": (0.8, 3)}},
    {"ratio": "icepop", "bounds": {"band": (0.2, 2)}},
    {"ratio": "truncated", "bounds": {"cap": 1}},
    {"ratio": "cispo", "bounds": {"cap": 3}},
    {"ratio": "sequence_mask", "bounds": {"band": (0.95, 5)}},
    {"ratio": "sequence_truncate", "bounds": {"cap": 1.5}},
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_slopes_are_the_gradient_that_autograd_gives(choice: dict[str, Any]) -> None:
    """Of the surrogates as they are written in the papers and TRL; many tokens are clipped. Denominators are a
    completion's."""
    torch.manual_seed(0)
    repeat, config = torch.tensor(LENGTHS), LossConfig(**choice)
    advantages = torch.tensor([0.7, -1.2, -0.4, 1.5]).repeat_interleave(repeat)
    coefficients, behavior = torch.rand(4).repeat_interleave(repeat), torch.randn(500) - 2
    gap = 0.9 * torch.randn(500) + torch.tensor([0.05, 0.3, 0.02, 0.4]).repeat_interleave(repeat)
    if config.ratio.startswith("sequence"):  # whole completions whose ratios are near 2, 1, 4 and 0.5
        gap = 0.01 * torch.randn(500) + (torch.tensor([2.0, 1, 4, 0.5]).log() / repeat).repeat_interleave(repeat)
    logprobs = (behavior + gap).requires_grad_()
    split = [x.split(LENGTHS) for x in (logprobs, behavior, advantages, coefficients)]
    losses = [(c * naive.loss(lp, mu, a, None, config)).sum() for lp, mu, a, c in zip(*split, strict=True)]
    (wanted,) = torch.autograd.grad(torch.stack(losses).sum(), logprobs)
    batch = batch_of(behavior, advantages, coefficients, lengths=LENGTHS)
    slopes, parts = token_loss(logprobs, torch.zeros(500), batch, config, reference=None, version=0)
    assert not slopes.requires_grad
    assert 10 < int(parts["clipped"]) < 490 or config.ratio == "sapo"  # which has no bound
    assert int(parts["masked"]) == int((wanted == 0).sum())
    assert torch.allclose(slopes, wanted, rtol=1e-5, atol=1e-7)


def test_decoupled_by_hand() -> None:
    """pi / pi_prox is clipped, pi_prox / mu is capped at 2, and the mismatch is that of pi_prox."""
    mu = torch.full((4,), -1.0)
    stale, moved = torch.tensor([1.5, 1.5, 3.0, 0.1]), torch.tensor([1.1, 1.5, 1.1, 0.9])
    proximal = mu + stale.log()
    batch = batch_of(mu, torch.ones(4), torch.full((4,), 0.25))
    slopes, parts = token_loss(
        proximal + moved.log(), torch.zeros(4), batch, LossConfig(ratio="clip"), reference=None, version=0,
        proximal=proximal,
    )  # fmt: skip
    assert slopes.tolist() == pytest.approx([-0.25 * w for w in (1.65, 0, 2.2, 0.09)])
    assert parts["loss"].item() == pytest.approx(-0.25 * (1.65 + 1.5 * 1.28 + 2.2 + 0.09))
    assert (int(parts["clipped"]), int(parts["masked"])) == (2, 1)
    assert parts["k3"].item() == pytest.approx(sum(s - math.log(s) - 1 for s in stale.tolist()), rel=1e-5)
    assert parts["gap_max"].item() == pytest.approx(math.log(10), rel=1e-5)
    config = LossConfig(ratio="clip", bounds={"cap": 1.2})
    slopes, _ = token_loss(
        proximal + moved.log(), torch.zeros(4), batch, config, reference=None, version=0, proximal=proximal
    )
    assert slopes.tolist() == pytest.approx([-0.25 * w for w in (1.32, 0, 1.32, 0.09)])
    config = LossConfig(ratio="clip", bounds={"cap": 1})  # on which a policy that has not moved lies
    _, parts = token_loss(mu, torch.zeros(4), batch, config, reference=None, version=0, proximal=mu)
    assert int(parts["clipped"]) == 0


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (
            {"bounds": {"epsilon": [0.1, 0.1]}},
            r"epsilon: belongs to ratio: gspo, gmpo, clip, and masked has none; .*=\[0.1, 0.1\]",
        ),
        ({"bounds": {"delta": 3}}, r"bounds.delta: belongs to ratio: gspo, clip, and masked has none; .*got delta=3.0"),
        ({"ratio": "icepop", "bounds": {"cap": 3}}, r"cap: belongs to ratio: masked, .* and icepop has none"),
        ({"ratio": "cispo", "bounds": {"band": [0.5, 2]}}, r"band: belongs to ratio: masked, icepop, .* cispo has"),
        (
            {"ratio": "clip", "bounds": {"delta": 1.28}},
            r"bounds.delta: must be above 1 \+ epsilon's upper part, 1.28, .*got 1.28",
        ),
        ({"ratio": "clip", "bounds": {"epsilon": [0.2, 3.5]}}, r"bounds.delta: must be above .* 4.5, .*got 4"),
        ({"bounds": {"band": [1.1, 2]}}, r"bounds.band.0\n.*less than or equal to 1"),
        ({"bounds": {"cap": 0.5}}, r"bounds.cap\n.*greater than or equal to 1"),
        ({"bounds": {"cap": True}}, "bounds\n.*cap must be a number"),
        (
            {"bounds": {"epsilom": 1}},
            "bounds\n.*must be epsilon, delta, cap, band, temperature, divergence, got 'epsilom'",
        ),
        ({"bounds": 3}, "bounds\n.*must be given by name"),
    ],
)
def test_bounds_that_the_ratio_does_not_have_are_refused(loss: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        LearnerConfig.model_validate({"loss": loss})
    split = {"updates_per_batch": 2, "loss": {"ratio": "clip", "bounds": {"cap": 3}}}
    assert LearnerConfig.model_validate(split).loss.arguments["cap"] == 3
