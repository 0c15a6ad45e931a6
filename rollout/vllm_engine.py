"""vLLM as an Engine: one LLMEngine in this process, owned by one thread.

The thread repeats {take commands; engine.step(); answer finished requests} and sleeps on its inbox when nothing is
running. Nothing else touches the LLMEngine, so an adapter is loaded between two steps and generation never pauses.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.adapter_window import AdapterWindow, Resident
from rollout.engine import (
    Adapter,
    AdapterRefused,
    Completion,
    EngineClosed,
    EngineDied,
    EngineError,
    EngineSettings,
    NoAdapter,
    Sampling,
    Weights,
)
from rollout.engine_env import check_env
from rollout.vllm_calls import (
    build_engine,
    checked_prompt,
    completion_params,
    engine_arguments,
    lora_request,
    probe_params,
    read_completions,
    read_probe,
)
from rollout.vllm_load import load_adapter, load_weights

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Request:
    """generate or probe. read turns vLLM's output and the policy version into the answer."""

    id: str
    prompt_ids: list[int]
    params: Any
    read: Callable[[Any, int], Any]
    answer: Future[Any] = field(default_factory=Future)
    adapter: Resident | None = None


@dataclass(slots=True)
class _Load:
    staged: Resident
    payload: bytes | None = None  # of whole weights; an adapter lies in its folder
    answer: Future[Any] = field(default_factory=Future)


class VllmEngine:
    """An Engine on vLLM 0.26 to 0.33, CPU or CUDA. The constructor blocks until the model is loaded.

    Raises:
        EngineEnvError: the process was not started with rollout.engine_env.required_env.
        ValueError: the adapter rank is above every rank vLLM supports.
    """

    def __init__(self, settings: EngineSettings) -> None:
        from vllm.platforms import current_platform

        cuda = bool(current_platform.is_cuda())
        check_env(cuda, os.environ)
        if not cuda:
            from rollout.vllm_cpu_lora import install_fast_cpu_lora

            install_fast_cpu_lora()
        self._settings = settings
        self._arguments = engine_arguments(settings, cuda)
        self._window = AdapterWindow(settings.adapter_window)
        self._ids = itertools.count()
        self._inbox: queue.SimpleQueue[_Request | _Load | None] = queue.SimpleQueue()
        self._backlog: deque[_Request | _Load] = deque()
        self._running: dict[str, _Request] = {}
        self._lock = threading.Lock()  # a call is either seen by the thread or refused, never lost in between
        self._end: Callable[[], EngineError] | None = None
        self._closing = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="vllm-engine", daemon=True)
        self._thread.start()
        started.result()

    # --- the callers' side -------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        """See Engine.generate. Cancelling the call frees its slots in the engine."""
        prompt = checked_prompt(prompt_ids, sampling.max_tokens, self._settings.max_model_len, self._vocab_size)
        request = _Request(f"r{next(self._ids)}", prompt, completion_params(sampling), read_completions)
        completions: list[Completion] = await self._call(request)
        return completions

    async def probe(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See Engine.probe. vLLM also samples one token, so at most max_model_len - 1 tokens fit."""
        if len(token_ids) < 2:
            raise ValueError(f"a probe needs at least 2 tokens, got {len(token_ids)}")
        prompt = checked_prompt(token_ids, 1, self._settings.max_model_len, self._vocab_size)
        request = _Request(f"r{next(self._ids)}", prompt, probe_params(), read_probe)
        logprobs: NDArray[np.float32] = await self._call(request)
        return logprobs

    async def load_adapter(self, adapter: Adapter) -> str:
        """See Engine.load_adapter. Waits, and lets later calls wait behind it, while every version is in use."""
        staged = await asyncio.to_thread(self._window.stage, adapter)
        digest: str = await self._call(_Load(staged))
        return digest

    async def load_weights(self, weights: Weights) -> str:
        """See Engine.load_weights."""
        staged = await asyncio.to_thread(self._window.stage, weights)
        digest: str = await self._call(_Load(staged, weights.payload))
        return digest

    async def close(self) -> None:
        """See Engine.close. Raises EngineError if the engine does not come back from its current step."""
        self._closing = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise EngineError(
                f"the engine thread must end within {_CLOSE_TIMEOUT_S:.0f} s of close(), and is still in a step; "
                "kill the process"
            )

    async def _call(self, command: _Request | _Load) -> Any:
        with self._lock:
            if self._end is not None:
                raise self._end()
            self._inbox.put(command)
        try:
            return await asyncio.wrap_future(command.answer)
        except asyncio.CancelledError:
            command.answer.cancel()
            self._inbox.put(None)  # wakes the thread, which then looks for cancelled answers
            raise

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self, started: Future[None]) -> None:
        try:
            self._engine = build_engine(self._arguments)
            self._vocab_size = int(self._engine.vllm_config.model_config.get_vocab_size())
        except BaseException as error:  # raised again by the constructor
            self._window.clear()
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._closing:
                self._turn()
            self._stop(lambda: EngineClosed("the engine was closed"))
        except BaseException as error:  # whatever it is, nobody may be left waiting
            log.exception("the engine thread died")
            cause = f"{type(error).__name__}: {error}"
            self._stop(lambda: EngineDied(f"the engine died of {cause}; restart its worker (traceback in the log)"))
        self._window.clear()
        self._engine.engine_core.shutdown()

    def _turn(self) -> None:
        self._take(block=not self._backlog and not self._engine.has_unfinished_requests())
        while self._backlog and self._execute(self._backlog[0]):
            self._backlog.popleft()
        if self._engine.has_unfinished_requests():
            for output in self._engine.step():
                self._finish(output)

    def _take(self, block: bool) -> None:
        """Moves what has arrived to the backlog; with block, first waits for something to arrive."""
        woken = False
        while block or not self._inbox.empty():
            command = self._inbox.get()
            block = False
            if command is None:
                woken = True
            else:
                self._backlog.append(command)
        if woken:
            self._abort_cancelled()

    def _abort_cancelled(self) -> None:
        for request in [r for r in self._running.values() if r.answer.cancelled()]:
            self._engine.abort_request([request.id])
            self._release(request)

    def _execute(self, command: _Request | _Load) -> bool:
        """False if the command must wait for running requests; those behind it then wait too, in order."""
        try:
            if isinstance(command, _Load):
                return self._load(command)
            if not command.answer.cancelled():
                self._add(command)
        except (EngineError, ValueError) as error:  # this call's fault; anything else ends the engine
            _settle(command.answer, error)
        return True

    def _add(self, request: _Request) -> None:
        adapter = self._window.newest
        if adapter is None:
            raise NoAdapter("no adapter is loaded; await load_adapter first")
        self._engine.add_request(
            request.id,
            {"prompt_token_ids": request.prompt_ids},
            request.params,
            lora_request=lora_request(adapter.version, adapter.folder) if self._settings.max_lora_rank else None,
        )
        request.adapter = adapter
        adapter.users += 1
        self._running[request.id] = request

    def _load(self, command: _Load) -> bool:
        staged, newest = command.staged, self._window.newest
        if newest is not None and (staged.version, staged.digest) == (newest.version, newest.digest):
            self._window.discard(staged)
        elif (command.payload is None) == (self._settings.max_lora_rank == 0):
            self._window.discard(staged)
            raise AdapterRefused(
                f"policy v{staged.version}: an engine started with max_lora_rank={self._settings.max_lora_rank} takes "
                f"{'whole weights' if command.payload is None else 'adapters'} only; start it for the other kind"
            )
        elif not self._load_new(staged, command.payload):
            return False
        _settle(command.answer, staged.digest)
        return True

    def _load_new(self, staged: Resident, payload: bytes | None) -> bool:
        try:
            if payload is None:
                return load_adapter(self._engine, self._window, staged)
            if self._running:
                return False
            load_weights(self._engine, self._window, staged, payload)
            return True
        except EngineError:
            self._window.discard(staged)
            raise

    def _finish(self, output: Any) -> None:
        request = self._running.get(output.request_id)
        if request is None or not output.finished:  # an aborted request may still have had output in this step
            return
        assert request.adapter is not None, "a running request has an adapter"
        answer: Any
        try:
            answer = request.read(output, request.adapter.version)
        except EngineError as error:
            answer = error
        # Not before read: should that fail in a way nobody thought of, _stop must find the request among the running.
        # Not after the answer: who has it may count on the adapter being free.
        self._release(request)
        _settle(request.answer, answer)

    def _release(self, request: _Request) -> None:
        del self._running[request.id]
        assert request.adapter is not None, "a running request has an adapter"
        request.adapter.users -= 1

    def _stop(self, end: Callable[[], EngineError]) -> None:
        with self._lock:
            self._end = end
            left = [*self._running.values(), *self._backlog]
            while not self._inbox.empty():
                command = self._inbox.get()
                left += [] if command is None else [command]
        for command in left:
            _settle(command.answer, end())


def _settle(answer: Future[Any], value: Any) -> None:
    """Gives the caller its value, or raises it there if it is an exception."""
    with suppress(InvalidStateError):  # the caller cancelled in the meantime and wants no answer
        if isinstance(value, Exception):
            answer.set_exception(value)
        else:
            answer.set_result(value)
