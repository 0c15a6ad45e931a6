"""How the pool's processes end, and that none is left. What a reward process may see of the environment and hold in
memory, with real processes.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.errors import WrongInput
from rewards import limits
from rewards.call import Group
from rewards.check import try_rewards
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores
from tests.rewards.pool_case import OneOf, score


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


def test_a_function_may_ask_processes_of_multiprocessing_and_they_end_with_the_pool(
    rewards_file: OneOf, tmp_path: Path
) -> None:
    async def main() -> Scores:
        async with RewardPool([rewards_file("pooled", timeout_s=20, args={"where": str(tmp_path / "pids")})]) as pool:
            return await score(pool)

    scores = asyncio.run(main())
    assert (scores.reward, scores.failures) == ([1, 2], ())
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert gone(pids, within_s=5)


LEAVES = """
import os, subprocess, time
from pathlib import Path
def leaves(completions, where):
    read, write = os.pipe()
    if (forked := os.fork()) == 0:  # a daemon, which has started no program
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    os.waitpid(forked, 0)
    for pid in (os.read(read, 99).decode(), subprocess.Popen(["sleep", "600"], start_new_session=True).pid):
        Path(where, str(pid)).touch()
    return [1.0] * len(completions)
"""


def test_what_has_left_its_session_ends_with_a_process_that_was_killed_and_the_fresh_one_lives(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LEAVES)
    where = tmp_path / "where"
    where.mkdir()

    async def main() -> tuple[Scores, bool, list[int]]:
        async with RewardPool([RewardConfig(use=f"{tmp_path}/mine.py:leaves", args={"where": str(where)})]) as pool:
            await score(pool)
            first = {int(file.name) for file in where.iterdir()}
            (pid,) = workers()
            os.kill(pid, signal.SIGKILL)
            again = await score(pool)  # finds it dead
            ended = gone([*first], within_s=5)
            return again, ended, [int(file.name) for file in where.iterdir()]

    again, ended, every = asyncio.run(main())
    assert (again.status, ended, len(every)) == (["ok"] * 2, True, 4)
    assert gone(every, within_s=5), "the pool is closed"


async def test_a_killed_process_leaves_no_folder_of_code_that_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = RewardConfig(use="unit_tests", timeout_s=60, args={"seconds": 50})
    async with RewardPool([config]) as pool:
        columns = {"test_list": [["assert True"]] * 2}
        scoring = asyncio.create_task(score(pool, ["import time\ntime.sleep(60)"] * 2, **columns))
        while len([*tmp_path.glob("python-tool-*")]) < 2:
            await asyncio.sleep(0.01)
        (pid,) = workers()
        os.kill(pid, signal.SIGKILL)
        assert (await scoring).status == ["error"] * 2
        assert [*tmp_path.glob("python-tool-*")] == []
        assert (await score(pool, ["x = 1"] * 2, **columns)).reward == [1.0, 1.0]
    assert [*tmp_path.glob("python-tool-*")] == []


def test_workers_die_with_a_killed_driver(rewards_file: OneOf, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio
        from rewards.call import Group
        from rewards.config import RewardConfig
        from rewards.pool import RewardPool
        if __name__ == "__main__":
            uses = [RewardConfig(use={rewards_file("child").use!r}, timeout_s=60, args={{"where": {str(note)!r}}})]
            asyncio.run(RewardPool(uses).score(Group(["p"], ["c"], [[1]], {{}})))
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


SCORES = """
import asyncio, sys
from cluster import actor
from rewards.call import Group
import psutil

from rewards.config import RewardConfig
from rewards.pool import RewardPool
actor.LOOK_S, actor.LATE_S = 0.05, 0.2

async def score():
    rewards = [RewardConfig(use=f"{sys.argv[1]}:{name}", timeout_s=1) for name in ("plain", "awaits")]
    async with RewardPool(rewards, workers=2) as pool:
        print("ready", flush=True)
        print(await pool.score(Group(["p"], ["c"], [[1]], {})), flush=True)

if __name__ == "__main__":
    asyncio.run(score())
"""
SLOW = """
import asyncio, pathlib, time
HERE = pathlib.Path(__file__)

def plain(prompts, completions, **columns):
    HERE.with_name("plain").touch()
    time.sleep(0.4)
    return [1.0]

async def awaits(prompts, completions, **columns):
    HERE.with_name("awaits").touch()
    await asyncio.sleep(0.4)
    return [1.0]
"""


def test_a_machine_that_was_paused_costs_no_reward(tmp_path: Path) -> None:
    """All stand still for longer than the functions may take, while they are at work."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "scores.py").write_text(SCORES)
    command = [sys.executable, str(tmp_path / "scores.py"), str(tmp_path / "slow.py")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        while not all((tmp_path / name).exists() for name in ("plain", "awaits")):
            time.sleep(0.01)
        everyone = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        for one in everyone:
            one.suspend()
        time.sleep(1.2)  # that it is longer than timeout_s is what is tested
        for one in everyone:
            one.resume()
        said = run.stdout.read()
    assert "status=['ok']" in said, said


POOLS = {
    "spawn": "with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.map(length, completions)",
    "executor": (
        "with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool: "
        "return list(pool.map(length, completions))"
    ),
    "fork": "with multiprocessing.Pool(1) as pool: return pool.map(length, completions)",
}


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("place", ["my rewards.v2.py", "package/mine.py"])
async def test_a_function_of_a_file_may_have_a_pool_of_processes(kind: str, place: str, tmp_path: Path) -> None:
    """A fresh interpreter imports what it is to call by the name of its module."""
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    relative = "from . import helper\n" if "/" in place else "import helper\n"
    (file.parent / "helper.py").write_text("ONE = 1\n")
    file.write_text(
        f"import concurrent.futures, multiprocessing\n{relative}"
        "def length(text): return float(len(text) * helper.ONE)\n"
        f"def f(completions, **columns):\n    {POOLS[kind]}\n"
    )
    async with RewardPool([RewardConfig(use=f"{file}:f", timeout_s=60)]) as pool:
        assert (await score(pool, ["a", "bb", ""])).reward == [1.0, 2.0, 0.0]


# What a reward process may see of the environment and hold in memory, with real processes.

SECRETS = ("RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "https_proxy")
REWARDS = """
import os, subprocess
from pathlib import Path

def see(completions, where):
    started = subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines()
    initial = Path("/proc/self/environ").read_text().split("\\0")
    Path(where).write_text("\\n".join([*started, *(f"{k}={v}" for k, v in os.environ.items()), *initial]))
    return [1.0] * len(completions)
def ask(completions): return [float(len(os.environ["OPENAI_API_KEY"]))] * len(completions)
def small_model(completions):
    import torch
    layers = [torch.nn.Embedding(300, 64), torch.nn.TransformerEncoderLayer(64, 4), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers)
    return [float(model(torch.ones(2, 16, dtype=torch.long)).isfinite().all())] * len(completions)
def eat_tensor(completions):
    import torch
    return [float(torch.zeros(1 << 31).sum())]
"""
EAGER = (
    "import os\nKEY = os.environ['OPENAI_API_KEY']\ndef f(completions): return [float(len(KEY))] * len(completions)\n"
)


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A reward function of the file; every secret is set here, and its value is secret-<name>."""
    for name in SECRETS:
        monkeypatch.setenv(name, f"secret-{name}")
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "eager.py").write_text(EAGER)
    return lambda function, file="mine", **more: RewardConfig(use=f"{tmp_path}/{file}.py:{function}", **more)


def _scores(*rewards: RewardConfig, **options: Any) -> Scores:
    async def main() -> Scores:
        async with RewardPool(rewards, **options) as pool:
            return await pool.score(Group(["p"], ["c"], [[1]], {}))

    return asyncio.run(main())


def test_a_reward_sees_what_it_names_and_no_other_secret(reward: Any, tmp_path: Path) -> None:
    blind, knows = tmp_path / "blind", tmp_path / "knows"
    rewards = [
        reward("see", args={"where": str(knows)}, env=("OPENAI_API_KEY",)),
        reward("see", args={"where": str(blind)}),  # after it, in the same process
    ]
    assert _scores(*rewards).reward == [2.0]
    assert "secret" not in blind.read_text()
    assert "OPENAI_API_KEY=secret-OPENAI_API_KEY" in knows.read_text()
    assert knows.read_text().count("secret") == 2  # what it starts has it, too
    for kept in ("PATH", "HOME"):
        assert f"{kept}={os.environ[kept]}" in blind.read_text()


def test_the_missing_variable_and_its_key_are_named(reward: Any) -> None:
    sentence = r"OPENAI_API_KEY is kept from reward functions: name it with this reward, env: \[OPENAI_API_KEY\]"
    assert _scores(reward("ask", env=("OPENAI_API_KEY",))).reward == [21.0]
    assert _scores(reward("f", "eager", env=("OPENAI_API_KEY",))).reward == [21.0]
    for config in (reward("ask"), reward("f", "eager")):
        with pytest.raises(WrongInput, match=sentence):
            try_rewards([config], Group(["p"], ["c"], [[1]], {}))


def test_a_variable_that_is_not_set_is_refused_before_anything_starts(reward: Any) -> None:
    with pytest.raises(WrongInput, match=r"reward 'ask': env: .* and NO_SUCH_KEY is not; export it before the run"):
        RewardPool([reward("ask", env=("NO_SUCH_KEY", "HF_TOKEN"))])


def test_only_what_is_lent_is_there_and_only_while_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "before")
    monkeypatch.delenv("B_KEY", raising=False)
    with limits.lent({"A_KEY": "a", "B_KEY": "b"}):
        assert (os.environ["A_KEY"], os.environ["B_KEY"]) == ("a", "b")
    assert os.environ["A_KEY"] == "before"
    assert "B_KEY" not in os.environ


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_small_model_runs_within_the_default_cap(reward: Any) -> None:
    assert _scores(reward("small_model", timeout_s=100)).reward == [1.0]


def test_who_eats_memory_is_stopped_and_told_the_cap_and_its_key(reward: Any) -> None:
    (failure,) = _scores(reward("eat_tensor", timeout_s=60), memory_bytes=1 << 30).failures
    assert "its process may hold 1 GiB: raise rollout.process_memory, for example to 2GiB" in failure


@pytest.mark.parametrize(
    ("error", "is_ours"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20 GiB"), False),
        (RuntimeError("cuda: cannot allocate memory"), False),
        (ValueError("boom"), False),
    ],
)
def test_which_failures_are_those_of_the_cap(error: Exception, is_ours: bool) -> None:
    assert limits.memory_met(error) is is_ours


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "spent"),
    [
        (MemoryError(), True),
        (OSError(24, "Too many open files"), True),
        (RuntimeError("can't start new thread"), True),
        (_raised(ValueError("no answer"), OSError(24, "Too many open files")), True),
        (_raised(RuntimeError("pool broke"), RuntimeError("can't start new thread")), True),
        (FileNotFoundError(2, "No such file"), False),
        (RuntimeError("CUDA out of memory"), False),
        (RecursionError(), False),
    ],
)
def test_which_failures_may_be_those_of_what_others_left(error: BaseException, spent: bool) -> None:
    assert limits.memory_spent(error) is spent


LEAKS = """
import os, threading
kept = []
def memory(completions):
    kept.append(bytearray(80 << 20))
    return [1.0] * len(completions)
def files(completions):
    kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(soft // 3))
    return [1.0] * len(completions)
def threads(completions):
    for _ in range(12):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return [1.0] * len(completions)
async def later(completions):
    return memory(completions)
def large(completions):
    return [float(len(bytearray(1 << 30)))]
import resource
soft = 64
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
"""


def test_a_function_that_leaks_gets_a_fresh_process_and_loses_no_score(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS)

    async def scored(leak: str) -> list[Scores]:
        config = RewardConfig(use=f"{tmp_path}/leaks.py:{leak}")
        async with RewardPool([config], memory_bytes=256 << 20) as pool:
            return [await pool.score(Group(["p"], ["c"], [[1]], {})) for _ in range(4)]

    async def main() -> list[list[Scores]]:
        return await asyncio.gather(*map(scored, ("later", "files", "threads")))

    for found in asyncio.run(main()):
        assert [(scores.reward, scores.failures) for scores in found] == [([1.0], ())] * 4


def test_a_function_that_wants_too_much_at_once_keeps_its_process(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(f"{LEAKS}\ndef pid(completions): return [float(os.getpid())]")

    async def main() -> list[Scores]:
        rewards = [RewardConfig(use=f"{tmp_path}/leaks.py:{name}") for name in ("pid", "large")]
        async with RewardPool(rewards, memory_bytes=256 << 20) as pool:
            return [await pool.score(Group(["p"], ["c"], [[1]], {})) for _ in range(3)]

    found = asyncio.run(main())
    assert len({scores.parts["pid"][0] for scores in found}) == 1
    assert all("its process may hold 0.25 GiB" in scores.failures[0] for scores in found)
