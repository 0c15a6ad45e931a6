"""An environment in a process of its own, seen from the generator: the same methods, and faults by name."""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess as Process
from typing import Any

from rewards.environment import values_of
from rewards.secret_values import resolved
from rollout.env.config import EnvConfig
from rollout.env.loader import code_of
from rollout.env.processes import preload
from rollout.env.processes.descendants import descendants, kill
from rollout.env.processes.host import LENGTH, MOST_BYTES, Spec, host, write
from rollout.env.processes.wire import start_from_json, step_from_json
from rollout.env.program import Asked, NoMore, Sampled
from rollout.env.protocol import Start, Step, Turn
from rollout.env.trajectory import EnvironmentFault
from rollout.schema import Problem

log = logging.getLogger("rollout")

CLOSE_S = 2.0  # that an environment may take to free what it holds
STARTS = 5  # of a process, while what it is forked from dies
START_AGAIN_S = 0.1


def spec_of(config: EnvConfig) -> Spec:
    """What a process needs to make the environment. Raises RewardError for a variable that is named and not set,
    SecretError for an argument `env:NAME` likewise."""
    return Spec(config.use or "", resolved(config.args, "env.args"), values_of(config.variables, "env"), config.memory)


class Forks:
    """Where environments' processes come from: a server that has loaded the environment's code, and is forked.

    Its thread must live as long as the processes, and starts them one after the other.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload.__name__])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment-starter")

    def start(self, end: socket.socket) -> "Future[Process]":
        """A new process that serves an environment on that end of a socket pair, which is closed here."""
        return self._thread.submit(self._start, end)

    def _start(self, end: socket.socket) -> Process:
        """Raises EnvironmentFault if the server dies of it each time, or there is none."""
        with end:
            for _ in range(STARTS):
                try:
                    return self._fork(end)
                except (EOFError, ConnectionError):  # the server was killed; a fresh one is started once it is gone
                    log.warning("the process that environments are forked from was lost; starting a fresh one")
                    time.sleep(START_AGAIN_S)
        raise EnvironmentFault(
            "env_killed",
            f"reset: what its process is forked from died {STARTS} times; see whether the machine has memory and "
            "processes left",
        )

    def _fork(self, end: socket.socket) -> Process:
        os.environ[preload.VARIABLE] = preload.request(code_of(self.spec.use, self.spec.args))
        try:  # the server is started in here, or in start(), if it is lost in between
            forkserver.ensure_running()
            process = self._context.Process(target=host, args=(end, self.spec), daemon=True)
            process.start()
        finally:
            del os.environ[preload.VARIABLE]
        return process

    def close(self) -> None:
        """No process can be started after this."""
        self._thread.shutdown()


class EnvironmentProcess:
    """A rollout.env.program.Hosted whose faults are EnvironmentFault.

    Used by one trajectory. After a fault it only can be closed.
    """

    def __init__(self, forks: Forks, config: EnvConfig) -> None:
        self._forks, self._config = forks, config
        self._process: Future[Process] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._answers = False  # the last question was answered

    async def reset(self, problem: Problem, seed: int) -> Start | Asked:
        async with _within(self._config.start_timeout_s, "reset", "env.start_timeout_s"):
            ours, theirs = socket.socketpair()
            self._process = self._forks.start(theirs)
            await asyncio.wrap_future(self._process)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            return start_from_json(await self._ask("reset", problem, seed))

    async def step(self, turn: Turn | Sampled | NoMore) -> Step | Asked:
        async with _within(self._config.step_timeout_s, "step", "env.step_timeout_s"):
            return step_from_json(await self._ask("step", turn))

    async def score(self) -> Mapping[str, float]:
        async with _within(self._config.step_timeout_s, "score", "env.step_timeout_s"):
            parts: dict[str, float] = await self._ask("score")
            return parts

    async def close(self) -> None:
        """Lets the environment free what it holds, then ends its process and what that has started."""
        if self._process is None:
            return
        if self._writer is not None:
            if self._answers:
                with contextlib.suppress(EnvironmentFault, TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await self._ask("close")
            self._writer.close()
        if not self._process.cancel():
            await asyncio.to_thread(_end, self._process.result)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._reader is not None
        assert self._writer is not None
        self._answers = False
        try:
            write(self._writer, pickle.dumps((method, *arguments)))
            await self._writer.drain()
            length = int.from_bytes(await self._reader.readexactly(LENGTH))
            if length > MOST_BYTES:
                raise EnvironmentFault(
                    "flood", f"{method}: answered with {length} bytes, at most {MOST_BYTES} are taken"
                )
            answer = json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EnvironmentFault("env_killed", f"{method}: its process died{await self._death()}") from None
        self._answers = True
        if "outcome" in answer:
            raise EnvironmentFault(answer["outcome"], answer["sentence"])
        return answer["value"]

    async def _death(self) -> str:
        assert self._process is not None
        process = self._process.result()
        await asyncio.to_thread(process.join, CLOSE_S)
        code = process.exitcode
        return "" if code is None else f" (exit code {code})" if code >= 0 else f" ({signal.Signals(-code).name})"


@contextlib.asynccontextmanager
async def _within(seconds: float, method: str, key: str) -> AsyncIterator[None]:
    clock = asyncio.timeout(seconds)
    try:
        async with clock:
            yield
    except TimeoutError:
        if not clock.expired():
            raise
        raise EnvironmentFault("env_timeout", f"{method}: no answer within {seconds:g} s ({key})") from None


def _end(started: Callable[[], Process]) -> None:
    """Blocks until the process is gone; it may be starting still."""
    try:
        process = started()
    except EnvironmentFault:  # it never was
        return
    assert process.pid is not None
    every = [process.pid, *descendants(process.pid)]
    with contextlib.suppress(ProcessLookupError):  # before it has a group, there is only itself
        os.killpg(process.pid, signal.SIGKILL)  # whose members may have outlived it
    kill(every)
    process.join()
    process.close()
