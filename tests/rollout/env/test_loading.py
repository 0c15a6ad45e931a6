"""An environment's code, loaded once by the process that all of them are forked from."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from rollout.env.config import EnvConfig
from rollout.env.host import BadAnswer, make
from rollout.env.play import EnvironmentFault
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from rollout.schema import Problem

PROBLEM = Problem("train-1", "1 + 1", {"answer": "2"}, (1, 2), 1, 0)

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
