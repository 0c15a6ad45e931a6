"""The guessing game by hand."""

from __future__ import annotations

import pytest

from rollout.env.tasks.number_guessing import HIGHER, LOWER, NumberGuessing
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
