"""Runs each environment in a process of its own: the generator's side (EnvironmentProcess), and the fork server from
which these processes come (Forks). rollout.env.host is the other side."""

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
from rollout.env.protocol import Asked, NoMore, Question, Refused, Said, Sampled, Start, Step, Turn
from rollout.env.trajectory import EnvironmentFault
from rollout.schema import Problem
from rollout.scorer import Sentences

log = logging.getLogger("rollout")

STARTS = 5  # attempts to start a process, each with a fresh fork server if the one before died
START_AGAIN_S = 0.1  # wait between two attempts


def spec_of(config: EnvConfig, memory: int = DEFAULT_ENVIRONMENT_MEMORY) -> Spec:
    """The Spec of an environment's process. memory: most bytes that the process may hold.

    Raises WrongInput if a variable of env.variables is not set, WrongInput if that of an argument `env:NAME` is not.
    """
    args, variables = resolved(config.args, "env.args"), values_of(config.variables, "env")
    return Spec(config.use or "", args, variables, memory, config.start_timeout_s)


class Forks:
    """Starts environments' processes by forking a server that has loaded the environment's code.

    One thread starts the processes, one after the other. It must live as long as they do.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload.__name__])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment-starter")
        self.sentences = Sentences(log)  # for warnings that are not faults of a trajectory

    def start(self, end: socket.socket, folder: str) -> "Future[Process]":
        """Starts a process that serves an environment on `end` of a socket pair; this process's copy is closed.

        folder: for the environment's temporary files.
        """
        return self._thread.submit(self._start, end, folder)

    def _start(self, end: socket.socket, folder: str) -> Process:
        """Raises EnvironmentFault if the fork server dies at each attempt, or does not start."""
        until = time.monotonic() + self.spec.seconds
        with end:
            for _ in range(STARTS):
                try:
                    return self._fork(end, folder)
                except (EOFError, ConnectionError):  # the server was killed; the next attempt starts a fresh one
                    if time.monotonic() > until:  # the environment's code takes too long to load (preload)
                        break
                    log.warning("the process that environments are forked from was lost; starting a fresh one")
                    time.sleep(START_AGAIN_S)
        raise EnvironmentFault(
            "env_killed",
            "reset: what its process is forked from died each time; see whether the environment's code ends the "
            "process that loads it, or loads longer than twice env.step_timeout_s (at least 60 s), and whether the "
            "machine has memory and processes left",
        )

    def _fork(self, end: socket.socket, folder: str) -> Process:
        spec = self.spec
        told = {
            preload.VARIABLE: preload.request(code_of(spec.use, spec.args), [*spec.variables], spec.seconds),
            MARK: uuid.uuid4().hex,
            # Before Python 3.13 the server does not inherit sys.path, and would import a user's rollout.py instead.
            preload.SAFE: "1",
            preload.PATH: os.pathsep.join(filter(None, sys.path)),
        }
        resource_tracker.ensure_running()  # started here, so that the tracker does not end with the server
        with lent(told):  # ensure_running starts the server; process.start() does if it was lost in between
            forkserver.ensure_running()
            process = self._context.Process(target=host, args=(end, spec, folder), daemon=True)
            process.start()
        return process

    def close(self) -> None:
        """Ends the thread. No process can be started afterwards."""
        self._thread.shutdown()


def end_process(started: Callable[[], Process]) -> None:
    """Ends a process with all that it has started, and blocks until it is gone. started: waits until it has started."""
    try:
        process = started()
    except EnvironmentFault:  # the process could not be started
        return
    child.end_process(process)
    process.close()


CLOSE_S = 2.0  # seconds that an environment's close() may take


class EnvironmentProcess:
    """The environment of one trajectory, as a rollout.env.protocol.Hosted that runs in a process of its own.

    A fault of the environment is raised as EnvironmentFault; afterwards only close() may be called.
    """

    def __init__(self, forks: Forks, config: EnvConfig) -> None:
        self._forks, self._config = forks, config
        self._process: Future[Process] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._folder: Path | None = None  # for the environment's temporary files
        self._answers = False  # whether the last request was answered

    async def reset(self, problem: Problem, seed: int) -> Start | Question | Asked:
        async with _within(self._config.start_timeout_s, "reset", "twice env.step_timeout_s, at least 60 s"):
            ours, theirs = socket.socketpair()
            self._folder = Path(tempfile.mkdtemp(prefix="environment-"))
            self._process = self._forks.start(theirs, str(self._folder))
            await asyncio.wrap_future(self._process)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            return start_from_json(await self._ask("reset", problem, seed))

    async def step(self, turn: Turn | Sampled | Said | NoMore | Refused) -> Step | Question | Asked:
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
        """Has the environment free what it holds, then ends its process and all that the process has started. The
        process is ended also if this call is cancelled."""
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
        """Calls close() of the environment. Its process goes on, since what it has started is found through it."""
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
