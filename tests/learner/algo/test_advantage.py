"""Advantages against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algo.advantage import ADVANTAGES, EPSILON, gae, has_signal, whitened

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


# Advantages over tokens: by hand, and against the loop that the paper writes.


def found(values: list[float], rewards: list[float], mask: list[bool], lengths: list[int], **how: float) -> list[float]:
    arrays = np.array(values), np.array(rewards), np.array(mask, bool), np.array(lengths, np.int64)
    advantages: list[float] = gae(*arrays, gamma=how.get("gamma", 1.0), lam=how.get("lam", 1.0)).tolist()
    return advantages


def test_two_trajectories_by_hand() -> None:
    values, rewards = [0.5, 1.0, 2.0, 3.0], [0.0, 0.0, 4.0, 1.0]
    # deltas: 0.5 * 1 - 0.5 = 0, 0.5 * 2 - 1 = 0, 4 - 2 = 2; and 1 - 3 = -2
    assert found(values, rewards, [True] * 4, [3, 1], gamma=0.5, lam=0.5) == [0.125, 0.5, 2.0, -2.0]
    # one step only; and to the end: the return less the value
    assert found(values, rewards, [True] * 4, [3, 1], gamma=0.5, lam=0.0) == [0.0, 0.0, 2.0, -2.0]
    assert found(values, rewards, [True] * 4, [3, 1]) == [3.5, 3.0, 2.0, -2.0]


def test_observations_are_no_steps_of_time_and_what_stands_there_is_not_read() -> None:
    nan = float("nan")
    values, rewards = [0.5, nan, nan, 1.0, 2.0], [1.0, nan, nan, 0.0, 4.0]  # a turn's reward at its last token
    mask = [True, False, False, True, True]
    # deltas: 1 + 0.5 * 1 - 0.5 = 1, 0.5 * 2 - 1 = 0, 4 - 2 = 2
    assert found(values, rewards, mask, [5], gamma=0.5, lam=0.5) == [1.125, 0.0, 0.0, 0.5, 2.0]
    # a trajectory that ends with an observation, one of which the policy sampled nothing, and one after it
    assert found([1.0, nan, nan, 2.0], [3.0, nan, nan, 5.0], [True, False, False, True], [2, 1, 1]) == [2, 0, 0, 3]


def test_a_trajectory_without_a_reward_spoils_no_other_and_of_none_there_is_nothing() -> None:
    nan = float("nan")
    assert np.isnan(found([1.0, 1.0, 1.0], [0.0, nan, 2.0], [True] * 3, [2, 1])).tolist() == [True, True, False]
    assert found([], [], [], []) == []
    assert found([], [], [], [0, 0]) == []


def naive(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    """Of one trajectory: each advantage as a sum, forwards."""
    values = [*values, 0.0]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_the_papers_sum_whatever_lies_between_the_actions(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    values, rewards, mask = rng.normal(size=count), rng.normal(size=count), rng.random(count) < 0.7
    wanted = np.zeros(count)
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        own = np.arange(start, start + length)[mask[start : start + length]]
        wanted[own] = naive(values[own].tolist(), rewards[own].tolist(), gamma, lam)
    assert gae(values, rewards, mask, np.array(lengths), gamma=gamma, lam=lam) == pytest.approx(wanted, abs=1e-12)


def test_whitened_are_those_that_train_and_no_other_counts() -> None:
    trained = np.array([True, False, True, True])
    # mean 2, variance (1 + 1 + 0) / 3
    wanted = [-(1.5**0.5), 0.0, 1.5**0.5, 0.0]
    assert whitened(np.array([1.0, 99.0, 3.0, 2.0]), trained) == pytest.approx(wanted, abs=1e-7)
    assert whitened(np.array([1.0, 2.0]), np.array([True, False])).tolist() == [0, 0]
    assert whitened(np.array([1.0, 1.0]), np.array([True, True])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("advantages", "known_to"),
    [
        ([1.0, 1.0 + 3e-8, 1.0, 1.0 - 3e-8], 0.0),  # last bits of values in float32
        ([-2e-5, 1.5e-4, 0.0, 7e-5], 0.0),
        ([4e5, 4e5 + 2, 4e5 - 2, 4e5], 0.0),  # of rewards in the hundred thousands likewise
        ([-3.0, -3.01, -3.0, -2.98], 0.02),  # of values in bfloat16
        ([0.5, 0.5, 0.5, 0.5], 0.0),
    ],
)
def test_what_differs_by_rounding_alone_is_none_of_it_whitened(advantages: list[float], known_to: float) -> None:
    assert whitened(np.array(advantages), np.ones(4, bool), known_to).tolist() == [0] * 4


@pytest.mark.parametrize("advantages", [[0.0, 3e-4], [1e4, 1e4 + 1], [-7.0, 7.0]])
def test_what_differs_by_more_is(advantages: list[float]) -> None:
    assert whitened(np.array(advantages), np.ones(2, bool)).tolist() == pytest.approx([-1, 1])
    assert np.isnan(
        whitened(np.array([1.0, np.nan]), np.ones(2, bool))
    ).all()  # a broken value does not become a calm one
