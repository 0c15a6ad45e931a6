"""Agents as they are: a program or a Python function that asks for completions by the client of OpenAI or Anthropic
plays the trajectory, and the policy answers it on 127.0.0.1."""

import asyncio
import contextlib
import hmac
import inspect
import json
import math
import os
import secrets
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from aiohttp import web

from cluster.child import Program as Process
from cluster.child import adopt_orphans
from rewards.base import said
from rewards.loader import load_own
from rollout.env.adapters.chat_api import APIS, MODELS, OPENAI, Api, BadRequest
from rollout.env.protocol import Conversing, NoMore, Refused, as_text, own_messages
from rollout.schema import Problem

MOST_BYTES = 4 * 2**20  # of a request, which is up to three times as long on its way to the generator
MOST_REWARD = 64 << 10  # bytes of the file with the reward
MOST_REFUSED = 8  # turns that a program may ask for beyond its last; then it is ended
SHOWN = 500  # characters of what a program printed last
PROBLEM, REWARD, SEED = "GLEANER_PROBLEM", "GLEANER_REWARD", "GLEANER_SEED"
PART = "program"  # name of the reward, where it is a number alone
LOOPBACK = "127.0.0.1,localhost"
# What clients would take a key or an address from besides, or proxies, through which they would not reach us.
OTHERS = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_API_BASE")


class Door:
    """The policy over HTTP for one trajectory, to whoever has its key.

    Attributes:
        key: what a client must send, as `Authorization: Bearer` or `x-api-key`. It is dead when the trajectory is over.
        port: where it listens, on 127.0.0.1.
        over: whether the run's limits ended the last turn or refused one, so that the program could not go on.
        refused: why the last request was refused; "" if it was answered.
        ended: set once the program has ended, or has asked MOST_REFUSED times for a turn that it cannot have.
    """

    def __init__(self, model: Conversing, sampling: str) -> None:
        self._model, self._sampling = model, sampling
        self.key, self.port = f"sk-{secrets.token_urlsafe(32)}", 0
        self.over, self.refused = False, ""
        self.ended = asyncio.Event()
        self._asked_too_much = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listens on a free port."""
        application = web.Application(client_max_size=MOST_BYTES, middlewares=[self._checked])
        for path in APIS:
            application.router.add_post(path, self._converse)
        application.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = runner.addresses[0][1]
            yield
        finally:
            await runner.cleanup()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables from which clients take address and key."""
        host = f"http://127.0.0.1:{self.port}"
        return {
            "OPENAI_BASE_URL": f"{host}/v1", "OPENAI_API_KEY": self.key, "ANTHROPIC_BASE_URL": host,
            "ANTHROPIC_API_KEY": self.key, "NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK,
        }  # fmt: skip

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answers errors in the form of the API that was asked."""
        api = APIS.get(request.path, OPENAI)
        given = request.headers.get("Authorization", "").removeprefix("Bearer "), request.headers.get("x-api-key", "")
        if not any(hmac.compare_digest(one.encode(), self.key.encode()) for one in given):
            return _error(api, "the key must be that of the trajectory (OPENAI_API_KEY, ANTHROPIC_API_KEY)", 401)
        try:
            response: web.StreamResponse = await handler(request)
            return response
        except web.HTTPRequestEntityTooLarge:
            return self._refusal(api, f"a request must have at most {MOST_BYTES} bytes", 413)
        except web.HTTPException as error:
            known = ", ".join(("GET /v1/models", *(f"POST {path}" for path in APIS)))
            return self._refusal(api, f"{request.method} {request.path}: there is {known} here", error.status)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(MODELS)

    async def _converse(self, request: web.Request) -> web.StreamResponse:
        api = APIS[request.path]
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise BadRequest("a request must be a JSON object")
            asked = api.asked(body, self._sampling)
        except (BadRequest, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            return self._refusal(api, said(error) or "a request must be JSON", 400)
        answer = await self._model.converse(asked)
        if isinstance(answer, Refused):
            return self._refusal(api, answer.reason, 400)
        if isinstance(answer, NoMore):
            self.over, self._asked_too_much = True, self._asked_too_much + 1
            if self._asked_too_much == MOST_REFUSED:
                self.ended.set()
            return _error(api, answer.reason, 400, "context_length_exceeded")
        self.over, self.refused = answer.cut, ""
        told = api.answer(answer, str(body.get("model", "policy")))
        if not body.get("stream"):
            return web.json_response(told)
        events = "".join(api.events(told, body))
        return web.Response(text=events, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    def _refusal(self, api: Api, sentence: str, status: int) -> web.Response:
        self.refused = sentence
        return _error(api, sentence, status)


def _error(api: Api, sentence: str, status: int, code: str = "invalid_request_error") -> web.Response:
    return web.json_response(api.error(sentence, status, code), status=status)


class AgentProgram:
    """A program, or a Python function, that plays the trajectory. Give one of the two.

    command: the program's command line, as a list or as one text that is split as a shell splits it, without a shell.
        `{column}` in it stands for that column of the problem, `{prompt}` for its last message; `{{` is a brace. The
        scripts of our own Python come first in its PATH, so that `python` is that one.
    function: `package.module:name` or `path/file.py:name`, plain or async. It is called with the problem as the file
        of GLEANER_PROBLEM has it, and returns the reward: a number, numbers by name, or None.
    sampling: "refuse": a request that names a temperature or another setting of sampling is refused. "run": it is
        answered, with the run's own in its place.
    failed: the reward of a program that ends with another exit code than 0, and of a function that raises; None: that
        is a fault of the environment, and the trajectory is not trained on.

    Raises ValueError for other arguments.
    """

    def __init__(
        self,
        command: Sequence[str] | str | None = None,
        function: str | None = None,
        sampling: str = "refuse",
        failed: float | None = None,
    ) -> None:
        if (command is None) == (function is None):
            raise ValueError("env.args: must have command or function, and not both; give one of them")
        if sampling not in ("refuse", "run"):
            raise ValueError(f"env.args.sampling: must be refuse or run, got {sampling!r:.80}")
        if failed is not None and not _is_number(failed):
            raise ValueError(f"env.args.failed: must be a finite number or null, got {failed!r:.80}")
        self._words = shlex.split(command) if isinstance(command, str) else list(command or ())
        if command is not None and not (self._words and all(isinstance(word, str) for word in self._words)):
            raise ValueError(f"env.args.command: must be a text, or a list of texts, got {command!r:.80}")
        self._function = None if function is None else load_own(function, "my_agent")
        self._sampling, self._failed = sampling, failed

    async def run(self, problem: Problem, seed: int, model: Conversing) -> Mapping[str, float]:
        """The reward by name. Raises RuntimeError for a program that failed, ValueError for a reward that is none."""
        adopt_orphans()  # what the program leaves behind ends with this process
        folder, given = Path(tempfile.gettempdir()), _given(problem, seed)
        reward = folder / "reward.json"
        (folder / "problem.json").write_text(json.dumps(given))
        door = Door(model, self._sampling)
        async with door.open():
            told = {PROBLEM: str(folder / "problem.json"), REWARD: str(reward), SEED: str(seed)}
            told["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
            for name in OTHERS:
                os.environ.pop(name, None)
            os.environ.update(door.variables | told)  # this process is the trajectory's own
            if self._function is not None:
                returned, failure = await _called(self._function, given)
            else:
                returned, failure = None, await _played(_filled(self._words, given), door)
        if failure and not door.over:
            if self._failed is None:
                why = f"; its last request was refused: {door.refused}" if door.refused else ""
                raise RuntimeError(f"{failure}{why}")
            return {PART: float(self._failed)}
        return _parts(_read(reward) if returned is None else returned)


def _given(problem: Problem, seed: int) -> dict[str, Any]:
    """The problem as a program is given it."""
    messages = [dict(message) for message in own_messages(problem)]
    columns = json.loads(json.dumps(problem.columns, default=str))
    return {"id": problem.id, "seed": seed, "messages": messages, "prompt": messages[-1]["content"], "columns": columns}


def _filled(words: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    """The command line with the problem's columns in it. Raises ValueError for a name that is no column."""
    known = {"prompt": given["prompt"], **given["columns"]}
    try:
        return [
            "".join(text + ("" if name is None else str(known[name])) for text, name, *_ in Formatter().parse(word))
            for word in words
        ]
    except KeyError as error:
        raise ValueError(
            f"env.args.command: {{{error.args[0]}}} must be a column of the problem, one of {', '.join(known)}; write "
            "other braces twice"
        ) from None


async def _called(function: Any, given: Mapping[str, Any]) -> tuple[Any, str]:
    """What the function returned, and "" or how it failed. It has a thread and a loop of its own, since it may block
    while the policy answers it here."""

    def call() -> Any:
        made = function(dict(given))
        return asyncio.run(_awaited(made)) if inspect.isawaitable(made) else made

    try:
        return await asyncio.to_thread(call), ""
    except Exception as error:
        return None, f"the function raised {type(error).__name__}: {as_text(said(error))[:SHOWN]}"


async def _awaited(made: Any) -> Any:
    return await made


async def _played(words: Sequence[str], door: Door) -> str:
    """Runs the program to its end -> "" or how it failed. All that it has started ends with it."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    last = bytearray()

    loop = asyncio.get_running_loop()

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(reader, 1 << 16)
            if not part:  # nobody can write any more, and the loop would call this without end
                loop.remove_reader(reader)
            last.extend(part)
            del last[: -4 * SHOWN]

    try:
        try:
            process = Process(words, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer)
        finally:
            os.close(writer)
    except OSError as error:
        os.close(reader)
        raise RuntimeError(f"env.args.command: {words[0]} could not be started: {error.strerror}") from None
    loop.add_reader(reader, read)
    try:
        process.ended.add_done_callback(lambda _: loop.call_soon_threadsafe(door.ended.set))
        await door.ended.wait()
    finally:
        process.kill()
        code = process.code()
        loop.remove_reader(reader)
        read()
        os.close(reader)
    printed = " ".join(last.decode(errors="replace").split())[-SHOWN:]
    return "" if code == 0 else f"the program ended with exit code {code}: {printed or 'it printed nothing'}"


def _read(path: Path) -> Any:
    """The value of the file that a program wrote its reward to; None if it wrote none. Raises ValueError for a file
    that is no JSON, too long or no plain file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{REWARD}: must be written as a plain file")
        content = file.read(MOST_REWARD + 1)
    if len(content) > MOST_REWARD:
        raise ValueError(f"{REWARD}: must have at most {MOST_REWARD} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{REWARD}: must be JSON, and is not: {said(error)}") from None


def _parts(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    found = value if isinstance(value, Mapping) else {PART: value}
    if not all(_is_number(one) for one in found.values()):
        raise ValueError(f"{REWARD}: must be a finite number, or an object of such by name, got {value!r:.80}")
    return {str(name): float(one) for name, one in found.items()}


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str) and math.isfinite(float(value))
