"""The pool with real processes: whatever a function does, its group gets a name for it and the next group is scored.
Calls of asynchronous functions wait at once, and what one of them does is the failure of its own group alone. Calls
that wait together go to one process in one message, and each group gets the scores that it would get alone.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cluster.errors import WrongInput
from rewards import pool as dispatch
from rewards.call import Group, Verdict
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores
from rewards.slot import Call, ScoreCall
from tests.rewards.pool_case import OneOf, at_once, score


def test_every_way_to_fail_has_its_name_and_the_others_go_on(rewards_file: OneOf) -> None:
    expected = {
        "good": ("ok", ""),
        "none": ("ok", ""),
        "nan": ("nan", "1 of 2 values are no finite numbers up to 1e30, first sample 0: nan"),
        "short": ("error", "returned 1 values for 2 completions"),
        "boom": ("error", "ValueError: boom (my_rewards.py, line 15)"),
        "odd": ("error", "Odd: cannot be unpickled"),
        "loop": ("timeout", "no answer within 1 s, so its process was killed"),
        "c_loop": ("timeout", "no answer within 1 s"),
        "leave": ("error", "its process died: exit code 3"),
        "crash": ("error", "its process died: signal SIGSEGV"),
        "hog": ("error", "line 25): its process may hold 4 GiB: raise rollout.process_memory, for example to 8GiB"),
        "later": ("ok", ""),
    }

    async def main() -> Scores:
        async with RewardPool(
            [rewards_file(name, timeout_s=1.0 if "loop" in name else 20.0) for name in expected], workers=2
        ) as pool:
            return await score(pool)

    scores = asyncio.run(main())
    for name, (status, sentence) in expected.items():
        told = [failure for failure in scores.failures if failure.startswith(f"reward {name!r} ")]
        assert [f": {status}: " in f and sentence in f for f in told] == ([] if status == "ok" else [True]), told
    assert scores.parts["good"] == [1.0, 2.0]
    assert scores.parts["later"] == [0.5, 0.5]
    assert scores.parts["none"] == [None, 1.0]
    assert scores.parts["nan"] == pytest.approx([math.nan, 1.0], nan_ok=True)
    assert scores.parts["loop"] == pytest.approx([math.nan, math.nan], nan_ok=True)
    assert scores.reward == [None, None]
    assert scores.status == ["error", "error"]


def test_a_watch_that_fails_costs_no_completion(rewards_file: OneOf) -> None:
    """Whatever it does, rewards are those of the same functions without it; what it said is among the parts."""
    watches = {name: rewards_file(name, watch=True, timeout_s=1.0) for name in ("boom", "nan", "loop", "none", "good")}
    trained = [rewards_file("later"), rewards_file("good", weight=2.0, name="main")]

    async def scored(*rewards: RewardConfig) -> Scores:
        async with RewardPool(rewards) as pool:
            return await score(pool)

    alone = asyncio.run(scored(*trained))
    beside = asyncio.run(scored(*watches.values(), *trained))
    assert (beside.reward, beside.status, beside.errors) == (alone.reward, alone.status, alone.errors)
    assert (alone.reward, alone.status, alone.errors) == ([2.5, 4.5], ["ok", "ok"], [None, None])
    assert [sentence.split("'")[1] for sentence in beside.failures] == ["boom", "nan", "loop"]
    found = {name: beside.parts[name] for name in watches}
    lost = [math.nan, math.nan]
    assert found["none"] == [None, 1.0]
    assert found["good"] == [1.0, 2.0]
    assert [found["boom"], found["loop"]] == [pytest.approx(lost, nan_ok=True)] * 2
    nobody = asyncio.run(scored(watches["good"]))  # as beside the rewards of an environment
    assert (nobody.reward, nobody.status, nobody.errors) == ([None, None], ["none", "none"], [None, None])


@pytest.mark.parametrize(
    ("use", "args", "right", "slow"),
    [
        ("math", {}, "<answer>4</answer>", r"$9^{9^{9^{9^9}}}$"),
        ("math", {}, "<answer>4</answer>", r"<answer>2^{3^{4^{5^{6}}}} - 2^{3^{4^{5^{6}}}}+1</answer>"),
        ("regex", {"pattern": "^(a+)+$"}, "aaa", "a" * 60 + "!"),
        ("json_schema", {}, '"aaa"', '"' + "a" * 60 + '!"'),
    ],
)  # fmt: skip
def test_late_completions_take_no_reward_of_their_group_however_little_time_it_has(
    use: str, args: dict[str, str], right: str, slow: str
) -> None:
    """As on a busy machine, where a second of computing takes many on the wall."""
    columns = {"answer": "4", "schema": {"type": "string", "pattern": "^(a+)+$"}}
    texts = [slow] * 4 + [right] * 4

    async def main() -> Scores:
        async with RewardPool([RewardConfig(use=use, args=args, timeout_s=1.5)]) as pool:
            return await pool.score(Group.of("?", texts, [[1]] * 8, columns))

    scores = asyncio.run(main())
    assert scores.parts[use][4:] == [1.0] * 4, scores
    assert all(value is not None and not value > 0 for value in scores.parts[use][:4])


def test_weights_status_and_conversations(rewards_file: OneOf) -> None:
    rewards = [rewards_file("spoken", weight=2.0), rewards_file("later", weight=-1.0), rewards_file("none")]
    chat = [{"role": "user", "content": "?"}]
    said = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]

    async def main() -> Scores:
        async with RewardPool(rewards) as pool:
            return await pool.score(Group([chat, chat], said, [[1], [2]], {"answer": ["yes", "yes"]}))

    with pytest.raises(ValueError, match=r"one entry per completion \(2\), got lengths {'answer': 1}"):
        Group([chat, chat], said, [[1], [2]], {"answer": ["yes"]})
    scores = asyncio.run(main())
    assert scores.parts == {"spoken": [1.0, 0.0], "later": [0.5, 0.5], "none": [None, 1.0]}
    assert scores.reward == [2.0 * 1.0 - 0.5, 2.0 * 0.0 - 0.5 + 1.0]
    assert scores.status == ["ok", "ok"]


def test_each_task_has_its_function_and_what_none_has_an_answer_to_has_no_reward(rewards_file: OneOf) -> None:
    """TRL's multi-task pattern: a function says None on the rows of other tasks."""
    rewards = [
        rewards_file("of_a_task", name="math", args={"own": "math"}, on_error="fail"),
        rewards_file("of_a_task", name="code", args={"own": "code"}, weight=10.0),
        rewards_file("nan", name="broken"),
    ]
    tasks = ["math", "code", "chess", "chess"]

    async def main(functions: list[RewardConfig]) -> Scores:
        async with RewardPool(functions) as pool:
            return await score(pool, completions=("a", "bb", "c", "d"), task=tasks)

    scores = asyncio.run(main(rewards[:2]))
    assert scores.parts == {"math": [1.0, None, None, None], "code": [None, 2.0, None, None]}
    assert scores.reward == [1.0, 20.0, None, None]
    assert scores.status == ["ok", "ok", "none", "none"]
    assert scores.failures == ()
    # Returns two values for four completions: a failure is never taken for having no score.
    broken = asyncio.run(main(rewards))
    assert broken.reward == [None] * 4
    assert broken.status == ["error"] * 4


def test_slow_loading_is_not_charged_and_fail_raises(rewards_file: OneOf, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time; time.sleep(1.2)\ndef f(completions): return [1.0] * len(completions)"
    )

    async def main() -> list[Verdict]:
        slow = RewardConfig(use=f"{tmp_path}/slow.py:f", timeout_s=1.0)
        async with RewardPool([slow, rewards_file("boom", on_error="fail", name="acc")]) as pool:
            with pytest.raises(WrongInput, match=r"reward 'acc' \(.*my_rewards.py:boom\): error: ValueError: boom"):
                await score(pool)
            return await pool.verdicts(Group(["p"], ["c"], [[1]], {}))

    assert asyncio.run(main())[0].status == "ok"


# Calls of asynchronous functions wait at once, and what one of them does is the failure of its own group alone.

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
def asynchronous(tmp_path: Path) -> Callable[..., RewardConfig]:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return lambda of, **more: RewardConfig(use=f"{file}:{of}", **more)


def test_asynchronous_calls_wait_at_once_and_a_late_one_is_late_alone(
    asynchronous: Callable[..., RewardConfig], messages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "TOGETHER_MS", 0.0)  # none is quick

    async def main() -> list[Scores]:
        async with RewardPool([asynchronous("asks", timeout_s=5.0)]) as pool:
            return [*await at_once(pool, ["x" * 6] * 6), *await at_once(pool, ["late", "raise", "x"])]

    found = asyncio.run(main())
    assert messages == [1, 6, 1, 3, 1]  # the late one is asked for once more
    assert [scores.reward[0] for scores in found] == [6.0] * 6 + [None, None, 6.0]
    assert "timeout: no answer within 5 s" in found[6].failures[0]
    assert "error: ValueError: raised" in found[7].failures[0]


def test_asynchronous_calls_that_block_their_process_are_made_one_by_one_from_then_on(
    asynchronous: Callable[..., RewardConfig], messages: list[int]
) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([asynchronous("asks", timeout_s=1.0)]) as pool:
            return [*await at_once(pool, ["x", "block", "x"]), *await at_once(pool, ["x", "x"])]

    found = asyncio.run(main())
    assert messages == [1, 3, 1, 1, 1, 1, 1, 1]
    assert [scores.status[0] for scores in found] == ["ok", "timeout", "ok", "ok", "ok"]


def test_asynchronous_calls_that_wait_for_each_other_are_not_late(asynchronous: Callable[..., RewardConfig]) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([asynchronous("queues", timeout_s=0.5)]) as pool:
            return await at_once(pool, ["x"] * 16)  # two at a time, for 0.1 s each

    assert {scores.status[0] for scores in asyncio.run(main())} == {"ok"}


def test_asynchronous_calls_are_shared_out_to_all_processes(asynchronous: Callable[..., RewardConfig]) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([asynchronous("queues")], workers=2) as pool:
            await asyncio.gather(score(pool, ["a"]), score(pool, ["b"]))
            return await at_once(pool, "abcdef")

    assert len({scores.reward[0] for scores in asyncio.run(main())}) == 2


def test_an_asynchronous_call_that_stops_the_event_loop_is_its_own_failure(
    asynchronous: Callable[..., RewardConfig],
) -> None:
    async def main() -> list[Scores]:
        async with RewardPool([asynchronous("asks", timeout_s=5.0)]) as pool:
            return await at_once(pool, ["x", "exit", "x"])

    found = asyncio.run(asyncio.wait_for(main(), 60))
    assert [scores.status[0] for scores in found] == ["ok", "error", "ok"]
    assert "SystemExit: 3" in found[1].failures[0]


# Calls that wait together go to one process in one message, and each group gets the scores that it would get alone.

DISPATCH_FUNCTIONS = """
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
    file.write_text(DISPATCH_FUNCTIONS)
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

    async def scores(self, asked: Sequence[ScoreCall]) -> list[Verdict] | None:
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
