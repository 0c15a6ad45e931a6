"""Advantages over tokens: by hand, and against the loop that the paper writes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algo.advantage import gae, whitened


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
