"""TRL's hooks: what reward functions tell beside their values, and what they are told of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.driver.metrics import batch_metrics
from rewards.base import LONGEST_TEXT, MOST, Progress
from rewards.call import Group, score, scores
from rewards.config import RewardConfig
from rewards.pool import RewardPool
from rollout.fakes import make_group
from rollout.schema import check, with_scores

FUNCTIONS = """
def told(completions, trainer_state, log_metric, log_extra, **kwargs):
    for completion in completions:
        log_metric("length", len(completion))
    log_metric("nothing", float("nan"))
    log_metric(name="step", value=trainer_state.global_step / trainer_state.max_steps)
    log_extra(column="seen", values=[completion.upper() for completion in completions])
    return [trainer_state.epoch] * len(completions)


async def waits(completions, log_metric=None, **_):
    import asyncio
    log_metric("length", 10)
    await asyncio.sleep(0)
    log_metric("late", 1)
    return [0.0] * len(completions)
"""


async def test_what_functions_tell_stands_beside_each_completion_and_among_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    rewards = [RewardConfig(use=f"{tmp_path}/own.py:{name}") for name in ("told", "waits")]
    group = Group(["p"] * 2, ["ab", "abcd"], [[1], [2]], {}, progress=Progress(3, 12, 2))
    async with RewardPool(rewards) as pool:
        found, again = await asyncio.gather(pool.score(group), pool.score(group))
    assert found.logged == again.logged
    same = [("length", 6.5, None), ("step", 0.25, None), ("late", 1.0, None)]  # the mean of 3 and 10
    assert found.logged == [[*same, ("seen", None, "AB")], [*same, ("seen", None, "ABCD")]]
    assert found.reward == [2.0, 2.0]
    table = check(with_scores(make_group(rewards=[0.0, 0.0]), found))
    metrics = batch_metrics([table, make_group(1)], 1)
    assert {name: value for name, value in metrics.items() if name.startswith("log/")} == {
        "log/length": 6.5, "log/step": 0.25, "log/late": 1.0,
    }  # fmt: skip


def test_a_metric_is_the_mean_over_groups() -> None:
    def of(value: float) -> Any:
        def reward(completions: Sequence[str], log_metric: Any) -> list[float]:
            log_metric("x", value)
            return [0.0, 0.0]

        return reward

    group = Group(["p"] * 2, ["a", "b"], [[1], [2]], {})
    told = [score(of(value), group, {}, built_in=False).told for value in (1.0, 4.0)]
    assert [one.metrics for one in told] == [{"x": 1.0}, {"x": 4.0}]


@pytest.mark.parametrize(
    ("value", "text"),
    [("a\ud83d", "a\\ud83d"), ({"b": [1, None]}, '{"b": [1, null]}'), (b"x", "b'x'"), ("y" * 3000, "y" * LONGEST_TEXT)],
)
def test_any_value_becomes_a_text_that_can_be_kept(value: Any, text: str) -> None:
    def reward(completions: Sequence[str], log_extra: Any) -> list[float]:
        log_extra("seen", (one for one in [value, "z"]))
        return [0.0, 0.0]

    (found,) = scores(reward, [Group(["p"] * 2, ["a", "b"], [[1], [2]], {})], {}, built_in=False)
    assert found.told.extras == {"seen": [text, "z"]}


def test_a_flood_of_names_is_the_function_s_failure() -> None:
    def reward(completions: Sequence[str], log_metric: Any) -> list[float]:
        for number in range(MOST + 1):
            log_metric(f"m{number}", number)
        return [0.0]

    found = score(reward, Group(["p"], ["a"], [[1]], {}), {}, built_in=False)
    assert (found.status, "at most 64 names, and 'm64' is one more" in found.problem) == ("error", True)


def test_a_column_and_an_arg_of_these_names_are_the_user_s() -> None:
    def reward(completions: Sequence[str], trainer_state: Any, log_extra: Any) -> list[float]:
        return [float(trainer_state[0]), float(log_extra)]

    group = Group(["p"] * 2, ["a", "b"], [[1], [2]], {"trainer_state": [7, 7]})
    assert score(reward, group, {"log_extra": 5}, built_in=False).values == [7.0, 5.0]
