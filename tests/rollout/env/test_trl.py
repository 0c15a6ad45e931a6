"""TRL's environment classes: what TRL's trainer would do with them."""

from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from rollout.env.adapters.trl import TrlEnvironment
from rollout.env.protocol import Step, ToolCall, Turn
from tests.rollout.env.hand import problem, said

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
