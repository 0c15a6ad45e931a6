"""TRL's environment classes: what TRL's trainer would do with them. TRL's rollout functions: what they return must
be what was recorded. SkyRL-Gym's and OpenEnv's environments, by classes and a server of their signatures. Our border
with verifiers, whose place a small package takes: what we ask, what comes back, and how it all ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cluster.errors import WrongInput
from rollout.env.adapters.openenv import OpenEnv
from rollout.env.adapters.skyrl_gym import SkyRLGym
from rollout.env.adapters.trl import TrlEnvironment, TrlRolloutFunc
from rollout.env.adapters.verifiers import CHILD, Verifiers
from rollout.env.config import EnvConfig
from rollout.env.host import BadAnswer
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from rollout.env.protocol import OutOfBudget, Question, Sampled, Step, ToolCall, Turn
from rollout.env.trajectory import EnvironmentFault
from rollout.schema import Problem
from tests.rollout.env.hand import problem, said
from tests.rollout.env.test_rollouts import CHAT, MODEL, PROBLEM

CLASSES = Path(__file__).with_name("trl_classes.py")


async def begun(name: str = "Counter", seed: int = 5, **how: Any) -> tuple[TrlEnvironment, Any]:
    env = TrlEnvironment(f"{CLASSES}:{name}", **how)
    return env, await env.reset(problem("Count.", goal=3, tell=True), seed)


def calls(*given: tuple[str, dict[str, Any]]) -> Turn:
    return Turn("", (7,), tuple(ToolCall(*one) for one in given))


def contents(step: Step) -> list[str]:
    return [message["content"] for message in step.messages]


async def test_a_class_is_played_as_trl_plays_it() -> None:
    env, start = await begun()
    assert start.messages == ({"role": "user", "content": "Count. Start at 0."},)
    assert [tool["function"]["name"] for tool in start.tools] == ["add", "look"]
    assert start.tools[0]["function"]["parameters"]["properties"]["by"]["type"] == "integer"
    step = await env.step(calls(("add", {"by": 2}), ("look", {}), ("add", {"by": 1})))
    assert contents(step) == ["{'value': 2}", "2", "{'value': 3}"]
    assert not step.done
    assert (await env.step(said("three"))).done
    assert await env.score() == {"Counter": 1.0}


async def test_the_data_names_the_class_of_each_problem() -> None:
    both = {"up": f"{CLASSES}:Counter", "said": f"{CLASSES}:Judged"}
    for name, tools, parts in (("up", ["add", "look"], {}), ("said", [], {"Judged": 0.5})):
        env = TrlEnvironment(both)
        start = await env.reset(problem("Count.", goal=0, tell=False, environment=name), 5)
        assert [tool["function"]["name"] for tool in start.tools] == tools
        await env.step(said("?"))
        assert await env.score() == parts
    for columns in ({"environment": "down"}, {}):
        with pytest.raises(WrongInput, match="must have what the column `environment` of .* p-0 names .*; it has up"):
            await TrlEnvironment(both).reset(problem("?", **columns), 5)
    for wrong in ({}, {"up": 3}, ["a.py:B"]):
        with pytest.raises(WrongInput, match=r"env.args.factory: must be a name such as my.py:Class, or a mapping"):
            TrlEnvironment(wrong)  # type: ignore[arg-type]
    with pytest.raises(WrongInput, match="must have a name of its own, got .* beside Judged"):
        TrlEnvironment(both, rewards=[f"{CLASSES}:Judged"])


async def test_no_observation_and_no_reward() -> None:
    env = TrlEnvironment(f"{CLASSES}:Counter")
    start = await env.reset(problem("Count.", goal=0, tell=False), 5)
    assert start.messages == ({"role": "user", "content": "Count."},)
    await env.step(said("?"))
    assert await env.score() == {}


async def test_several_names_may_share_a_class() -> None:
    env = TrlEnvironment({"up": f"{CLASSES}:Judged", "again": f"{CLASSES}:Judged"}, rewards=[f"{CLASSES}:reward_score"])
    await env.reset(problem("?", environment="again"), 5)
    await env.step(said("one"))
    assert await env.score() == {"Judged": 0.5, "reward_score": 4.0}


async def test_what_fails_is_answered_in_trls_words_and_counted() -> None:
    env, _ = await begun(timeout_s=0.2)
    wrong = calls(("add", {"by": -1}), ("subtract", {}), ("_hidden", {}), ("reset", {}), ("add", {"by": 99}))
    step = await env.step(Turn("", (7,), wrong.calls, ("Not JSON.",)))
    assert contents(step) == [
        "{'error': 'Only up.'}",
        "{'error': 'Tool subtract not found.'}",
        "{'error': 'Tool _hidden not found.'}",
        "{'error': 'Tool reset not found.'}",
        "{'error': 'add was stopped after 0.2 s without an answer'}",
        "{'error': 'Not JSON.'}",
    ]
    assert step.metrics == {"bad_calls": 3, "tool_errors": 2, "cut_answers": 0}
    assert [*step.warnings] == ["add: ValueError", "add: ToolFailed"]
    assert "add raised ValueError: Only up. (trl_classes.py, line" in step.warnings["add: ValueError"]
    assert contents(await env.step(calls(("add", {"by": 1})))) == [
        "{'value': 1}"
    ]  # the one that hangs is in no one's way


async def test_a_reward_function_that_asks_for_environments_is_given_this_one() -> None:
    env, _ = await begun("Judged", rewards=[f"{CLASSES}:reward_score"])
    await env.step(said("one"))
    assert await env.score() == {"Judged": 0.5, "reward_score": 4.0}


async def test_reward_functions_see_what_the_policy_saw_and_said() -> None:
    env, _ = await begun(rewards=f"{CLASSES}:seen")
    assert env._have()["completions"] == [[{"role": "assistant", "content": ""}]]  # cut in its first turn
    await env.step(calls(("add", {"by": 2})))
    await env.score()
    assert [message["role"] for message in env._environment.seen[1]] == ["assistant"]  # the answer was never read
    await env.step(said("2"))
    await env.score()
    prompt, completion = env._environment.seen
    assert prompt[-1]["content"] == "Count. Start at 0."
    assert [message["role"] for message in completion] == ["assistant", "tool", "assistant"]


async def test_a_reward_function_that_asks_for_more_is_refused_at_the_start() -> None:
    with pytest.raises(WrongInput, match="env.args.rewards: greedy asks for trainer_state, and there is .*completions"):
        await begun(rewards=[f"{CLASSES}:greedy"])


@pytest.mark.parametrize("rewards", [["reward_score"] * 2, ["Judged"]])
async def test_two_parts_of_the_reward_have_two_names(rewards: list[str]) -> None:
    with pytest.raises(WrongInput, match="each part of the reward must have a name of its own, got .*; rename a"):
        await begun("Judged", rewards=[f"{CLASSES}:{name}" for name in rewards])


async def test_global_random_numbers_come_from_the_groups_seed() -> None:
    lucks = [(await begun(seed=seed))[0]._environment.luck for seed in (5, 5, 6)]
    assert lucks[0] == lucks[1] != lucks[2]


async def test_a_class_without_reset_or_with_a_generator_is_refused() -> None:
    with pytest.raises(WrongInput, match="env.args.factory: NoReset must have a method reset"):
        await begun("NoReset")
    with pytest.raises(WrongInput, match="tool lines: must return its answer, and yields"):
        await begun("Yields")


async def test_a_class_may_have_the_problems_itself() -> None:
    """One is begun by its seed, whatever its reset takes; see data.path: env:own."""

    async def first(name: str, number: int, seed: int) -> str:
        env = TrlEnvironment(f"{CLASSES}:{name}")
        start = await env.reset(problem("", episode=number), seed)
        return str(start.messages[-1]["content"])

    said = [await first("Own", number, seed) for number, seed in ((0, 7), (1, 7), (0, 8))]
    assert said[0] == said[1] != said[2]
    assert await first("Numbered", 12, 0) == "Level 12."


async def test_a_column_called_episode_is_passed_on_as_any_other() -> None:
    env = TrlEnvironment(f"{CLASSES}:Told")
    start = await env.reset(problem("? ", episode="S01E02", answer=1), 0)
    assert start.messages[-1]["content"] == "? answer, episode, prompt"


# TRL's rollout functions: what they return must be what was recorded.

FUNCTIONS = Path(__file__).with_name("rollout_funcs.py")
TURN = [11, 12, 13]


class Policy:
    """Says TURN as often as it may."""

    def __init__(self, turns: int = 9) -> None:
        self.asked: list[tuple[list[int], int | None]] = []
        self._turns = turns

    async def generate(self, token_ids: Any, max_tokens: int | None = None) -> Sampled:
        if len(self.asked) == self._turns:
            raise OutOfBudget("over")
        self.asked.append((list(token_ids), max_tokens))
        return Sampled(list(TURN), [-0.5] * 3, "stop")


async def run(function: str, policy: Policy | None = None, problem: Problem = PROBLEM) -> dict[str, float]:
    program = TrlRolloutFunc(
        f"{FUNCTIONS}:{function}", MODEL, settings={"bonus": 0.5, "max_completion_length": 7},
        rewards=[f"{FUNCTIONS}:reward_from_env"],
    )  # fmt: skip
    return dict(await program.run(problem, 5, policy or Policy()))


async def test_it_is_given_what_trls_trainer_offers_and_its_fields_go_to_the_rewards() -> None:
    policy = Policy()
    assert await run("two_turns", policy) == {"reward_from_env": 3 * 0.5 + 2}
    prompt = CHAT.tokenizer.encode("1 + 2", add_special_tokens=False)
    assert policy.asked == [(prompt, 7), ([*prompt, *TURN, 8, 9], 7)]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("without_mask", "env_mask must be returned where others wrote between the turns, here 2 tokens"),
        ("observed_counts", "env_mask must be what was asked and sampled, 10 values, got 1 at 3, not 0"),
        ("encoded_again", "completion_ids must be what was asked and sampled, 8 values, got 12 at 0, not 11"),
        ("several", "completion_ids must hold one completion, for its one prompt, got 2"),
        ("lacking", "must return a dict with .*, and what it returned lacks completion_ids, logprobs"),
    ],
)
async def test_what_differs_from_the_record_is_a_fault_by_name(function: str, sentence: str) -> None:
    with pytest.raises(BadAnswer, match=sentence):
        await run(function)


async def test_the_rest_of_the_trainer_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match=r"trainer\.accelerator is not here, .* there are args, bonus, max_compl"):
        await run("accelerated")


async def test_a_trajectory_whose_turns_are_over_has_the_reward_that_is_said() -> None:
    assert await run("endless", Policy(turns=3)) == {"reward_from_env": 0.0}


# SkyRL-Gym's and OpenEnv's environments, by classes and a server of their signatures.

OTHERS = Path(__file__).with_name("others.py")


async def test_a_class_of_skyrl_gym_is_played() -> None:
    env = SkyRLGym(f"{OTHERS}:Adding", {"hint": "Again."}, max_turns=3)
    start = await env.reset(problem("2 + 3", answer="5"), 0)
    assert [message["content"] for message in start.messages] == ["Add.", "2 + 3"]
    assert await env.step(said("4")) == Step(({"role": "user", "content": "Again. 2 left."},), -0.1, False, {})
    assert await env.step(said("5")) == Step((), 1.0, True, {"tries": 2.0})
    with pytest.raises(WrongInput, match="changes what was sampled"):
        await env.step(said("change"))
    await env.close()


def test_the_config_of_skyrl_gym_is_read_by_key_and_by_attribute() -> None:
    config = SkyRLGym(f"{OTHERS}:Adding", {"search": {"topk": 3}})._config
    assert config.search.topk == config["search"]["topk"] == config.get("search")["topk"] == 3  # type: ignore[index]
    assert not hasattr(config, "search_url")


def test_an_id_of_skyrl_gym_needs_the_package() -> None:
    with pytest.raises(WrongInput, match="gsm8k is an environment of skyrl_gym, which does not import"):
        SkyRLGym("gsm8k")


ERRORS = {  # as openenv 0.10 answers
    "odd": {
        "message": "Invalid message",
        "code": "VALIDATION_ERROR",
        "errors": [{"loc": ["number"], "msg": "Field required"}],
    },
    "bad": {"message": "Server at capacity.", "code": "CAPACITY_REACHED"},
}


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """Echoes under OpenEnv's protocol; done after two steps."""

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        steps = 0
        async for message in socket:
            asked: dict[str, Any] = json.loads(message.data)
            steps += asked["type"] == "step"
            if (said := asked["data"].get("message")) in ERRORS:
                answer: dict[str, Any] = {"type": "error", "data": ERRORS[said]}
            else:
                echoed = asked["data"].get("message", f"seed {asked['data'].get('seed')}")
                data = {"observation": {"echoed": echoed}, "reward": 0.5 * steps, "done": steps == 3}
                answer = {"type": "observation", "data": data}
            await socket.send_json(answer)
        return socket

    application = web.Application()
    application.router.add_get("/ws", session)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_server_of_openenv_is_played(server: str) -> None:
    env = OpenEnv(server, f"{OTHERS}:action", f"{OTHERS}:observe")
    start = await env.reset(problem("Echo."), 7)
    assert start.messages == ({"role": "user", "content": "Echo.\nIt says seed 7."},)
    assert await env.step(said("a")) == Step(({"role": "user", "content": "It says a."},), 0.5, False, {"refused": 0})
    told = {"role": "user", "content": "openenv: step: Invalid message; number: Field required"}
    assert await env.step(said("odd")) == Step((told,), metrics={"refused": 1})
    assert (await env.step(said("b"))).done
    with pytest.raises(WrongInput, match="openenv: step: Server at capacity. Raise max_concurrent_envs"):
        await env.step(said("bad"))
    await env.close()


# Our border with verifiers, whose place a small package takes: what we ask, what comes back, and how it all ends.

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
    assert await env.reset(problem(task=3), 1) == Question((5, 6, 7), 7)
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
