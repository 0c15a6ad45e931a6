"""What of a batch is trained on, and with which weight, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from learner.algo.surrogates import LossConfig
from learner.algo.targets import targets_of
from learner.batch.micro_batch import read
from learner.config.settings import LearnerConfig
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
