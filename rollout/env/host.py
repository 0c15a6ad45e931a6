"""What runs in an environment's process: one environment, asked over a socket until that closes.

Requests come pickled, answers go back as JSON: what a user's code returns is never unpickled elsewhere. Each is
preceded by its length in 8 bytes.
"""

import asyncio
import contextlib
import json
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from io import TextIOWrapper
from multiprocessing import forkserver
from typing import Any, NamedTuple, NoReturn

from cluster.child import keep_from_children
from cluster.errors import WrongInput
from rewards.base import writable
from rewards.environment import OF_ENVIRONMENTS, described, lent
from rewards.worker import confine
from rollout.env.loader import (
    BadAnswer,
    encoded,
    make,
    parts,
    start_to_json,
    step_to_json,
)
from rollout.env.protocol import Hosted

LENGTH = 8  # bytes before each message
MOST_BYTES = 2**20  # of an answer in words; a longer one is a flood
MOST_IDS_BYTES = 16 * 2**20  # of a program's question, which holds all token ids so far


class Spec(NamedTuple):
    """What a process needs to make its environment. variables: names and values that only it may see. seconds: to load
    its code."""

    use: str
    args: Mapping[str, Any]
    variables: Mapping[str, str]
    memory: int
    seconds: float


def host(end: socket.socket, spec: Spec, folder: str) -> None:
    """Makes the environment and serves it until the socket ends, and the process with it. folder: for temporary files,
    which whoever ends the process removes."""
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    _leave_the_server_to_its_owner()
    _part_from_the_others()
    keep_from_children(end.fileno())
    confine(spec.memory, os.getppid())  # if that has ended before, the socket's other end is closed
    with lent(spec.variables), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # who asks has gone
        asyncio.run(_serve(end, spec))
    os._exit(0)  # not held up by threads that an environment has left behind


def _leave_the_server_to_its_owner() -> None:
    """The server that we were forked from lives as long as the pipe to its owner, the generator, is held by anyone, and
    every child is given an end of it: a hanging environment would outlive a killed generator. Without our end the
    server ends with its owner, and the kernel ends us with the server (rewards.worker.confine)."""
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)


def _part_from_the_others() -> None:
    """Python gives a forked process random numbers of its own, numpy does not. What is printed is seen at once: at the
    end the process is killed."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


async def _serve(end: socket.socket, spec: Spec) -> NoReturn:
    """Raises IncompleteReadError or ConnectionError when who asks has gone."""
    reader, writer = await asyncio.open_connection(sock=end)
    env: Hosted | None = None
    while True:
        method, *arguments = pickle.loads(await read(reader))
        try:
            if env is None:  # not: if it is false, as one whose length is 0
                env = make(spec.use, spec.args)
            value = await _METHODS[method](env, *arguments)
            answer = _bounded(method, encoded(method, value), isinstance(value, dict) and "token_ids" in value)
        except BadAnswer as error:
            answer = _fault("bad_observation", str(error))
        except WrongInput as error:  # our own sentence, complete as it is
            answer = _fault("env_error", str(error))
        except BaseException as error:  # sys.exit() in an environment is its fault, not the process's end
            answer = _fault("env_error", f"{method}: {described(error, OF_ENVIRONMENTS, caller=__file__)}")
        write(writer, answer)
        await writer.drain()


def _bounded(method: str, answer: bytes, of_ids: bool) -> bytes:
    most = MOST_IDS_BYTES if of_ids else MOST_BYTES
    if len(answer) <= most:
        return answer
    return _fault("flood", f"{method}: answered with {len(answer)} bytes, at most {most} are taken")


def _fault(outcome: str, sentence: str) -> bytes:
    return json.dumps({"outcome": outcome, "sentence": writable(sentence)}).encode()


async def _answer(value: Any) -> Any:
    """Of a method that may be plain: nobody else waits in this process."""
    return await value if isinstance(value, Awaitable) else value


async def _reset(env: Hosted, *arguments: Any) -> dict[str, Any]:
    return start_to_json(await _answer(env.reset(*arguments)))


async def _step(env: Hosted, turn: Any) -> dict[str, Any]:
    return step_to_json(await _answer(env.step(turn)))


async def _score(env: Hosted) -> dict[str, float]:
    return parts(await _answer(env.score()))


async def _close(env: Hosted) -> None:
    await _answer(env.close())


_METHODS: dict[str, Callable[..., Awaitable[Any]]] = {
    "reset": _reset, "step": _step, "score": _score, "close": _close,
}  # fmt: skip


async def read(reader: asyncio.StreamReader) -> bytes:
    """The next message. Raises IncompleteReadError when the other end is gone."""
    length = int.from_bytes(await reader.readexactly(LENGTH))
    return await reader.readexactly(length)


def write(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Sends a message."""
    writer.write(len(message).to_bytes(LENGTH) + message)
