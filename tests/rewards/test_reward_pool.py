"""The pool with real processes: whatever a function does, its group gets a name for it and the next group is scored."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rewards.base import RewardError, RewardFailed
from rewards.call import Verdict
from rewards.check import try_rewards
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores

OneOf = Callable[..., RewardConfig]

REWARDS = """
import asyncio, ctypes, os, subprocess, time
from pathlib import Path

def good(completions, **kwargs): return [len(c) for c in completions]
def spoken(prompts, completions, answer, **kwargs):
    return [float(c[0]["content"] == a and p[-1]["role"] == "user") for p, c, a in zip(prompts, completions, answer)]
async def later(completions):
    await asyncio.sleep(0.01)
    return [0.5] * len(completions)
def none(completions): return [None, 1.0]
def nan(completions): return [float("nan"), 1.0]
def of_a_task(completions, task, own): return [float(len(c)) if t == own else None for c, t in zip(completions, task)]
def short(completions): return [1.0]
def boom(completions): raise ValueError("boom")
def loop(completions):
    while True: pass
def c_loop(completions): return [len(str(7 ** (10 ** 9)))]
def leave(completions):
    time.sleep(0.3)  # an end within 0.1 s may go by without its exit code
    os._exit(3)
def crash(completions):
    time.sleep(0.3)
    ctypes.string_at(0)
def hog(completions): return [len(bytearray(8 << 30))]
class Odd(Exception):
    def __init__(self, a, b): super().__init__(a)
def odd(completions): raise Odd("cannot be unpickled", 2)
def child(completions, where):
    Path(where).write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '600']).pid}")
    while True: time.sleep(1)
def words(completions): return ["good"] * len(completions)
def endless(completions, where): Path(where).open("a").write("called "); time.sleep(600)
"""


@pytest.fixture(scope="module")
def rewards_file(tmp_path_factory: pytest.TempPathFactory) -> OneOf:
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARDS)
    return lambda function, **more: RewardConfig(use=f"{path}:{function}", **more)


async def score(pool: RewardPool, completions: Sequence[str] = ("a", "bb"), **columns: Sequence[Any]) -> Scores:
    return await pool.score(["p"] * len(completions), completions, [[1]] * len(completions), columns)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: Sequence[int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def workers() -> list[int]:
    """Our child processes, without multiprocessing's resource tracker, which serves the whole interpreter."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").parent.parent.glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


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
        "hog": ("error", "line 25): its process may hold 4 GiB: raise rollout.reward_memory, for example to 8GiB"),
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


def test_weights_status_and_conversations(rewards_file: OneOf) -> None:
    rewards = [rewards_file("spoken", weight=2.0), rewards_file("later", weight=-1.0), rewards_file("none")]
    chat = [{"role": "user", "content": "?"}]
    said = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]

    async def main() -> Scores:
        async with RewardPool(rewards) as pool:
            scores = await pool.score([chat, chat], said, [[1], [2]], {"answer": ["yes", "yes"]})
            with pytest.raises(ValueError, match=r"one entry per completion \(2\), got lengths {'answer': 1}"):
                await pool.score([chat, chat], said, [[1], [2]], {"answer": ["yes"]})
            return scores

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
            with pytest.raises(RewardFailed, match=r"reward 'acc' \(.*my_rewards.py:boom\): error: ValueError: boom"):
                await score(pool)
            return await pool.verdicts(["p"], ["c"], [[1]], {})

    assert asyncio.run(main())[0].status == "ok"


def test_a_worker_that_dies_while_idle_costs_nothing(rewards_file: OneOf) -> None:
    async def main() -> tuple[Scores, Scores]:
        async with RewardPool([rewards_file("good")]) as pool:
            await score(pool)
            (pid,) = workers()
            os.kill(pid, signal.SIGKILL)
            first = await score(pool)
            await asyncio.sleep(0.3)
            return first, await score(pool)

    assert [scores.status for scores in asyncio.run(main())] == [["ok", "ok"]] * 2


def test_a_loaded_function_that_ends_its_process_is_told_and_loading_anew_is_not_charged(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "time.sleep(2)\n"
        "calls = []\n"
        "def mortal(completions, **columns):\n"
        "    calls.append(1)\n"
        "    return [1.0] * len(completions) if len(calls) == 1 else os._exit(3)\n"
    )

    async def main() -> list[Scores]:
        async with RewardPool([RewardConfig(use=f"{tmp_path}/slow.py:mortal", timeout_s=1.8)]) as pool:
            found = [await score(pool)]
            (pid,) = workers()
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.3)  # the pool has noticed
            return [*found, await score(pool), await score(pool)]

    first, afresh, second = asyncio.run(main())
    assert [first.status, afresh.status, second.status] == [["ok"] * 2, ["ok"] * 2, ["error"] * 2]
    assert "its process died: exit code 3" in second.failures[0]


def test_close_and_deadline_leave_no_process_behind(rewards_file: OneOf, tmp_path: Path) -> None:
    async def main(timeout_s: float) -> str:
        note = tmp_path / f"pids_{timeout_s}"
        pool = RewardPool([rewards_file("child", timeout_s=timeout_s, args={"where": str(note)})])
        scoring = asyncio.create_task(score(pool))
        if timeout_s > 1:
            while not note.exists() or len(note.read_text().split()) < 2:
                await asyncio.sleep(0.02)  # the reward function has started, and its child
            begin = time.monotonic()
            pool.close()
            assert time.monotonic() - begin < 5
        scores = await scoring
        assert gone([int(pid) for pid in note.read_text().split()], within_s=5), "closed or late, yet alive"
        pool.close()
        return scores.failures[0]

    assert "no answer within 0.5 s" in asyncio.run(main(0.5))
    assert "the reward pool was closed before it answered" in asyncio.run(main(60.0))
    assert workers() == []


def test_workers_die_with_a_killed_driver(rewards_file: OneOf, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio
        from rewards.config import RewardConfig
        from rewards.pool import RewardPool
        if __name__ == "__main__":
            uses = [RewardConfig(use={rewards_file("child").use!r}, timeout_s=60, args={{"where": {str(note)!r}}})]
            asyncio.run(RewardPool(uses).score(["p"], ["c"], [[1]], {{}}))
        """)
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    driver = subprocess.Popen([sys.executable, str(script)], env=env, cwd=Path.cwd())
    try:
        end = time.monotonic() + 20
        while not (note.exists() and len(note.read_text().split()) == 2) and time.monotonic() < end:
            time.sleep(0.05)
        worker, grandchild = map(int, note.read_text().split())
    finally:
        driver.kill()
        driver.wait()
    os.kill(grandchild, signal.SIGKILL)  # a reward function's own children outlive a killed driver: documented
    died = gone([worker], within_s=5)
    if not died:
        os.kill(worker, signal.SIGKILL)  # a failing test leaves nothing behind either
    assert died


def test_the_trial_tells_a_broken_reward_in_one_line(rewards_file: OneOf, tmp_path: Path) -> None:
    row = (["p", "p"], ["c", "d"], [[1], [2]], {"answer": ["1", "2"]})
    (tmp_path / "bad.py").write_text("import nothing_of_this_name")
    assert try_rewards([rewards_file("good"), RewardConfig(use="number")], *row).reward == [1.0, 1.0]
    for reward, sentence in [
        (rewards_file("boom"), "ValueError: boom"),
        (RewardConfig(use=f"{tmp_path}/bad.py:f"), "bad.py does not import: ModuleNotFoundError"),
        (
            RewardConfig(use="format", args={"tag": "a"}),
            "reward 'format': error: args: unknown tag; this reward takes tags",
        ),
        (rewards_file("words"), "error: returned str for sample 0, must return numbers or None: 'good'"),
    ]:
        with pytest.raises(RewardError) as caught:
            try_rewards([rewards_file("good"), reward], *row)
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_function_that_never_answers_is_waited_for_twice_at_most(
    rewards_file: OneOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time tells whether only its first call is late."""
    monkeypatch.setattr("rewards.check.PATIENCE_S", 0.4)
    endless = rewards_file("endless", timeout_s=0.2, args={"where": str(tmp_path / "calls")})
    with pytest.raises(RewardError, match="timeout: no answer within 0.2 s, so its process was killed"):
        try_rewards([endless], ["p"], ["c"], [[1]], {})
    assert (tmp_path / "calls").read_text() == "called called "
