"""Servers of OpenEnv, asked over a WebSocket as its own client does."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from cluster.errors import WrongInput
from rewards.loader import load_own
from rollout.env.protocol import Message, Start, Step, Turn
from rollout.schema import Problem

MOST_BYTES = 16 * 2**20  # of an answer
OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # errors of a step after which the session goes on


class OpenEnv:
    """One session of a server (openenv 0.10, core/env_server/http_server.py, /ws): reset(seed, episode_id), then
    step(action) -> observation, reward, done. Speaks its protocol itself, so that openenv need not be installed.

    url: of the server, http://host:port.
    action: your function(text of a turn) -> the action as a dict. An action that the server refuses, or that raises
        there, is answered to the policy in the server's words, and counted (env/refused).
    observe: your function(observation as a dict) -> the text that the policy sees next.
    first: whether the first observation is appended to the problem's last message, or the problem stands alone.

    Raises WrongInput for a function that is not there.
    """

    def __init__(self, url: str, action: str, observe: str, first: bool = True) -> None:
        self._url = url.rstrip("/").replace("http", "ws", 1) + "/ws"
        self._action, self._observe = load_own(action, "my_action"), load_own(observe, "my_observation")
        self._first = first
        self._session: aiohttp.ClientSession | None = None

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Begins an episode under the group's seed. Raises WrongInput with the server's words."""
        if isinstance(problem.messages, str):
            raise WrongInput("openenv: problems must be chat messages, got plain text; see data.prompt")
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(self._url, max_msg_size=MOST_BYTES)
        data = _data("reset", await self._ask("reset", {"seed": seed % 2**31, "episode_id": problem.id}))
        messages: list[Message] = [dict(message) for message in problem.messages]
        if self._first:
            seen = str(self._observe(data["observation"]))
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n{seen}"}
        return Start(tuple(messages))

    async def step(self, turn: Turn) -> Step:
        """Does what the text says. Raises WrongInput where the session has ended."""
        answer = await self._ask("step", self._action(turn.text))
        if answer["type"] == "error" and _code(answer["data"]) in OF_THE_ACTION:
            return Step(({"role": "user", "content": _told("step", answer["data"])},), metrics={"refused": 1.0})
        data = _data("step", answer)
        message = {"role": "user", "content": str(self._observe(data["observation"]))}
        return Step((message,), data.get("reward"), bool(data.get("done")), {"refused": 0.0})

    async def score(self) -> Mapping[str, float]:
        """Turns have it all."""
        return {}

    async def close(self) -> None:
        """Ends the session."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        answer: dict[str, Any] = json.loads(await self._socket.receive_str())
        return answer


def _data(kind: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Raises WrongInput for an error that the server answered with."""
    if answer["type"] == "error":
        raise WrongInput(_told(kind, answer["data"]))
    found: dict[str, Any] = answer["data"]
    return found


def _code(error: Mapping[str, Any]) -> str:
    """Its WSErrorCode."""
    return str(error.get("code", ""))


def _told(kind: str, error: Mapping[str, Any]) -> str:
    wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.get("errors", [])[:5]]
    told = "; ".join([str(error.get("message", error)), *wrong])
    if _code(error) == "CAPACITY_REACHED":
        told += " Raise max_concurrent_envs of the server's create_app, which is 1 by default, or lower env.concurrency"
    return f"openenv: {kind}: {told}"
