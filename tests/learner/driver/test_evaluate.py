"""The held-out score where a reward function fails, or gives no score."""

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from learner.driver.evaluate import accuracy_reward, evaluate
from rewards.config import RewardConfig
from rollout.fakes import make_group, make_problem
from rollout.schema import Problem
from rollout.types import Sampling
from tests.learner.loops import configure

CONFIG = configure(rewards=[{"use": "vowels"}, {"use": "other", "weight": 0.1}])


class Generator:
    """A Producer whose completions were scored so: (number of `vowels`, status)."""

    def __init__(self, said: list[tuple[float | None, str]]) -> None:
        self.said = said

    async def requests(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int, lost: object
    ) -> pa.Table:
        assert [sampling.temperature for sampling in samplings] == [0] * len(problems)
        return pa.concat_tables(map(self.group, problems))

    away = False

    async def present(self) -> None:
        """It always is."""

    def group(self, problem: Problem) -> pa.Table:
        value, status = self.said[problem.position]
        reward = None if value is None or math.isnan(value) else value
        parts = [[("vowels", value), ("other", 5.0)]]
        return make_group(problem.position, rewards=[reward], reward_parts=parts, reward_status=[status])


async def score(*said: tuple[float | None, str]) -> dict[str, float]:
    generator: Any = Generator(list(said))
    problems = [make_problem(position) for position in range(len(said))]
    return (await evaluate([generator], problems, CONFIG, step=0)).metrics


async def test_a_failure_counts_as_wrong_and_unscored_not_at_all() -> None:
    found = await score((1.0, "ok"), (None, "ok"), (math.nan, "timeout"), (0.5, "error"), (None, "none"))
    assert found["eval/accuracy"] == pytest.approx((1.0 + 0.0 + 0.5) / 3)
    assert found["eval/unscored"] == 2
    assert found["eval/failed"] == pytest.approx(2 / 5)
    assert found["eval/vowels"] == 0.75


def test_what_counts_as_accuracy() -> None:
    rewards = [RewardConfig(use="format", weight=2.0), RewardConfig(use="mine.py:accuracy", weight=0.5)]
    assert accuracy_reward(rewards, None) == accuracy_reward(rewards, "accuracy") == "accuracy"
    assert accuracy_reward(rewards[:1], None) == accuracy_reward(rewards[:1], "format") == "format"
    with pytest.raises(ValueError, match="data.eval.reward: must be accuracy where .*, got format; give the function"):
        accuracy_reward(rewards, "format")


async def test_without_any_score_there_is_no_accuracy_and_where_all_have_one_no_count() -> None:
    found = await score((None, "ok"), (None, "none"))
    assert "eval/accuracy" not in found
    assert found["eval/unscored"] == 2
    assert "eval/unscored" not in await score((1.0, "ok"))
