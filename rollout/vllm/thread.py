"""The thread that owns a vLLM LLMEngine: take commands; engine.step(); answer finished requests; and again.

It sleeps on its inbox when nothing is running. Nothing else touches the LLMEngine, so a policy is loaded between two
steps and generation never pauses for one (but whole weights with in_flight "finish" wait until nothing is running).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from rollout.engine import AdapterRefused, EngineAsleep, EngineClosed, EngineDied, EngineSettings, NoAdapter
from rollout.types import EngineError, Held
from rollout.vllm.adapter_cache import AdapterWindow, Resident
from rollout.vllm.commands import Command, Load, Read, Request, Rest
from rollout.vllm.convert import abort, build_engine, lora_request
from rollout.vllm.load_policy import load_adapter, load_weights, replace_adapter
from rollout.vllm.read_back import held_by
from rollout.vllm.sleep import sleep, wake

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 60.0


class EngineThread:
    """Runs commands in the order in which they come. The constructor blocks until the model is loaded.

    Attributes:
        window: the policy versions; its stage() may be called from any thread.
        vocab_size: token ids are below it.

    Raises:
        Exception: whatever vLLM raised at its start.
    """

    def __init__(self, settings: EngineSettings, arguments: dict[str, Any]) -> None:
        self.window = AdapterWindow(settings.adapter_window)
        self.vocab_size = 0
        self._settings = settings
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._backlog: deque[Command] = deque()
        self._running: dict[str, Request] = {}
        self._asleep = False
        self._slept: Held | None = None  # the newest adapter, when it went to sleep
        self._lock = threading.Lock()  # a call is either seen by the thread or refused, never lost in between
        self._end: Callable[[], EngineError] | None = None
        self._closing = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(arguments, started), name="vllm-engine", daemon=True)
        self._thread.start()
        started.result()

    # --- the callers' side -------------------------------------------------------------------------------------------

    async def call(self, command: Command) -> Any:
        """The command's answer. Cancelling the call frees its slots in the engine."""
        with self._lock:
            if self._end is not None:
                raise self._end()
            self._inbox.put(command)
        try:
            return await asyncio.wrap_future(command.answer)
        except asyncio.CancelledError:
            command.answer.cancel()
            self._inbox.put(None)  # wakes the thread, which then looks for what nobody wants to go on
            raise

    def stop(self, request: Request) -> None:
        """The request is answered with what was sampled by now; nothing happens if it has its answer."""
        request.stopped = True
        self._inbox.put(None)

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

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self, arguments: dict[str, Any], started: Future[None]) -> None:
        try:
            self._engine = build_engine(arguments)
            self.vocab_size = int(self._engine.vllm_config.model_config.get_vocab_size())
        except BaseException as error:  # raised again by the constructor
            self.window.clear()
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
        self.window.clear()
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
            for request in [r for r in self._running.values() if r.stopped or r.answer.cancelled()]:
                self._abort(request)

    def _abort(self, request: Request) -> None:
        output = abort(self._engine, request.id)
        if request.stopped:
            self._finish(output)
        else:
            self._release(request)

    def _execute(self, command: Command) -> bool:
        """False if the command must wait for running requests; those behind it then wait too, in order."""
        try:
            if isinstance(command, Load):
                return self._load(command)
            if isinstance(command, Rest):
                self._rest(command)
            elif isinstance(command, Read):
                self._read(command)
            elif not command.answer.cancelled():
                self._add(command)
        except (EngineError, ValueError) as error:  # this call's fault; anything else ends the engine
            _settle(command.answer, error)
        return True

    def _add(self, request: Request) -> None:
        adapter = self._newest()
        self._engine.add_request(
            request.id,
            # The salt keeps versions apart in the prefix cache; with adapters their names do that as well.
            {"prompt_token_ids": request.prompt_ids, "cache_salt": f"v{adapter.version}"},
            request.params,
            lora_request=lora_request(adapter) if self._settings.max_lora_rank else None,
        )
        request.adapter = adapter
        adapter.users += 1
        self._running[request.id] = request
        if request.stopped:  # while it waited for its turn
            self._abort(request)

    def _load(self, command: Load) -> bool:
        staged, newest = command.staged, self.window.newest
        try:
            self._require_awake()
            if newest is not None and (staged.version, staged.digest) == (newest.version, newest.digest):
                self.window.discard(staged)
            elif not self._load_new(staged, command.payload):
                return False
        except EngineError:
            self.window.discard(staged)
            raise
        _settle(command.answer, staged.digest)
        return True

    def _load_new(self, staged: Resident, payload: bytes | memoryview | None) -> bool:
        if (payload is None) == (self._settings.max_lora_rank == 0):
            raise AdapterRefused(
                f"policy v{staged.version}: an engine started with max_lora_rank={self._settings.max_lora_rank} "
                f"takes {'whole weights' if payload is None else 'adapters'} only; start it for the other kind"
            )
        continues = self._settings.in_flight == "continue"
        if payload is None and not continues:
            return load_adapter(self._engine, self.window, staged)
        if payload is None:
            replace_adapter(self._engine, self.window, staged)
        elif self._running and not continues:
            return False
        else:
            load_weights(self._engine, self.window, staged, payload)
        if continues:
            self._engine.set_weight_version(str(staged.version))  # labels every token from the next step on
        return True

    def _newest(self) -> Resident:
        self._require_awake()
        newest = self.window.newest
        if newest is None:
            raise NoAdapter("no adapter is loaded; await load_adapter first")
        return newest

    def _read(self, command: Read) -> None:
        held = held_by(self._engine, self._newest(), adapters=self._settings.max_lora_rank > 0)
        _settle(command.answer, held)

    def _rest(self, command: Rest) -> None:
        if command.asleep and not self._asleep:
            if not self._settings.sleeps:
                raise EngineError(
                    "sleep: the engine must be started with sleeps=True, got False; set it in EngineSettings"
                )
            if self._running:
                raise EngineError(f"sleep: nothing may be running, got {len(self._running)} calls; await them first")
            self._slept = sleep(self._engine, self.window, adapters=self._settings.max_lora_rank > 0)
        elif self._asleep and not command.asleep:
            wake(self._engine, self.window, self._slept)
        self._asleep = command.asleep
        _settle(command.answer, None)

    def _require_awake(self) -> None:
        if self._asleep:
            raise EngineAsleep("the engine is asleep and holds no model on its device; await wake() first")

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

    def _release(self, request: Request) -> None:
        del self._running[request.id]
        assert request.adapter is not None, "a running request has an adapter"
        request.adapter.users -= 1

    def _stop(self, end: Callable[[], EngineError]) -> None:
        with self._lock:
            self._end = end
            left: list[Command] = [*self._running.values(), *self._backlog]
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
