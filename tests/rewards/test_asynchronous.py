"""Calls of asynchronous functions wait at once, and what one of them does is the failure of its own group alone."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rewards import pool as dispatch
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores
from tests.rewards.pool_case import at_once, score

FUNCTIONS = """
import asyncio, os, time
under_way, most, one_by_one = 0, 0, asyncio.Lock()
async def exits():
    raise SystemExit(3)
two = asyncio.Semaphore(2)
async def queues(completions):
    async with two:
        await asyncio.sleep(0.1)
    return [float(os.getpid()) for _ in completions]
async def asks(completions):
    global under_way, most
    under_way += 1
    most = max(most, under_way)
    try:
        if completions[0] == "late": await asyncio.sleep(600)
        if completions[0] == "raise": raise ValueError("raised")
        if completions[0] == "exit": await asyncio.gather(exits())
        if completions[0] == "block": time.sleep(600)
        async with one_by_one:  # of one event loop
            await asyncio.sleep(0.01)
        while most < len(completions[0]):  # until as many were under way as the text is long
            await asyncio.sleep(0.01)
        return [float(most) for _ in completions]
    finally:
        under_way -= 1
"""


@pytest.fixture
def function(tmp_path: Path) -> Callable[..., RewardConfig]:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return lambda of, **more: RewardConfig(use=f"{file}:{of}", **more)


def test_asynchronous_calls_wait_at_once_and_a_late_one_is_late_alone(
    function: Callable[..., RewardConfig], messages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "TOGETHER_MS", 0.0)  # none is quick

    async def main() -> list[Scores]:
        async with RewardPool([function("asks", timeout_s=5.0)]) as pool:
            return [*await at_once(pool, ["x" * 6] * 6), *await at_once(pool, ["late", "raise", "x"])]

    found = asyncio.run(main())
    assert messages == [1, 6, 1, 3, 1]  # the late one is asked for once more
    assert [scores.reward[0] for scores in found] == [6.0] * 6 + [None, None, 6.0]
    assert "timeout: no answer within 5 s" in found[6].failures[0]
    assert "error: ValueError: raised" in found[7].failures[0]


def test_asynchronous_calls_that_block_their_process_are_made_one_by_one_from_then_on(
    function: Callable[..., RewardConfig], messages: list[int]
) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([function("asks", timeout_s=1.0)]) as pool:
            return [*await at_once(pool, ["x", "block", "x"]), *await at_once(pool, ["x", "x"])]

    found = asyncio.run(main())
    assert messages == [1, 3, 1, 1, 1, 1, 1, 1]
    assert [scores.status[0] for scores in found] == ["ok", "timeout", "ok", "ok", "ok"]


def test_asynchronous_calls_that_wait_for_each_other_are_not_late(function: Callable[..., RewardConfig]) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([function("queues", timeout_s=0.5)]) as pool:
            return await at_once(pool, ["x"] * 16)  # two at a time, for 0.1 s each

    assert {scores.status[0] for scores in asyncio.run(main())} == {"ok"}


def test_asynchronous_calls_are_shared_out_to_all_processes(function: Callable[..., RewardConfig]) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([function("queues")], workers=2) as pool:
            await asyncio.gather(score(pool, ["a"]), score(pool, ["b"]))
            return await at_once(pool, "abcdef")

    assert len({scores.reward[0] for scores in asyncio.run(main())}) == 2


def test_an_asynchronous_call_that_stops_the_event_loop_is_its_own_failure(
    function: Callable[..., RewardConfig],
) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([function("asks", timeout_s=5.0)]) as pool:
            return await at_once(pool, ["x", "exit", "x"])

    found = asyncio.run(asyncio.wait_for(main(), 60))
    assert [scores.status[0] for scores in found] == ["ok", "error", "ok"]
    assert "SystemExit: 3" in found[1].failures[0]
