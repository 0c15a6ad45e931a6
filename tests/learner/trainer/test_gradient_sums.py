"""Sums of gradients: by hand, and as exact fractions whatever their order and division."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.config.settings import LearnerConfig
from learner.trainer.optimizer import (
    LIMIT,
    Alone,
    ExactSums,
    least_tokens,
    rounded_sum,
)

NUMBERS = st.floats(-(2.0**24), 2.0**24, width=32, exclude_min=True, exclude_max=True)


class With(Alone):
    """Rank 0 of ranks whose parts are known."""

    def __init__(self, others: Sequence[ExactSums]) -> None:
        self._others, self.count = others, len(others) + 1

    def sum(self, values: Tensor) -> None:
        for other in self._others:
            values += other._sums


def summed(*ranks: Sequence[Sequence[float]]) -> list[float]:
    """Of two weights, [2, n - 2] and [2]; for each rank the gradients of its micro-batches, flat."""
    size = len(next(gradient for rank in ranks for gradient in rank))
    weights = [torch.zeros(1, size - 2), torch.zeros(2)]
    others = [_added(ExactSums(weights, Alone()), weights, rank) for rank in ranks[1:]]
    _added(ExactSums(weights, With(others)), weights, ranks[0]).finish()
    return [float(x) for weight in weights if weight.grad is not None for x in weight.grad.flatten()]


def _added(sums: ExactSums, weights: list[Tensor], gradients: Sequence[Sequence[float]]) -> ExactSums:
    for gradient in gradients:
        flat = torch.tensor(gradient)
        weights[0].grad, weights[1].grad = flat[None, :-2], flat[-2:]
        sums.add()
    return sums


def nearest(value: Fraction) -> float:
    """float32, ties to even; of a number that is far from its least and its greatest."""
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(value))) - 23
    exponent += (abs(value) >= Fraction(2) ** (exponent + 24)) - (abs(value) < Fraction(2) ** (exponent + 23))
    return float(round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent)


def on_grid(x: float) -> Fraction:
    """To a multiple of 2^-53; ties, of which float32 has a few there, to even."""
    return Fraction(round(Fraction(x) * 2**53), 2**53)


@pytest.mark.parametrize(
    ("summands", "total"),
    [
        ([1.0, 2.0, 4.0], 7.0),
        ([2.0**20, 2.0**-30, -(2.0**20)], 2.0**-30),  # float32 would have lost it
        ([1.0, 2.0**-24, 2.0**-53], 1 + 2.0**-23),  # beyond the middle of two numbers, by less than float64 sees
        ([1.0, 2.0**-24, -(2.0**-53)], 1.0),
        ([1.0, 2.0**-24], 1.0),  # the middle itself: to even
        ([1 + 2.0**-23, 2.0**-24], 1 + 2.0**-22),
        ([2.0**-53, 2.0**-54], 2.0**-53),  # nothing below the grid
        ([3.0] * 7, 21.0),
    ],
)
def test_by_hand(summands: list[float], total: float) -> None:
    assert summed([[x, -x, 0.0] for x in summands]) == [total, -total, 0.0]
    assert summed([[x, -x, 0.0] for x in summands[:1]], [], [[x, -x, 0.0] for x in summands[1:]]) == [total, -total, 0]


@given(st.data(), st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_any_order_and_division_gives_the_rounded_sum(
    data: st.DataObject, gradients: list[tuple[float, float, float]]
) -> None:
    order = data.draw(st.permutations(gradients))
    cuts = data.draw(st.lists(st.integers(0, len(order)), max_size=3).map(sorted))
    ranks = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    found = summed(*ranks)
    wanted = [nearest(sum(map(on_grid, column), Fraction(0))) for column in zip(*gradients, strict=True)]
    assert found == wanted


@given(st.integers(-(2**53), 2**53), st.integers(-(2**53), 2**53))
def test_two_parts_are_rounded_once(coarse: int, fine: int) -> None:
    high, low = coarse * 2.0**-14, fine * 2.0**-53
    found = rounded_sum(*(torch.tensor([x], dtype=torch.float64) for x in (high, low)))
    assert float(found) == nearest(Fraction(high) + Fraction(low))


@pytest.mark.parametrize("bad", [math.nan, math.inf, LIMIT, -3e38])
def test_a_number_out_of_bounds_is_seen_by_every_rank(bad: float) -> None:
    for ranks in ([[[1.0, bad, 2.0]], [[1.0, 1.0, 1.0]]], [[], [[1.0, 1.0, bad]]]):
        assert np.isnan(summed(*ranks)).all()


def test_a_weight_without_gradient_counts_as_0_and_clear_forgets() -> None:
    weights = [torch.zeros(3), torch.zeros(2)]
    sums = ExactSums(weights, Alone())
    for number in (5.0, 7.0):
        sums.clear()
        weights[0].grad, weights[1].grad = torch.full((3,), number), None
        sums.add()
    sums.finish()
    assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [[7.0] * 3, [0.0] * 2]


@pytest.mark.parametrize(("reduce", "ranks", "fine"), [("exact", 1, 512), ("fast", 1, None), ("fast", 2, 512)])
def test_one_rank_with_exact_sums_divides_its_work_as_several_do(reduce: Any, ranks: int, fine: int | None) -> None:
    config = LearnerConfig(reduce=reduce)
    assert least_tokens(config, With([ExactSums([torch.zeros(1)], Alone())] * (ranks - 1)), torch.device("cpu")) == fine
