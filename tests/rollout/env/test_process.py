"""Environments in processes of their own: every way to break one has a name, and leaves nothing behind. An
environment's code, loaded once by the process that all of them are forked from. What an environment may answer,
before it leaves its process. The environment of docs/environments.md, as it stands there.
"""

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
from rollout.env.host import (
    BadAnswer,
    encoded,
    make,
    parts,
    start_to_json,
    step_to_json,
)
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from rollout.env.protocol import Start, Step, Turn
from rollout.env.trajectory import EnvironmentFault
from rollout.schema import Problem
from tests.rollout.env.hand import problem, said

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


# An environment's code, loaded once by the process that all of them are forked from.

LOADED = """
import os
import time
from rollout.env.protocol import Start

open(__file__ + ".loaded", "a").write(os.environ["MY_API_KEY"])
if "hang" in __file__:
    time.sleep(600)


class Own:
    async def reset(self, problem, seed):
        return Start((), state=os.environ["MY_API_KEY"])

    async def close(self):
        pass

    step = score = close
"""


@pytest.fixture
def another_server() -> None:
    """None has loaded other code."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        time.sleep(0.2)


async def loaded(path: Path, seconds: float, times: int) -> list[str]:
    """States of environments whose code is LOADED at that path, or their fault's outcome."""
    path.write_text(LOADED)
    how = EnvConfig(use=f"{path}:Own", variables=("MY_API_KEY",), step_timeout_s=seconds / 2)
    made, found = Forks(spec_of(how)), []
    for _ in range(times):
        env: Any = EnvironmentProcess(made, how)
        try:
            found.append((await env.reset(PROBLEM, 3)).state)
        except EnvironmentFault as fault:
            found.append(fault.outcome)
        async with asyncio.timeout(60):
            await env.close()
    made.close()
    return found


@pytest.mark.usefixtures("another_server")
async def test_code_is_loaded_once_with_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sesame ")
    assert await loaded(tmp_path / "mine.py", 60, 2) == ["sesame "] * 2
    assert (tmp_path / "mine.py.loaded").read_text() == "sesame "


@pytest.mark.long
@pytest.mark.usefixtures("another_server")
async def test_code_that_never_loads_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sesame")
    assert await loaded(tmp_path / "hang.py", 1, 1) == ["env_timeout"]


@pytest.mark.parametrize(
    ("use", "args", "sentence"),
    [
        ("trl_rollout_func", {"model": "m"}, "trl_rollout_func needs function; set env.args.function (got model)"),
        (
            "number_guessing",
            {"high": 7, "lowest": 1},
            "number_guessing takes low, high, max_turns, got lowest; correct it, or leave it out",
        ),
    ],
)
def test_arguments_that_an_environment_lacks_or_does_not_have(use: str, args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadAnswer) as refused:
        make(use, args)
    assert str(refused.value) == f"env.args: {sentence}"


# What an environment may answer, before it leaves its process.


def user(**message: Any) -> Step:
    return Step(({"role": "user", "content": "a"} | message,))


NESTED: Any = []
for _ in range(500):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("check", "answer", "sentence"),
    [
        (step_to_json, user(content="a\ud83d"), "step: a message's content must be text that UTF-8 can hold"),
        (step_to_json, user(name=["b"]), "step: a message's name must be text that UTF-8 can hold, got .'b'"),
        (step_to_json, user(tool_call_id=3), "step: a message's tool_call_id must be text"),
        (step_to_json, Step(done=True, metrics={"\ud83d": 1.0}), "step: numbers must come as a mapping from names"),
        (step_to_json, Step(done=True, warnings={"tool": None}), "step: warnings must come as a mapping"),  # type: ignore[dict-item]
        (step_to_json, Step(done=True, reward=1e39), "step: reward must be a finite number of at most 1e30, got 1e"),
        (parts, {"env": 5.0}, "score: a reward is named env already"),
        (start_to_json, Start((), ({"name": "search"},)), 'reset: tools must be a sequence of {"type": "function"'),
        (lambda answer: encoded("step", step_to_json(answer)), user(seen=NESTED), "step: .* nested at most 100 deep"),
    ],
)
def test_what_no_tokenizer_template_or_ledger_takes_is_said(check: Any, answer: Any, sentence: str) -> None:
    with pytest.raises(BadAnswer, match=sentence):
        check(answer)


# The environment of docs/environments.md, as it stands there.

TEXT = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


async def test_the_documented_environment_runs_as_it_is(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# my_env.py\n.*?)```", TEXT, re.DOTALL)
    (tmp_path / "my_env.py").write_text(code)
    config = EnvConfig(use=f"{tmp_path}/my_env.py:MyEnvironment", args={"hints": 2})
    forks = Forks(spec_of(config))
    env: Any = EnvironmentProcess(forks, config)
    assert (await env.reset(problem("2 + 2", answer="4"), 0)).messages == ()
    step = await env.step(said("5"))
    assert (step.messages, step.done) == (({"role": "user", "content": "Not quite, try again."},), False)
    step = await env.step(said(" 4"))
    assert (step.reward, step.done, await env.score()) == (1.0, True, {})
    await env.close()
    forks.close()
