"""SkyRL-Gym's and OpenEnv's environments, by classes and a server of their signatures."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cluster.errors import WrongInput
from rollout.env.adapters.openenv import OpenEnv
from rollout.env.adapters.skyrl_gym import SkyRLGym
from rollout.env.protocol import Step
from tests.rollout.env.hand import problem, said

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
