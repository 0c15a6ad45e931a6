"""The guessing game by hand. A second try, by hand. The calculator: exact, bounded, and an answer to anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.env.tasks.number_guessing import HIGHER, LOWER, NumberGuessing
from rollout.env.tasks.second_try import SecondTry
from rollout.env.tools.calculator import calculator
from tests.rollout.env.hand import problem, said


async def test_a_game_that_is_won() -> None:
    game = NumberGuessing(low=1, high=15, max_turns=8)
    start = await game.reset(problem("Guess.", secret=11), seed=0)
    assert start.messages == ({"role": "user", "content": "Guess."},)
    first = await game.step(said("8"))
    assert (first.messages, first.done) == (({"role": "user", "content": HIGHER},), False)
    second = await game.step(said("between 8 and 15: <answer> 12 </answer>"))
    assert second.messages == ({"role": "user", "content": LOWER},)
    last = await game.step(said(" 11\n"))
    assert (last.done, last.metrics) == (True, {"no_guess": 0.0, "found": 1.0})
    assert await game.score() == {"number_guessing": 1 - 3 / 8}


async def test_a_turn_that_is_no_guess_is_told_so_and_counts() -> None:
    game = NumberGuessing(max_turns=3)
    await game.reset(problem(secret=2), seed=0)
    step = await game.step(said("2 or 3"))
    assert step.messages == ({"role": "user", "content": "Answer with one whole number from 1 to 15."},)
    assert step.metrics == {"no_guess": 1.0}
    assert (await game.step(said("3"))).messages[0]["content"] == LOWER
    assert (await game.step(said("1"))).done
    assert await game.score() == {"number_guessing": 0.0}


async def test_a_group_guesses_one_number_and_other_seeds_others() -> None:
    states = [(await NumberGuessing().reset(problem(), seed)).state for seed in (3, 3, *range(200))]
    assert states[0] == states[1]
    assert set(states) == {str(number) for number in range(1, 16)}


async def test_a_secret_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"column 'secret': must lie in 1\.\.15"):
        await NumberGuessing().reset(problem(secret=16), seed=0)


# A second try, by hand.

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


# The calculator: exact, bounded, and an answer to anything.


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37*24", "888"),
        (" (3 + 4) * -2 ", "-14"),
        ("0.1 + 0.2", "0.3"),
        ("7/2", "3.5"),
        ("1/3", "0.333333333333"),
        ("2**-3", "0.125"),
        ("2**10 - 6/3", "1022"),
        ("1/0", "error: division by zero"),
        ("4**0.5", "error: an exponent must be a whole number"),
        ("9**9**9", "error: the result is too large"),
        ("2**4000/3", "error: the result is too large"),  # a fraction that no float holds
        ("1" * 201, "error: an expression may have 200 characters, this one has 201"),
    ],
)
def test_what_it_answers(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize("expression", ["", "2 +", "7//2", "3 4", "(1, 2)", "1e3", "__import__('os')", "5 % 3", "..."])
def test_what_is_no_arithmetic_is_told_how_to_write_it(expression: str) -> None:
    assert calculator(expression).startswith("error: write numbers with + - * / ** and parentheses")


@given(st.text("0123456789.+-*/() ", max_size=60))
def test_it_answers_anything_at_once(expression: str) -> None:
    assert calculator(expression)  # in time: a tower of powers, computed, would take hours


@given(st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=6), st.data())
def test_it_agrees_with_whole_numbers_of_python(numbers: list[int], data: st.DataObject) -> None:
    signs = data.draw(st.lists(st.sampled_from("+-*"), min_size=len(numbers), max_size=len(numbers)))
    expression = "".join(f"({number}){sign}" for number, sign in zip(numbers, signs, strict=True))[:-1]
    assert calculator(expression) == str(eval(expression))
