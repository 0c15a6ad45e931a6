"""What of a batch is trained on, and with which weight, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from learner.algo.surrogates import LossConfig
from learner.algo.targets import Assessment, assess, learnable, targets_of, token_rewards
from learner.batch.micro_batch import Rows, read
from learner.config.settings import LearnerConfig, ValueConfig
from rollout.schema import SCHEMA
from tests.learner.rollouts import make_group, uniform

GROUPS: list[dict[str, Any]] = [  # completions of 2, 3 and 4 tokens, the last cut off; of 1 and 5 tokens
    {"completions": [[1] * 2, [2] * 3, [3] * 4], "rewards": [0, 1, 2], "cut": [2]},
    {"completions": [[4] * 1, [5] * 5], "rewards": [0, 4]},
]


def found_in(config: LossConfig, groups: list[dict[str, Any]] = GROUPS) -> Any:
    rows = read([make_group([7, 8], behavior=uniform, position=i, **group) for i, group in enumerate(groups)])
    return targets_of(rows, LearnerConfig(loss=config), max_completion_length=10)


@pytest.mark.parametrize(
    ("kind", "coefficients"),
    [
        # TRL with mask_truncated_completions: the tokens of the others are counted, all completions are.
        ("dapo", [1 / 11, 1 / 11, 1 / 11, 1 / 11, 1 / 11]),
        ("dr_grpo", [1 / 50] * 5),
        ("grpo", [1 / 10, 1 / 15, 1 / 5, 1 / 5, 1 / 25]),
    ],
)
def test_a_truncated_completion_counts_in_the_advantages_and_is_not_trained(kind: Any, coefficients: Any) -> None:
    config = LossConfig(kind=kind, advantage="none", beta=0.1, mask_truncated=True)
    found = found_in(config)
    assert found.trained.tolist() == [True, True, False, True, True]  # not for the KL either
    assert found.advantages.tolist() == [-1] * 2 + [0] * 3 + [1] * 4 + [-2] + [2] * 5  # of groups with it
    own = found.trained
    assert found.coefficients[own].tolist() == pytest.approx([c for c, t in zip(coefficients, own, strict=True) if t])


def test_a_teacher_says_something_of_every_completion() -> None:
    """Of one without a reward and of a group whose rewards are equal, too; cut ones are left out where they are asked
    to be."""
    groups = [GROUPS[0] | {"rewards": [0, None, 2]}, GROUPS[1] | {"rewards": [1, 1]}]
    rows = read([make_group([7, 8], behavior=uniform, position=i, **group) for i, group in enumerate(groups)])
    for masked, trained, tokens in ((False, [True] * 5, 15), (True, [True, True, False, True, True], 11)):
        loss = LossConfig(beta=1, mask_truncated=masked)
        found = targets_of(rows, LearnerConfig(algorithm="distill", loss=loss), max_completion_length=10)
        assert found.trained.tolist() == trained
        assert found.advantages.tolist() == [0.0] * 15
        assert found.coefficients[found.trained] == pytest.approx([1 / tokens] * sum(trained))


def test_truncated_completions_train_unless_masked_and_an_update_may_be_left_with_none() -> None:
    plain = found_in(LossConfig(advantage="none"))
    assert plain.trained.tolist() == [True, False, True, True, True]
    assert plain.coefficients == pytest.approx([1 / 15] * 5)
    all_cut = found_in(LossConfig(mask_truncated=True), [GROUPS[0] | {"cut": [0, 1, 2]}])
    assert not all_cut.trained.any()


@pytest.mark.parametrize(
    ("kind", "coefficients"), [("dapo", [1 / 4] * 2), ("dr_grpo", [1 / 20] * 2), ("grpo", [1 / 2, 1 / 6])]
)
def test_only_what_the_policy_sampled_counts_as_tokens_of_the_loss(kind: Any, coefficients: Any) -> None:
    masks = [[True, False], [True, False, True, True]]
    group = {"completions": [[1] * 2, [2] * 4], "rewards": [0, 1], "masks": masks}
    found = found_in(LossConfig(kind=kind, advantage="none"), [group])
    assert found.coefficients.tolist() == pytest.approx(coefficients)
    assert found.advantages.tolist() == [-0.5] * 2 + [0.5] * 4


@pytest.mark.parametrize(
    ("kind", "coefficients"),
    [("dapo", [1 / 12] * 5), ("dr_grpo", [1 / 40] * 5), ("grpo", [1 / 20, 1 / 20, 1 / 16, 1 / 8, 1 / 4])],
)
def test_a_trajectory_of_two_rows_is_one_in_every_mean(kind: Any, coefficients: Any) -> None:
    """Rewards 0, 2 and 1, 5 in two groups: the first trajectory has rows of 2 and 3 tokens, the second one of 4."""
    groups = [
        {"completions": [[1] * 2, [1] * 3, [2] * 4], "rewards": [0, 0, 2], "samples": [0, 0, 1]},
        {"completions": [[3] * 2, [4] * 1], "rewards": [1, 5]},
    ]
    found = found_in(LossConfig(kind=kind, advantage="none"), groups)
    assert found.advantages.tolist() == [-1] * 5 + [1] * 4 + [-2] * 2 + [2]  # not those of a mean over rows
    assert found.coefficients.tolist() == pytest.approx(coefficients)
    assert found.trained.tolist() == [True] * 5


def test_of_no_group_there_is_nothing_of_the_right_types() -> None:
    found, some = found_in(LossConfig(), []), found_in(LossConfig())
    for name in ("advantages", "coefficients", "trained", "update"):
        assert (getattr(found, name).shape, getattr(found, name).dtype) == ((0,), getattr(some, name).dtype)


def test_a_loss_of_ones_own_sees_every_token() -> None:
    """Unlike ours, it may have a term that does not depend on the advantage, which is 0 of the second completion."""
    own = LossConfig(advantage="none", ratio="examples/my_loss.py:topr")
    assert found_in(own).trained.tolist() == [True] * 5


# What PPO derives from a batch, by hand: where rewards lie, what is valued, and what trains.

NAN = float("nan")
PLAIN = ValueConfig(lam=1.0)


def turn(start: int, stop: int, reward: float | None) -> dict[str, Any]:
    zeros = {"generate_ms": 0.0, "env_ms": 0.0, "calls": 0, "malformed": 0}
    return {"start": start, "stop": stop, "reward": reward, **zeros}


def with_column(group: pa.Table, name: str, values: list[Any]) -> pa.Table:
    place, field = SCHEMA.get_field_index(name), SCHEMA.field(name)
    return group.set_column(place, field, pa.array(values, field.type))


def two_turns() -> pa.Table:
    """Of 5 tokens, the third an observation, with a reward of 2 for the first turn and 5 in all; and a plain one."""
    group = make_group([7, 8], [[1] * 5, [2] * 2], [5.0, 3.0], uniform)
    group = with_column(group, "loss_mask", [[True, True, False, True, True], None])
    return with_column(group, "turns", [[turn(0, 2, 2.0), turn(3, 5, None)], []])


def test_a_turns_reward_lies_at_its_end_and_the_rest_at_the_last_sampled_token() -> None:
    assert token_rewards(read([two_turns()])).tolist() == [0, 2, 0, 0, 3, 0, 3]
    ends_with_observation = with_column(two_turns(), "loss_mask", [[True, True, False, False, False], None])
    ends_with_observation = with_column(ends_with_observation, "turns", [[turn(0, 2, 2.0)], []])
    assert token_rewards(read([ends_with_observation])).tolist() == [0, 5, 0, 0, 0, 0, 3]
    plain = make_group([7, 8], [[1], [], [2, 2], []], [1.0, 2.0, None, 4.0], uniform)
    assert token_rewards(read([plain])).tolist() == [1, 0, pytest.approx(NAN, nan_ok=True)]
    assert token_rewards(read([])).tolist() == []


def test_a_turn_that_ends_with_what_was_not_sampled_is_refused() -> None:
    for first in (turn(0, 3, 1.0), turn(0, 6, 1.0), turn(2, 2, 1.0)):
        with pytest.raises(ValueError, match=r"turns: must end with a token that the policy sampled, one of row 0 is"):
            read([with_column(two_turns(), "turns", [[first], []])])


def assessed(rows: Rows, values: list[float], loss: LossConfig | None = None, config: ValueConfig = PLAIN) -> Any:
    return assess(rows, np.array(values), learnable(rows, loss or LossConfig()), config)


def test_returns_are_values_and_advantages_and_observations_have_neither() -> None:
    found = assessed(read([two_turns()]), [1, 1, NAN, 0, 2, 0, 1])
    assert found.returns.tolist() == [5, 5, 0, 3, 3, 3, 3]
    raw = np.array([4, 4, 3, 1, 3, 2])  # returns less values
    wanted = ((raw - raw.mean()) / raw.std()).tolist()
    assert found.advantages[found.trained].tolist() == pytest.approx(wanted)
    assert found.advantages[2] == 0
    metrics = found.metrics()
    assert metrics["value/mean"] == pytest.approx(5 / 6)
    assert metrics["value/explained_variance"] == pytest.approx(1 - raw.var() / np.var([5, 5, 3, 3, 3, 3]))


def test_what_is_not_trained_on_is_in_no_mean_and_all_else_trains() -> None:
    """One without a reward, and one that was cut off: neither's values are asked for. Equal rewards teach all the same,
    and coefficients and updates are GRPO's."""
    group = make_group([7, 8], [[1] * 2, [2] * 2, [3] * 2, [4]], [1.0, None, 9.0, 1.0], uniform, cut=[2])
    rows, loss = read([group]), LossConfig(mask_truncated=True)
    found = assessed(rows, [0, 0, NAN, NAN, NAN, NAN, 0], loss)
    assert found.trained.tolist() == [True, True, False, False, False, False, True]
    assert found.returns.tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert found.metrics() == {"value/mean": 0.0}
    targets = targets_of(rows, LearnerConfig(loss=loss), 10, found.advantages)
    assert targets.trained.tolist() == [True, False, False, True]
    assert targets.coefficients[targets.trained].tolist() == pytest.approx([1 / 3, 1 / 3])
    assert targets.advantages is found.advantages


@pytest.mark.parametrize(("rounding", "size"), [(2**-23, 3000.0), (2**-7, 0.8), (2**-10, 20.0)])
def test_equal_advantages_of_values_that_were_rounded_are_equal(rounding: float, size: float) -> None:
    """Two groups of three equal answers, whose values differ in their last bits; and as many that differ indeed."""
    rows = read([make_group([7, at], [[4]] * 3, [size] * 3, uniform) for at in (1, 2)])
    values = size / 2 * (1 + rounding * np.array([0.5, -0.5, 0, 0, 1, -1]))
    found = assess(rows, values, np.ones(6, bool), PLAIN, rounding)
    assert found.advantages.tolist() == [0] * 6
    assert found.metrics() == {"value/mean": pytest.approx(size / 2, rel=rounding)}
    rows = read([make_group([7, at], [[4]] * 3, [size, 0, size], uniform) for at in (1, 2)])
    found = assess(rows, values, np.ones(6, bool), PLAIN, rounding)
    assert found.advantages.std() == pytest.approx(1)
    assert found.metrics()["value/explained_variance"] == pytest.approx(0, abs=2 * rounding)


def test_of_no_group_there_is_nothing() -> None:
    found = assessed(read([]), [])
    assert found.advantages.shape == (0,)
    assert found.metrics() == {}


def test_returns_that_differ_by_rounding_alone_have_no_variance_to_explain() -> None:
    values, returns = np.array([0.5, 0.25, 0.5]), np.array([1.0, 1.001, 1.0])
    told = [
        Assessment(values, returns, np.zeros(3), np.ones(3, bool), known_to).metrics().keys() for known_to in (0.0, 0.1)
    ]
    assert told == [{"value/mean", "value/explained_variance"}, {"value/mean"}]
