"""Calls that wait together go to one process in one message, and each group gets the scores that it would get alone."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rewards import pool as dispatch
from rewards.call import Verdict
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores
from rewards.slot import Asked, Call
from tests.rewards.pool_case import at_once, score

FUNCTIONS = """
import os, time
def length(completions):
    if completions[0] == "die":
        time.sleep(0.3)  # an end within 0.1 s may go by without its exit code
        os._exit(3)
    if completions[0] == "hang": time.sleep(600)
    if completions[0] == "raise": raise ValueError("raised")
    return [float(len(one)) for one in completions]
def uneven(completions):
    time.sleep(0.5 if completions[0] == "slow" else 0)
    return [1.0 for _ in completions]
def slow(completions):
    time.sleep(0.05)
    return [float(os.getpid()) for _ in completions]
"""


@pytest.fixture
def function(tmp_path: Path) -> Callable[..., RewardConfig]:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return lambda of, **more: RewardConfig(use=f"{file}:{of}", **more)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quick takes up to 0.2 s here: the machine may be busy."""
    monkeypatch.setattr(dispatch, "TOGETHER_MS", 400.0)


def test_quick_calls_share_messages_and_each_group_gets_its_own_scores(
    function: Callable[..., RewardConfig], messages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "TOGETHER_MS", 10_000.0)

    async def main() -> list[Scores]:
        async with RewardPool([function("length"), function("length", name="again", weight=2.0)]) as pool:
            return await at_once(pool, ["x" * n for n in range(40)])

    found = asyncio.run(main())
    assert [scores.parts for scores in found] == [{"length": [n, n], "again": [n, n]} for n in range(40)]
    assert [scores.reward for scores in found] == [[3.0 * n, 3.0 * n] for n in range(40)]
    assert messages == [1, 1, 80]


@pytest.mark.parametrize(
    ("fatal", "status", "sentence"),
    [
        ("die", "error", "its process died: exit code 3"),
        ("hang", "timeout", "no answer within 1 s"),
        ("raise", "error", "ValueError: raised"),
    ],
)
def test_a_call_that_fails_is_the_failure_of_its_own_group_alone(
    function: Callable[..., RewardConfig], messages: list[int], patient: None, fatal: str, status: str, sentence: str
) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([function("length", timeout_s=1.0)]) as pool:
            return [*await at_once(pool, ["x", "xx", fatal, "xxxx"]), await score(pool, ["y"])]

    found = asyncio.run(main())
    assert messages[:2] == [1, 4]
    assert messages[2:] == ([1] if fatal == "raise" else [1, 1, 1, 1, 1])
    assert [scores.status[0] for scores in found] == ["ok", "ok", status, "ok", "ok"]
    assert [scores.reward[0] for scores in found] == [1.0, 2.0, None, 4.0, 1.0]
    assert sentence in found[2].failures[0]


def test_slow_calls_go_one_by_one_to_all_processes(function: Callable[..., RewardConfig], messages: list[int]) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([function("slow")], workers=2) as pool:
            await asyncio.gather(score(pool, ["a"]), score(pool, ["b"]))
            return await at_once(pool, "abcdef")

    found = asyncio.run(main())
    assert set(messages) == {1}
    assert len({scores.reward[0] for scores in found}) == 2


def test_the_slowest_call_of_a_message_says_how_long_the_next_may_take(
    function: Callable[..., RewardConfig], messages: list[int], patient: None
) -> None:
    async def main() -> None:
        async with RewardPool([function("uneven")]) as pool:
            await at_once(pool, ["slow", "x"])
            await asyncio.gather(score(pool, ["x"]), score(pool, ["x"]))

    asyncio.run(main())
    assert messages == [1, 2, 1, 1]


def test_calls_of_other_deadlines_and_large_groups_have_messages_of_their_own(
    function: Callable[..., RewardConfig], messages: list[int], patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "TOGETHER_BYTES", 1 << 20)
    rewards = [function("length", timeout_s=5.0), function("length", name="other", timeout_s=6.0)]

    async def main() -> None:
        async with RewardPool(rewards) as pool:
            await at_once(pool, ["x", "xx", "xxx"])
        async with RewardPool(rewards[:1]) as pool:
            await at_once(pool, ["x" * 600_000] * 3)

    asyncio.run(main())
    assert messages == [1, 1, 3, 3, 1, 1, 1, 1]


async def until(messages: list[int], size: int) -> None:
    while messages[-1] != size:
        await asyncio.sleep(0.01)


def test_a_cancelled_group_leaves_the_others_of_its_message_alone_and_the_last_one_ends_it(
    function: Callable[..., RewardConfig], messages: list[int], patient: None
) -> None:
    async def main() -> tuple[Scores, Scores]:
        async with RewardPool([function("uneven", timeout_s=60.0)]) as pool:
            await score(pool, ["a"])
            kept, dropped = (asyncio.create_task(score(pool, [text])) for text in ("slow", "x"))
            await until(messages, 2)
            dropped.cancel()
            first = await kept
        async with RewardPool([function("length", timeout_s=60.0)]) as pool:
            await score(pool, ["a"])
            hanging = [asyncio.create_task(score(pool, [text])) for text in ("hang", "x")]
            await until(messages, 2)
            await asyncio.sleep(0.3)  # the process has begun
            for task in hanging:
                task.cancel()
            return first, await score(pool, ["yy"])

    kept, after = asyncio.run(asyncio.wait_for(main(), 30))
    assert kept.reward == [1.0]
    assert after.reward == [2.0], "the process that hung was ended, long before its deadline"
    assert messages == [1, 2, 1, 2, 1]


class Quick:
    """In the place of a process: answers in the next turn of the event loop; some messages of several calls fail."""

    def __init__(self, memory_bytes: int, starter: object, printed: object) -> None:
        self.busy = False

    def preload(self, call: Call) -> None:
        pass

    async def scores(self, asked: Sequence[Asked]) -> list[Verdict] | None:
        assert not self.busy, "one message at a time"
        self.busy = True
        try:
            await asyncio.sleep(0)
            return None if len(asked) > 1 and asked[0].group == b"1" else [Verdict("ok", [1.0], ms=1.0) for _ in asked]
        finally:
            self.busy = False

    def close(self) -> None:
        pass


def soon(work: Callable[[], object], turns: int) -> None:
    """Calls it so many turns of the event loop later."""
    asyncio.get_running_loop().call_soon(*((soon, work, turns - 1) if turns > 1 else (work,)))


def test_no_process_is_lost_whenever_calls_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "Slot", Quick)
    rng = random.Random(0)

    async def main() -> int:
        call = Call("use", {}, {}, 1.0)
        pool = dispatch.Dispatch([call], 1, 0)
        function = dispatch.Function(call, ms=1.0)
        answered = 0
        for _ in range(2000):
            tasks = []
            for i in range(rng.randint(2, 4)):
                tasks.append(asyncio.create_task(pool.verdict(function, b"%d" % i, 1)))
                soon(tasks[-1].cancel, rng.randint(2, 9))
                for _ in range(rng.randint(0, 2)):
                    await asyncio.sleep(0)
            done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
            answered += sum(isinstance(one, Verdict) for one in done)
        last = await asyncio.wait_for(asyncio.gather(*(pool.verdict(function, b"1", 1) for _ in range(50))), 5)
        pool.close()
        return answered * (len(last) == 50)

    assert asyncio.run(main()) > 500
