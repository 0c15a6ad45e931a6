"""What the engine's thread does in one turn: execute commands in order, one engine step, answer finished requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from rollout.engine import EngineSettings
from rollout.shared_base.manifest import Manifest
from rollout.types import EngineError
from rollout.vllm.adapter_cache import AdapterWindow
from rollout.vllm.commands import Command, Load, Peak, Read, Request, Rest, Share
from rollout.vllm.convert import lora_request
from rollout.vllm.policies import Policies
from rollout.vllm.shards import peak_of


class Turns:
    """backlog: commands that wait for their turn. running: requests in the engine, by id."""

    def __init__(self, engine: Any, settings: EngineSettings, window: AdapterWindow) -> None:
        self.engine = engine
        self.backlog: deque[Command] = deque()
        self.running: dict[str, Request] = {}
        self._policies = Policies(engine, settings, window)
        self._adapters, self._shares = settings.max_lora_rank > 0, settings.shares_base

    @property
    def idle(self) -> bool:
        """Nothing is to be done until another command comes."""
        return not self.backlog and not self.engine.has_unfinished_requests()

    def turn(self) -> None:
        """Whatever commands can be executed, then one step of the engine."""
        while self.backlog and self._execute(self.backlog[0]):
            self.backlog.popleft()
        if self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self._finish(output)

    def abort_unwanted(self) -> None:
        """Ends requests whose caller was cancelled."""
        for request in [request for request in self.running.values() if request.answer.cancelled()]:
            self._abort(request)

    def unanswered(self) -> Iterable[Command]:
        """All that somebody waits for."""
        return [*self.running.values(), *self.backlog]

    def close(self) -> None:
        """When the engine has ended."""
        self._policies.close()

    def _abort(self, request: Request) -> None:
        self.engine.abort_request([request.id])
        # vLLM forgets the children of an aborted request with n > 1, and keeps the parent with their output.
        parents = self.engine.output_processor.parent_requests
        for name in [name for name, parent in parents.items() if parent.external_req_id == request.id]:
            del parents[name]
        self._release(request)

    def _execute(self, command: Command) -> bool:
        """False if the command must wait for running requests; those behind it then wait too, in order."""
        try:
            if isinstance(command, Load):
                if not self._policies.load(command.staged, command.weights, running=bool(self.running)):
                    return False
                settle(command.answer, command.staged.digest)
            elif isinstance(command, Rest):
                if command.asleep:
                    self._policies.sleep(len(self.running))
                else:
                    self._policies.wake()
                settle(command.answer, None)
            elif isinstance(command, Read):
                settle(command.answer, self._policies.held())
            elif isinstance(command, Peak):
                settle(command.answer, peak_of(self.engine))
            elif isinstance(command, Share):
                settle(command.answer, self._share())
            elif not command.answer.cancelled():
                self._add(command)
        except (EngineError, ValueError) as error:  # this call's fault; anything else ends the engine
            settle(command.answer, error)
        return True

    def _share(self) -> Manifest:
        if not self._shares:
            raise EngineError("share_base: the engine must be started with shares_base=True; set it in EngineSettings")
        from rollout.vllm.shared_base import manifest_of

        return manifest_of(self.engine)

    def _add(self, request: Request) -> None:
        adapter = self._policies.newest()
        self.engine.add_request(
            request.id,
            # The salt keeps versions apart in the prefix cache; with adapters their names do that as well.
            {"prompt_token_ids": request.prompt_ids, "cache_salt": f"v{adapter.version}"},
            request.params,
            lora_request=lora_request(adapter) if self._adapters else None,
        )
        request.adapter = adapter
        adapter.users += 1
        self.running[request.id] = request

    def _finish(self, output: Any) -> None:
        request = self.running.get(output.request_id)
        if request is None or not output.finished:  # an aborted request may still have had output in this step
            return
        assert request.adapter is not None, "a running request has an adapter"
        answer: Any
        try:
            answer = request.read(output, request.adapter.version)
        except EngineError as error:
            answer = error
        # Not before read: should that fail in an unforeseen way, the request must be found among the running ones.
        # Not after the answer: who has it may count on the adapter being free.
        self._release(request)
        settle(request.answer, answer)

    def _release(self, request: Request) -> None:
        del self.running[request.id]
        assert request.adapter is not None, "a running request has an adapter"
        request.adapter.users -= 1


def settle(answer: Future[Any], value: Any) -> None:
    """Gives the caller its value, or raises it there if it is an exception."""
    with suppress(InvalidStateError):  # the caller cancelled in the meantime and wants no answer
        if isinstance(value, Exception):
            answer.set_exception(value)
        else:
            answer.set_result(value)
