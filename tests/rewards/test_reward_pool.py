"""The pool with real processes: whatever a function does, its group gets a name for it and the next group is scored."""

import asyncio
import math
from pathlib import Path

import pytest

from cluster.errors import WrongInput
from rewards.call import Group, Verdict
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores
from tests.rewards.pool_case import OneOf, score


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
