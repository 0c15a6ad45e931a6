"""The environments of docs/adapters.md play games of gem, TextArena and gymnasium as these are: `make test-others`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.env.config import EnvConfig
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from tests.others.games import write
from tests.rollout.env.hand import problem, said

MISSING = [name for name in ("gem", "textarena", "gymnasium") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"make test-others installs {', '.join(MISSING)}")
GUESS = {
    "gem_game.py:GemGame": ("game:GuessTheNumber-v0-easy", r"\boxed{%d}"),
    "arena_game.py:ArenaGame": ("GuessTheNumber-v0-raw", "I say [%d]."),
}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """One in a process of its own, as in a run."""
    write(tmp_path)
    forks: list[Forks] = []

    def made(use: str, **args: Any) -> EnvironmentProcess:
        config = EnvConfig(use=f"{tmp_path}/{use}", args=args)
        forks.append(Forks(spec_of(config)))
        return EnvironmentProcess(forks[-1], config)

    yield made
    for one in forks:
        one.close()


@pytest.mark.parametrize("use", GUESS)
async def test_a_number_is_found_by_halving(environment: Callable[..., Any], use: str) -> None:
    game, form = GUESS[use]
    starts: list[Any] = []
    for seed in (7, 7, 2**63 - 1):
        env = environment(use, game=game)
        starts.append((await env.reset(problem("game 1"), seed)).messages)
    assert starts[0] == starts[1]
    assert "Guess The Number" in starts[0][0]["content"]
    low, high = map(int, re.findall(r"between (\d+) and (\d+)", starts[0][0]["content"])[0])
    total, step = 0.0, None
    while step is None or not step.done:
        middle = (low + high) // 2
        step = await env.step(said(form % middle))
        total += step.reward or 0.0
        if not step.done:
            (message,) = step.messages
            assert form % middle not in message["content"]
            low, high = (middle + 1, high) if "higher" in message["content"] else (low, middle - 1)
    parts = await env.score()
    await env.close()
    assert total + sum(parts.values()) == pytest.approx(1.0, abs=0.01)


async def test_a_game_that_is_cut_off_or_lost_scores_nothing(environment: Callable[..., Any]) -> None:
    env = environment("arena_game.py:ArenaGame", game="GuessTheNumber-v0-raw")
    await env.reset(problem("game 1"), 7)
    assert await env.score() == {"game": 0.0}
    assert [(await env.step(said("Hm."))).done for _ in range(2)] == [False, True]  # no move, twice
    assert await env.score() == {"game": 0.0}


async def test_a_lake_is_crossed_word_by_word(environment: Callable[..., Any]) -> None:
    env = environment("lake_game.py:LakeGame", is_slippery=False)
    start = await env.reset(problem("game 1"), 7)
    assert "[S]FFF\nFHFH" in start.messages[0]["content"]
    assert "left, down, right or up" in (await env.step(said("Hm."))).messages[0]["content"]
    words = ["Down.", "down", "not left but right", "down", "right"]
    for word in words:
        step = await env.step(said(word))
        assert (step.reward, step.done) == (0.0, False)
    assert "HF[F]G" in step.messages[0]["content"]
    step = await env.step(said("Right"))
    assert (step.reward, step.done) == (1.0, True)
