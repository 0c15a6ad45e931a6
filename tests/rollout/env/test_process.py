"""Environments in processes of their own: every way to break one has a name, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.env.config import EnvConfig
from rollout.env.play import EnvironmentFault
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from rollout.env.protocol import Start, Step, Turn
from rollout.schema import Problem

FAULTY = f"{Path(__file__).with_name('faulty.py')}:Plain"
PROBLEM = Problem("train-1", "1 + 1", {"answer": "2"}, (1, 2), 1, 0)
TURN = Turn("two", (5, 6))

BROKEN = {
    "raises": ("env_error", r"step: ZeroDivisionError: three over nought \(faulty.py, line \d+\)"),
    "exits": ("env_error", "step: SystemExit: 3"),
    "dies": ("env_killed", r"step: its process died \(exit code 7\)"),
    "killed": ("env_killed", r"step: its process died \(SIGKILL\)"),
    "hangs": ("env_timeout", r"step: no answer within 3 s \(env.step_timeout_s\)"),
    "waits": ("env_timeout", "step: no answer within 3 s"),
    "leaves a child": ("env_timeout", "step: no answer within 3 s"),
    "floods": ("flood", r"step: answered with 335545\d\d bytes, at most 1048576 are taken"),
    "eats": (
        "env_error",
        r"step: MemoryError.*may hold 0.5 GiB: raise rollout.process_memory, for example to 1GiB",
    ),
    "raises half a pair": ("env_error", r"step: ValueError: bad \\ud83d \(faulty.py"),
    "returns a set": ("bad_observation", "step: must answer with what JSON can hold: Object of type set is not"),
    "returns text": ("bad_observation", "step must return a Step, got str"),
    "says nothing": ("bad_observation", "step: must return at least one message unless it is done, got none"),
    "other role": ("bad_observation", "a message's role must be one of tool, user, got 'assistant'"),
    "bad reward": ("bad_observation", "step: reward must be a finite number of at most 1e30, got 'much'"),
}


def config(wrong: str = "", mark: Path | str = "", use: str = FAULTY) -> EnvConfig:
    args = {"wrong": wrong, "mark": str(mark)}
    in_time = 3 if wrong in ("hangs", "waits", "leaves a child") else 60  # a busy machine makes nothing else late
    return EnvConfig(use=use, args=args, step_timeout_s=in_time)


def forks(wrong: str = "", mark: Path | str = "") -> Forks:
    return Forks(spec_of(config(wrong, mark), 2**29))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No process of an environment, nor what it has started, and no descriptor."""
    with_server = len(os.listdir("/proc/self/fd")) + 3  # the server that is forked stays: its pipes
    yield
    deadline = time.monotonic() + 10
    while any("time.sleep(600)" in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "what an environment has started is still there"
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= with_server


@pytest.mark.parametrize("wrong", BROKEN)
async def test_what_a_broken_environment_does_has_a_name(wrong: str, tmp_path: Path) -> None:
    made = forks(wrong, tmp_path)
    env: Any = EnvironmentProcess(made, config(wrong))
    start = await env.reset(PROBLEM, 3)
    assert start.state == "seed 3"
    (mark,) = tmp_path.iterdir()
    pid, temporary = int(mark.name), Path(mark.read_text())
    assert temporary.exists()
    with pytest.raises(EnvironmentFault, match=BROKEN[wrong][1]) as fault:
        await env.step(TURN)
    assert fault.value.outcome == BROKEN[wrong][0]
    await env.close()
    assert not psutil.pid_exists(pid)
    assert not temporary.exists()
    made.close()


async def test_multiprocessing_serves_an_environment_and_what_it_starts_ends_with_it(tmp_path: Path) -> None:
    made = forks("asks processes")
    env: Any = EnvironmentProcess(made, config("asks processes"))
    await env.reset(PROBLEM, 3)
    assert (await env.step(TURN)).messages[0]["content"] == "[9, 16]"
    await env.close()
    made.close()
    made = forks("leaves processes", tmp_path)
    env = EnvironmentProcess(made, config("leaves processes"))
    await env.reset(PROBLEM, 3)
    with pytest.raises(EnvironmentFault, match=r"step: its process died \(SIGKILL\)"):  # though they have the socket
        await env.step(TURN)
    await env.close()
    pids, deadline = [int(file.name) for file in tmp_path.iterdir()], time.monotonic() + 10
    assert len(pids) == 3
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    made.close()


ORPHANS = """
import asyncio, os
from tests.rollout.env.test_process import PROBLEM, TURN, EnvironmentProcess, config, forks

async def main():
    made = forks("leaves a child")
    envs = [EnvironmentProcess(made, config("leaves a child")) for _ in range(3)]
    await asyncio.gather(*(env.reset(PROBLEM, 3) for env in envs))
    print(*(env._process.result().pid for env in envs), flush=True)
    asyncio.get_running_loop().call_later(0.8, os.kill, os.getpid(), 9)
    await asyncio.gather(*(env.step(TURN) for env in envs))

asyncio.run(main())
"""


def test_a_killed_generator_leaves_no_environment_that_hangs_nor_what_it_has_started(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    variables["TMPDIR"] = str(tmp_path)  # folders stay where a generator is killed
    ran = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=60, env=variables)
    assert ran.returncode == -9
    assert ran.stdout.split().count("leaves") == 3  # what they printed is not lost with them
    pids, deadline = [int(pid) for pid in ran.stdout.split() if pid.isdigit()], time.monotonic() + 10
    assert len(pids) == 3
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_where_what_they_are_forked_from_is_killed_the_next_has_another() -> None:
    made = forks()
    env: Any = EnvironmentProcess(made, config())
    after: Any = EnvironmentProcess(made, config())
    await env.reset(PROBLEM, 3)
    server: Any = forkserver._forkserver
    os.kill(server._forkserver_pid, signal.SIGKILL)
    assert (await after.reset(PROBLEM, 3)).state == "seed 3"
    with pytest.raises(EnvironmentFault, match="step: its process died"):
        await env.step(TURN)
    await env.close()
    await after.close()
    made.close()


async def test_a_whole_one_answers_and_may_free_what_it_holds(tmp_path: Path) -> None:
    made = forks("", tmp_path)
    env: Any = EnvironmentProcess(made, config())
    assert (await env.reset(PROBLEM, 3)).messages == ({"role": "user", "content": "begin"},)
    steps = [await env.step(TURN) for _ in range(3)]
    assert [(step.reward, step.done) for step in steps] == [(0.5, False), (0.5, False), (0.5, True)]
    assert await env.score() == {}
    await env.close()
    assert [file.read_text() for file in tmp_path.iterdir()] == ["closed"]
    made.close()


async def test_plain_methods_do(tmp_path: Path) -> None:
    use = FAULTY.replace("Plain", "Synchronous")
    made = Forks(spec_of(config(mark=tmp_path, use=use)))
    env = EnvironmentProcess(made, config(mark=tmp_path, use=use))
    assert isinstance(begun := await env.reset(PROBLEM, 3), Start)
    assert begun.state == "seed 3"
    assert isinstance(step := await env.step(TURN), Step)
    assert step.reward == 0.5
    assert await env.score() == {"whole": 1.0}
    await env.close()
    assert (tmp_path / "closed").exists()
    made.close()


async def test_what_cannot_close_is_ended_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = forks("cannot close", tmp_path)
    for _ in range(2):
        env: Any = EnvironmentProcess(made, config())
        await env.reset(PROBLEM, 3)
        await env.close()
    made.close()
    (told,) = caplog.messages
    assert re.fullmatch(r"environment: close: OSError: still in use \(faulty.py, line \d+\)", told)
    assert not any(psutil.pid_exists(int(file.name)) for file in tmp_path.iterdir())


async def test_what_a_step_warns_of_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made = forks("warns")
    for _ in range(2):
        env = EnvironmentProcess(made, config("warns"))
        await env.reset(PROBLEM, 3)
        await env.step(TURN)
        await env.close()
    made.close()
    (told,) = caplog.messages
    assert told.startswith("said by ")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("taken name", "score: a reward is named mean already"),
        ("nan", "score: whole must be a finite number of at most 1e30, got nan"),
    ],
)
async def test_a_score_that_is_none_is_a_fault(wrong: str, sentence: str) -> None:
    made = forks(wrong)
    env = EnvironmentProcess(made, config(wrong))
    await env.reset(PROBLEM, 3)
    with pytest.raises(EnvironmentFault, match=sentence):
        await env.score()
    await env.close()
    made.close()


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        ("number_gessing", "did you mean 'number_guessing'"),
        (
            FAULTY.replace("Plain", "Plane"),
            "has no class or function 'Plane'; classes and functions there: square,",
        ),
        (FAULTY.replace("Plain", "Untrue"), r"reset: TypeError: object of type 'int' has no len\(\) \(faulty.py, line"),
        (FAULTY.replace("Plain", "Waitless"), "run: must be `async def`, since it waits for the policy"),
        ("collections:Counter", "lacks reset, step, score, close"),
        ("collections:deque", "env.args: collections:deque must take wrong, mark: "),
    ],
)
async def test_what_is_no_environment_is_said_at_reset(use: str, sentence: str) -> None:
    made = Forks(spec_of(config(use=use)))
    env = EnvironmentProcess(made, config(use=use))
    with pytest.raises(EnvironmentFault, match=sentence):
        await env.reset(PROBLEM, 3)
    await env.close()
    made.close()


async def test_a_reset_that_is_cancelled_as_it_starts_leaves_no_process(tmp_path: Path) -> None:
    made = forks("", tmp_path)
    env = EnvironmentProcess(made, config())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await env.reset(PROBLEM, 3)
    await env.close()
    assert not any(psutil.pid_exists(int(file.name)) for file in tmp_path.iterdir())
    made.close()


async def test_each_process_has_random_numbers_of_its_own_and_ends_if_who_closes_it_is_cancelled(
    tmp_path: Path,
) -> None:
    made = forks("draws")
    starts = []
    for _ in range(2):
        env = EnvironmentProcess(made, config("draws"))
        starts.append(await env.reset(PROBLEM, 3))
        await env.close()
    assert starts[0] != starts[1]
    made.close()
    made = forks("never closes", tmp_path)
    env = EnvironmentProcess(made, config("never closes", tmp_path))
    await env.reset(PROBLEM, 3)
    (mark,) = tmp_path.iterdir()
    closing = asyncio.create_task(env.close())
    while mark.read_text() != "closed":
        await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not psutil.pid_exists(int(mark.name))
    made.close()
