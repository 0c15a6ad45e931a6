"""A second try, by hand."""

from __future__ import annotations

import pytest

from rollout.env.tasks.second_try import SecondTry
from tests.rollout.env.hand import problem, said

COLUMNS = {"answer": "12", "metadata": '{"source_dataset": "chain_sum"}'}


@pytest.mark.parametrize(
    ("turns", "told", "reward"),
    [
        (["<answer>12</answer>"], [], 1.0),
        (["<answer>11</answer>", "<answer>12</answer>"], ["That is not right. Try again."], 0.5),
        (["twelve", "<answer>12</answer>"], ["There is no answer: write it between <answer> and </answer>."], 0.5),
        (["<answer>11</answer>", "<answer>11</answer>"], ["That is not right. Try again."], 0.0),
    ],
)
async def test_the_reward_of_the_try_that_was_right(turns: list[str], told: list[str], reward: float) -> None:
    game = SecondTry(tries=2, discount=0.5)
    await game.reset(problem(**COLUMNS), seed=0)
    steps = [await game.step(said(turn)) for turn in turns]
    assert [message["content"] for step in steps for message in step.messages] == told
    assert [step.done for step in steps] == [False] * (len(turns) - 1) + [True]
    assert await game.score() == {"second_try": reward}


async def test_a_trajectory_that_was_cut_off_before_an_answer_has_earned_nothing() -> None:
    game = SecondTry()
    await game.reset(problem(**COLUMNS), seed=0)
    assert await game.score() == {"second_try": 0.0}


async def test_problems_of_other_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="metadata is missing"):
        await SecondTry().reset(problem(answer="12"), seed=0)
