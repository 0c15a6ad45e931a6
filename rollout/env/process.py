"""An environment in a process of its own, seen from the generator; where such processes come from, and how they end."""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess as Process
from pathlib import Path
from typing import Any

from cluster import child
from cluster.actor import within
from cluster.files import wipe
from cluster.machine import MARK
from rewards.config import resolved
from rewards.limits import lent, values_of
from rollout.config import DEFAULT_ENVIRONMENT_MEMORY
from rollout.env import preload
from rollout.env.config import EnvConfig
from rollout.env.host import LENGTH, MOST_IDS_BYTES, Spec, code_of, host, start_from_json, step_from_json, write
from rollout.env.play import EnvironmentFault
from rollout.env.protocol import Asked, NoMore, Sampled, Start, Step, Turn
from rollout.schema import Problem
from rollout.scorer import Sentences

# Where environments' processes come from, and how one is ended with all that it has started.


log = logging.getLogger("rollout")

STARTS = 5  # of a process, while what it is forked from dies
START_AGAIN_S = 0.1


def spec_of(config: EnvConfig, memory: int = DEFAULT_ENVIRONMENT_MEMORY) -> Spec:
    """What a process needs to make the environment. memory: the most bytes that it may hold.

    Raises WrongInput for a variable that is named and not set,
    WrongInput for an argument `env:NAME` likewise."""
    args, variables = resolved(config.args, "env.args"), values_of(config.variables, "env")
    return Spec(config.use or "", args, variables, memory, config.start_timeout_s)


class Forks:
    """Where environments' processes come from: a server that has loaded the environment's code, and is forked.

    Its thread must live as long as the processes, and starts them one after the other.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload.__name__])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment-starter")
        self.sentences = Sentences(log)  # of what is no fault of a trajectory

    def start(self, end: socket.socket, folder: str) -> "Future[Process]":
        """A new process that serves an environment on that end of a socket pair, which is closed here. folder: for its
        temporary files."""
        return self._thread.submit(self._start, end, folder)

    def _start(self, end: socket.socket, folder: str) -> Process:
        """Raises EnvironmentFault if the server dies of it each time, or there is none."""
        until = time.monotonic() + self.spec.seconds
        with end:
            for _ in range(STARTS):
                try:
                    return self._fork(end, folder)
                except (EOFError, ConnectionError):  # the server was killed; a fresh one is started once it is gone
                    if time.monotonic() > until:  # its code does not come to an end of loading (preload)
                        break
                    log.warning("the process that environments are forked from was lost; starting a fresh one")
                    time.sleep(START_AGAIN_S)
        raise EnvironmentFault(
            "env_killed",
            "reset: what its process is forked from died each time; see whether the environment's code ends the "
            "process that loads it, or loads longer than twice env.step_timeout_s, and whether the machine has "
            "memory and processes left",
        )

    def _fork(self, end: socket.socket, folder: str) -> Process:
        spec = self.spec
        told = {
            preload.VARIABLE: preload.request(code_of(spec.use, spec.args), [*spec.variables], spec.seconds),
            MARK: uuid.uuid4().hex,
            # Until Python 3.13 the server does not take this process's path, and finds a rollout.py of the user's.
            preload.SAFE: "1",
            preload.PATH: os.pathsep.join(filter(None, sys.path)),
        }
        resource_tracker.ensure_running()  # which is not the server's: it is not to be ended with it
        with lent(told):  # the server is started in here, or in start(), if it is lost in between
            forkserver.ensure_running()
            process = self._context.Process(target=host, args=(end, spec, folder), daemon=True)
            process.start()
        return process

    def close(self) -> None:
        """No process can be started after this."""
        self._thread.shutdown()


def end_process(started: Callable[[], Process]) -> None:
    """Blocks until the process is gone; it may be starting still."""
    try:
        process = started()
    except EnvironmentFault:  # it never was
        return
    child.end_process(process)
    process.close()


# An environment in a process of its own, seen from the generator: the same methods, and faults by name.

CLOSE_S = 2.0  # that an environment may take to free what it holds


class EnvironmentProcess:
    """A rollout.env.protocol.Hosted whose faults are EnvironmentFault.

    Used by one trajectory. After a fault it only can be closed.
    """

    def __init__(self, forks: Forks, config: EnvConfig) -> None:
        self._forks, self._config = forks, config
        self._process: Future[Process] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._folder: Path | None = None  # for its temporary files
        self._answers = False  # the last question was answered

    async def reset(self, problem: Problem, seed: int) -> Start | Asked:
        async with _within(self._config.start_timeout_s, "reset", "twice env.step_timeout_s"):
            ours, theirs = socket.socketpair()
            self._folder = Path(tempfile.mkdtemp(prefix="environment-"))
            self._process = self._forks.start(theirs, str(self._folder))
            await asyncio.wrap_future(self._process)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            return start_from_json(await self._ask("reset", problem, seed))

    async def step(self, turn: Turn | Sampled | NoMore) -> Step | Asked:
        async with _within(self._config.step_timeout_s, "step", "env.step_timeout_s"):
            step = step_from_json(await self._ask("step", turn))
        if isinstance(step, Step):
            self._forks.sentences.warn_of(step.warnings)
        return step

    async def score(self) -> Mapping[str, float]:
        async with _within(self._config.step_timeout_s, "score", "env.step_timeout_s"):
            parts: dict[str, float] = await self._ask("score")
            return parts

    async def close(self) -> None:
        """Lets the environment free what it holds, then ends its process and what that has started, also if it is
        cancelled meanwhile."""
        if self._process is None:
            return
        try:
            if self._writer is not None and self._answers:
                await self._free()
        finally:
            await asyncio.shield(asyncio.to_thread(self._end))
            if self._writer is not None:
                self._writer.close()

    def _end(self) -> None:
        assert self._process is not None
        assert self._folder is not None
        if not self._process.cancel():
            end_process(self._process.result)
        try:
            wipe(self._folder)
        except OSError as error:
            self._forks.sentences.warn([f"environment: its temporary files could not all be removed: {error}"])

    async def _free(self) -> None:
        """It stays until it is ended: what it has started is found by it."""
        try:
            async with within(CLOSE_S):
                await self._ask("close")
        except EnvironmentFault as fault:
            self._forks.sentences.warn([f"environment: {fault.sentence}"])
        except TimeoutError:
            self._forks.sentences.warn([f"environment: close: not done within {CLOSE_S:g} s, so its process was ended"])

    async def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._reader is not None
        assert self._writer is not None
        self._answers = False
        try:
            write(self._writer, pickle.dumps((method, *arguments)))
            await self._writer.drain()
            length = int.from_bytes(await self._reader.readexactly(LENGTH))
            if length > MOST_IDS_BYTES:
                raise EnvironmentFault(
                    "flood", f"{method}: answered with {length} bytes, at most {MOST_IDS_BYTES} are taken"
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
    clock = within(seconds)
    try:
        async with clock:
            yield
    except TimeoutError:
        if not clock.expired():
            raise
        raise EnvironmentFault("env_timeout", f"{method}: no answer within {seconds:g} s ({key})") from None
