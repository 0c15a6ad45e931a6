"""Autograd of the surrogates against the slopes that were derived by hand, in float64: bounds on their edges included.
And what a row of the table alone changes: configuration, --help, documentation, training."""

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
from tests.learner import hand_slopes
from tests.learner.tokens import batch_of
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
        "delta": within(math.nextafter(high, math.inf), 9),
    }  # fmt: skip


def ratios_of(case: dict[str, Any]) -> list[float]:
    """Every number that some surrogate compares with a bound."""
    log_ratio = log_ratio_of(case["logprobs"], case["behavior"])
    tokens = Tokens.of(case["logprobs"], log_ratio, case["advantages"], case["lengths"])
    found = [tokens, tokens.over_completions("sum"), tokens.over_completions("mean")]
    return [r for one in found for r in one.sg_ratio.tolist() if 1e-6 < r < 10]


def apart(ratio: str, case: dict[str, Any], bounds: Any, proximal: Tensor | None = None) -> float:
    """How far slopes, loss and counts of token_loss are from those of the formulas by hand, at most."""
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
    differences = [
        (slopes + c * wanted.weight * a).abs().max(),
        parts["loss"] + (c * wanted.objective).sum(),
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
                bounds = {"cap": above, "band": (below, above), "epsilon": epsilon, "delta": delta}
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
