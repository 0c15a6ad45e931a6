"""Advantages against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algo.advantage import ADVANTAGES, EPSILON, has_signal

NAN = float("nan")


def advantages(kind: str, rewards: list[list[float]]) -> list[list[float]]:
    return [one.tolist() for one in ADVANTAGES[kind]([np.array(group) for group in rewards])]


def test_group_divides_by_the_sample_deviation_of_its_group() -> None:
    # mean 1, squares 1 + 1 + 1 + 1 over n - 1 = 3
    std = (4 / 3) ** 0.5 + EPSILON
    assert advantages("group", [[0, 2, 0, 2]])[0] == pytest.approx([-1 / std, 1 / std, -1 / std, 1 / std], rel=1e-12)


def test_batch_divides_by_the_deviation_of_all_rewards() -> None:
    """As they are, not centred (then the squares would be 10): TRL's scale_rewards="batch"."""
    # mean 14 / 6, squares 4 + 1 + 25 + 9 + 9 = 48 less 14 * 14 / 6, over n - 1 = 5
    std = ((48 - 14 * 14 / 6) / 5) ** 0.5 + EPSILON
    found = advantages("batch", [[0, 2], [1, 5], [3, 3]])
    assert found[0] == pytest.approx([-1 / std, 1 / std], rel=1e-12)
    assert found[1] == pytest.approx([-2 / std, 2 / std], rel=1e-12)
    assert found[2] == [0, 0]
    assert advantages("batch", [[0, 2]])[0] == pytest.approx([-1 / (2**0.5 + EPSILON), 1 / (2**0.5 + EPSILON)])


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_batch_with_one_reward_or_none_is_zero(kind: str) -> None:
    assert advantages(kind, [[NAN, 0.7], [NAN, NAN]]) == [[0, 0], [0, 0]]


def test_one_group_with_signal_among_solved_and_unsolved_ones_is_not_blown_up() -> None:
    solved, unsolved = [[1.0] * 8] * 4, [[0.0] * 8] * 3
    found = advantages("batch", [[1.0] + [0.0] * 7, *solved, *unsolved])
    # 33 of 64 rewards are 1: a deviation of 0.5038; that of the centred ones is 0.1178, and the advantage 7.4
    assert found[0][0] == pytest.approx(0.875 / (((33 - 33**2 / 64) / 63) ** 0.5 + EPSILON), rel=1e-12)
    assert found[0][0] < 1.75


def test_none_only_centres() -> None:
    assert advantages("none", [[0, 0, 3], [1, 2, 3]]) == [[-1, -1, 2], [-1, 0, 1]]


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_samples_without_a_reward_are_left_out(kind: str) -> None:
    with_nan = advantages(kind, [[0, NAN, 2], [NAN, 1, 4]])
    without = advantages(kind, [[0, 2], [1, 4]])
    assert with_nan[0] == [without[0][0], 0, without[0][1]]
    assert with_nan[1] == [0, *without[1]]


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("group", [[0.1, 0.1, 0.1], [NAN, 0.7, NAN], [NAN, NAN], [0.3]])
def test_no_signal_is_exactly_zero(kind: str, group: list[float]) -> None:
    # 0.1 three times: the rounded mean differs from 0.1, so that a computed deviation would not be 0
    assert advantages(kind, [group, [0, 1]])[0] == [0] * len(group)
    assert not has_signal(np.array(group))


@pytest.mark.parametrize("kind", ADVANTAGES)
@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=8), shift=st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift(kind: str, rewards: list[float], shift: float) -> None:
    rounded = [round(r, 2) for r in rewards]
    plain, shifted = advantages(kind, [rounded, [round(r + round(shift, 2), 2) for r in rounded]])
    assert sum(plain) == pytest.approx(0, abs=1e-9)
    assert plain == pytest.approx(shifted, abs=1e-6)  # "batch" has one divisor for both
