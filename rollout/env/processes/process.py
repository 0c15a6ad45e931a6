"""An environment in a process of its own, seen from the generator: the same methods, and faults by name."""

import asyncio
import contextlib
import json
import pickle
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from multiprocessing.context import ForkServerProcess as Process
from pathlib import Path
from typing import Any

from cluster.deadline import within
from cluster.files import wipe
from rollout.env.config import EnvConfig
from rollout.env.processes.forks import Forks, end_process
from rollout.env.processes.host import LENGTH, MOST_IDS_BYTES, write
from rollout.env.processes.wire import start_from_json, step_from_json
from rollout.env.program import Asked, NoMore, Sampled
from rollout.env.protocol import Start, Step, Turn
from rollout.env.trajectory import EnvironmentFault
from rollout.schema import Problem

CLOSE_S = 2.0  # that an environment may take to free what it holds


class EnvironmentProcess:
    """A rollout.env.program.Hosted whose faults are EnvironmentFault.

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
        async with _within(self._config.start_timeout_s, "reset", "env.start_timeout_s"):
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
