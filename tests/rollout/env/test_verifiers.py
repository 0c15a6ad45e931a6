"""Our border with verifiers, whose place a small package takes: what we ask, what comes back, and how it all ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.env.adapters.verifiers import CHILD, Verifiers
from rollout.env.config import EnvConfig
from rollout.env.play import EnvironmentFault
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from rollout.env.protocol import Asked, Sampled
from tests.rollout.env.hand import problem
from tests.rollout.env.test_rollouts import MODEL
from tests.rollout.env.test_trl_rollout import TURN, Policy

STAND_IN = Path(__file__).with_name("stand_in")


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter with the stand-in for verifiers."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={STAND_IN} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def arguments(python: str, pid: Path) -> dict[str, Any]:
    return {"python": python, "environment": {"pid": str(pid)}, "model": MODEL, "renderer": {}, "max_tokens": 7}


def test_tasks_are_listed_as_data(python: str, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("{}")
    command = [python, "-P", str(CHILD), "tasks", str(tmp_path / "environment.json")]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert json.loads(told[2]) == {"prompt": "It dies.", "task": 2}


async def test_an_episode_asks_the_policy_and_gives_its_weighted_rewards(python: str, tmp_path: Path) -> None:
    policy = Policy()
    assert await Verifiers(**arguments(python, tmp_path)).run(problem(task=0), 1, policy) == {"said": 3.0}
    assert policy.asked == [([5, 6, 7], 7), ([5, 6, 7, *TURN, 8, 9], 7)]


@pytest.mark.parametrize(
    ("task", "sentence"),
    [(1, "^ToolError: no such tool$"), (2, "its process ended with exit code 1: the server did not start")],
)
async def test_what_fails_there_is_said_in_its_words(python: str, tmp_path: Path, task: int, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        await Verifiers(**arguments(python, tmp_path)).run(problem(task=task), 1, Policy())


async def test_an_episode_whose_process_is_killed_ends_all_that_it_started(python: str, tmp_path: Path) -> None:
    config = EnvConfig(use="verifiers", args=arguments(python, tmp_path / "pid"))
    forks = Forks(spec_of(config))
    env = EnvironmentProcess(forks, config)
    assert await env.reset(problem(task=3), 1) == Asked((5, 6, 7), 7)
    step = asyncio.create_task(env.step(Sampled(TURN, [-0.5] * 3, "stop")))
    async with asyncio.timeout(30):
        while not (written := tmp_path / "pid").exists() or not written.read_text():
            await asyncio.sleep(0.05)
    assert env._process is not None
    os.kill(env._process.result().pid or 0, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="its process died"):
        await step
    async with asyncio.timeout(30):
        while Path(f"/proc/{written.read_text()}").exists():
            await asyncio.sleep(0.05)
    await env.close()
    forks.close()
