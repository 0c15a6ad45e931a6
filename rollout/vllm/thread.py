"""The thread that owns a vLLM LLMEngine: take commands; engine.step(); answer finished requests; and again.

It sleeps on its inbox when nothing is running. Nothing else touches the LLMEngine, so a policy is loaded between two
steps and generation never pauses for one (but whole weights with in_flight "finish" wait until nothing is running).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollout.engine import EngineClosed, EngineDied, EngineSettings
from rollout.types import EngineError
from rollout.vllm.adapter_cache import AdapterWindow
from rollout.vllm.arguments import build_engine
from rollout.vllm.commands import Command
from rollout.vllm.shards import lost_shard, settle_ends
from rollout.vllm.startup import shut_down
from rollout.vllm.turns import Turns, settle

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
            engine = build_engine(arguments, shares_base=self._settings.shares_base)
            if self._settings.shards > 1:
                settle_ends(engine)
            self._turns = Turns(engine, self._settings, self.window)
            self.vocab_size = int(engine.vllm_config.model_config.get_vocab_size())
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
            cause = lost_shard(engine, self._settings.shards) or f"{type(error).__name__}: {error}"
            self._stop(lambda: EngineDied(f"the engine died of {cause}; restart its worker (traceback in the log)"))
        self.window.clear()
        shut_down(engine)
        self._turns.close()

    def _turn(self) -> None:
        self._take(block=self._turns.idle)
        self._turns.turn()

    def _take(self, block: bool) -> None:
        """Moves what has arrived to the backlog; with block, first waits for something to arrive."""
        woken = False
        while block or not self._inbox.empty():
            command = self._inbox.get()
            block = False
            if command is None:
                woken = True
            else:
                self._turns.backlog.append(command)
        if woken:
            self._turns.abort_unwanted()

    def _stop(self, end: Callable[[], EngineError]) -> None:
        with self._lock:
            self._end = end
            left = [*self._turns.unanswered()]
            while not self._inbox.empty():
                command = self._inbox.get()
                left += [] if command is None else [command]
        for command in left:
            settle(command.answer, end())
