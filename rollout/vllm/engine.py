"""VllmEngine, the Engine of a real run: one LLMEngine of vLLM in the generator's process, owned by one thread.

Calls of VllmEngine become commands. EngineThread takes them from its inbox; EngineSteps executes them,
and steps the engine.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, dropwhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.telemetry import peak_memory
from rollout.data.model_files import CONFIG, read_json
from rollout.data.weight_names import check_fit, check_model
from rollout.engine import EngineDied, EngineSettings
from rollout.quantised import is_quantised
from rollout.types import Adapter, Completion, EngineError, Held, Manifest, Sampling, TeacherLogprobs, Weights
from rollout.vllm.arguments import (
    build_engine,
    check_can_continue,
    common,
    engine_arguments,
    quantised_arguments,
    zeroed_blocks,
)
from rollout.vllm.convert import (
    AdapterWindow,
    Resident,
    checked_prompt,
    completion_params,
    lora_request,
    probe_params,
    read_completions,
    read_continued,
    read_probe,
    read_prompt_logprobs,
)
from rollout.vllm.environment import check_env
from rollout.vllm.experts import record_experts
from rollout.vllm.policies import Policies
from rollout.vllm.read_back import lost_shard, peak_of, settle_ends

# Before a model is loaded, the memory of the card must be free, which a lost generator may not have released yet.

PATIENCE_S, EVERY_S = 60.0, 0.2


def wait_for_room(
    needed: int,
    free: Callable[[], int],
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until free() returns at least `needed` bytes. Raises EngineError after PATIENCE_S seconds."""
    deadline = now() + PATIENCE_S
    while (there := free()) < needed:
        if now() > deadline:
            raise EngineError(
                f"memory: the model and its KV cache need {needed / 2**20:.0f} MiB of the card, and after "
                f"{PATIENCE_S:.0f} s {there / 2**20:.0f} MiB are free: another process holds the rest (nvidia-smi says "
                "which), or memory.device is more than there is"
            )
        sleep(EVERY_S)


# Commands to the engine's thread. Each holds the future of its answer.


@dataclass(slots=True)
class Request:
    """The command for Engine.generate and Engine.probe.

    read: (vLLM's output, version of the policy that the request began with) -> the answer. adapter: that policy; None
    until the request is in the engine. run: number of the run that asks. in_turn: whether it waits for its run's turn,
    where runs take turns; a probe does not.
    """

    id: str
    prompt_ids: list[int]
    params: Any
    read: Callable[[Any, int], Any]
    answer: Future[Any] = field(default_factory=Future)
    adapter: Resident | None = None
    run: int = 0
    in_turn: bool = True


@dataclass(slots=True)
class Load:
    """The command for Engine.load_adapter and Engine.load_weights."""

    staged: Resident
    weights: Weights | None = None  # None for an adapter, which lies in the folder of `staged`
    answer: Future[Any] = field(default_factory=Future)

    @property
    def run(self) -> int:
        """The number of the run whose policy it is."""
        return self.staged.run


@dataclass(slots=True)
class Rest:
    """The command for Engine.sleep, or with asleep=False for Engine.wake."""

    asleep: bool
    answer: Future[Any] = field(default_factory=Future)
    run: int = 0  # an engine of several runs does not sleep


@dataclass(slots=True)
class Read:
    """The command for Engine.held. run: number of the run that asks."""

    run: int
    answer: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Peak:
    """The command for Engine.peak_memory of an engine with several shards."""

    answer: Future[Any] = field(default_factory=Future)
    run: int = 0


@dataclass(slots=True)
class Share:
    """The command for Engine.share_base."""

    answer: Future[Any] = field(default_factory=Future)
    run: int = 0


Command = Request | Load | Read | Peak | Rest | Share


class EngineSteps:
    """What the engine's thread does: execute commands in order, step the engine, answer finished requests.

    On a CPU the runs of an engine take turns: those of one run that have arrived are generated, then those of another.
    A step's time grows there with its sequences (SmolLM2-135M in float32: 35 ms, and 2.1 ms for each), so two runs that
    decode together end nearly as late as the second of two that follow each other, and the learner waits for both
    (benchmarks/results/sweep.md). On a card a step takes about as long with twice as many sequences.

    backlog: commands that are not executed yet. running: requests in the engine, by id.
    """

    def __init__(self, engine: Any, settings: EngineSettings, windows: Sequence[AdapterWindow]) -> None:
        """windows: the policy versions of each run."""
        self.engine = engine
        self.backlog: deque[Command] = deque()
        self.running: dict[str, Request] = {}
        self._of_run = [Policies(engine, settings, window) for window in windows]
        self._policies = self._of_run[0]  # of the only run, where an engine of several runs does not get the command
        self._adapters, self._shares = settings.max_lora_rank > 0, settings.shares_base
        self._continues = settings.in_flight == "continue"
        self._take_turns = len(windows) > 1 and engine.vllm_config.device_config.device_type == "cpu"

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until another command comes."""
        return not self.backlog and not self.engine.has_unfinished_requests()

    def turn(self) -> None:
        """Executes the commands that need not wait, then steps the engine once and answers finished requests. Behind a
        command that waits all others of its run wait, in their order."""
        index, waiting, later = 0, set[int](), self._of_later_turns()
        while index < len(self.backlog):
            command = self.backlog[index]
            if command.run not in waiting and id(command) not in later:
                with self._nothing_ahead() if isinstance(command, Load) else nullcontext():
                    done = self._execute(command)
                if done:
                    del self.backlog[index]
                    continue
                waiting.add(command.run)
            index += 1
        if self.engine.has_unfinished_requests():
            self._step()

    def _of_later_turns(self) -> set[int]:
        """id() of each request in the backlog that waits for another run's turn to end. A turn goes to the run of the
        oldest request, and ends with its last request that came before those of others."""
        asked = [one for one in self.backlog if isinstance(one, Request) and one.in_turn] if self._take_turns else []
        if not asked:
            return set()
        run = next((one.run for one in self.running.values() if one.in_turn), None)
        if run is None:
            return {id(one) for one in asked if one.run != asked[0].run}
        return {id(one) for one in dropwhile(lambda one: one.run == run, asked)}

    def abort_unwanted(self) -> None:
        """Ends requests whose caller was cancelled."""
        for request in [request for request in self.running.values() if request.answer.cancelled()]:
            self._abort(request)

    def unanswered(self) -> Iterable[Command]:
        """The commands that have no answer yet."""
        return [*self.running.values(), *self.backlog]

    def close(self) -> None:
        """Frees the memory of policies, after the engine has ended."""
        self._policies.close()

    def _step(self) -> None:
        for output in self.engine.step():
            self._finish(output)

    def _is_ahead(self) -> bool:
        """Whether vLLM has begun a step whose tokens it has not given yet."""
        core = self.engine.engine_core.engine_core
        return bool(core.batch_queue)  # None without asynchronous scheduling

    @contextmanager
    def _nothing_ahead(self) -> Iterator[None]:
        """A context in which no step is under way, so that a policy may take the place of another.

        With asynchronous scheduling vLLM (on CUDA) begins a step before it gives the tokens of the one before it. Those
        that the old policy sampled would come out after it was replaced, with the new version's label. So they are
        taken first, and nothing is scheduled meanwhile.
        """
        if not (self._continues and self._is_ahead()):
            yield
            return
        self.engine.sleep(level=0, mode="keep")  # level 0 stops the scheduler and frees nothing
        try:
            while self._is_ahead():
                self._step()
            yield
        finally:
            self.engine.wake_up(tags=["scheduling"])

    def _abort(self, request: Request) -> None:
        self.engine.abort_request([request.id])
        # vLLM removes the children of an aborted request with n > 1, but keeps the parent with their output.
        parents = self.engine.output_processor.parent_requests
        for name in [name for name, parent in parents.items() if parent.external_req_id == request.id]:
            del parents[name]
        self._release(request)

    def _execute(self, command: Command) -> bool:
        """Executes a command. False if it must wait for running requests; then later commands wait behind it."""
        try:
            if isinstance(command, Load):
                policies = self._of_run[command.staged.run]
                if not policies.load(command.staged, command.weights, running=bool(self.running)):
                    return False
                settle(command.answer, command.staged.digest)
            elif isinstance(command, Rest):
                if command.asleep:
                    self._policies.sleep(len(self.running))
                else:
                    self._policies.wake()
                settle(command.answer, None)
            elif isinstance(command, Read):
                settle(command.answer, self._of_run[command.run].held())
            elif isinstance(command, Peak):
                settle(command.answer, peak_of(self.engine))
            elif isinstance(command, Share):
                settle(command.answer, self._share())
            elif not command.answer.cancelled():
                self._add(command)
        except (EngineError, ValueError) as error:  # an error of this command alone; any other ends the engine
            settle(command.answer, error)
        return True

    def _share(self) -> Manifest:
        if not self._shares:
            raise EngineError("share_base: the engine must be started with shares_base=True; set it in EngineSettings")
        from rollout.vllm.shared_base import manifest_of

        return manifest_of(self.engine)

    def _add(self, request: Request) -> None:
        adapter = self._of_run[request.run].newest()
        self.engine.add_request(
            request.id,
            # The salt keeps policy versions apart in the prefix cache. The names of adapters do so too; whole weights
            # have none.
            {"prompt_token_ids": request.prompt_ids, "cache_salt": adapter.label},
            request.params,
            lora_request=lora_request(adapter) if self._adapters else None,
        )
        request.adapter = adapter
        adapter.users += 1
        self.running[request.id] = request

    def _finish(self, output: Any) -> None:
        request = self.running.get(output.request_id)
        if request is None or not output.finished:  # a request that was aborted may still have output in this step
            return
        assert request.adapter is not None, "a running request has an adapter"
        answer: Any
        try:
            answer = request.read(output, request.adapter.version)
        except EngineError as error:
            answer = error
        # The release comes after `read`, so that a request is among the running ones if `read` fails unexpectedly. It
        # comes before the answer, so that the caller may count on the adapter being free.
        self._release(request)
        settle(request.answer, answer)

    def _release(self, request: Request) -> None:
        del self.running[request.id]
        assert request.adapter is not None, "a running request has an adapter"
        request.adapter.users -= 1


def as_it_is(settings: EngineSettings) -> bool:
    """Whether the engine is a teacher's on a quantised checkpoint, whose weights may be stored in any way that vLLM
    reads: nobody else computes with them."""
    return settings.prompt_logprobs is not None and is_quantised(read_json(settings.model, CONFIG))


def settle(answer: Future[Any], value: Any) -> None:
    """Gives the caller of a command its value, or raises the value there if it is an exception."""
    with suppress(InvalidStateError):  # the caller was cancelled meanwhile
        if isinstance(value, Exception):
            answer.set_exception(value)
        else:
            answer.set_result(value)


# The thread that owns the LLMEngine. It waits at its inbox when nothing is running.
#
# No other thread touches the LLMEngine, so a policy is loaded between two steps, and generation does not pause for it.
# Whole weights with in_flight "finish" are the exception: they wait until no request is running.

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 60.0


class EngineThread:
    """Runs commands in the order of their arrival. The constructor blocks until the model is loaded.

    Attributes:
        windows: the policy versions of each run that the engine holds; their stage() may be called from any thread.
        vocab_size: size of the model's vocabulary; token ids are smaller.

    Raises:
        Exception: whatever vLLM raises while the engine is built.
    """

    def __init__(self, settings: EngineSettings, capacities: Sequence[int], arguments: dict[str, Any]) -> None:
        """settings: of the engine. capacities: policy versions that it holds of each run."""
        runs = len(capacities)
        self.windows = [AdapterWindow(capacity, run, runs) for run, capacity in enumerate(capacities)]
        if settings.prompt_logprobs is not None:  # a teacher's only policy is the model as it is
            self.windows[0].add(self.windows[0].stage(Weights.unchanged(0)))
        self.vocab_size = 0
        self._settings = settings
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # so that a call is either seen by the thread or refused, and never lost
        self._end: Callable[[], EngineError] | None = None
        self._closing = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(arguments, started), name="vllm-engine", daemon=True)
        self._thread.start()
        started.result()

    # --- the callers' side -------------------------------------------------------------------------------------------

    async def call(self, command: Command) -> Any:
        """Sends a command and waits for its answer. Cancelling the call ends its requests in the engine."""
        with self._lock:
            if self._end is not None:
                raise self._end()
            self._inbox.put(command)
        try:
            return await asyncio.wrap_future(command.answer)
        except asyncio.CancelledError:
            command.answer.cancel()
            self._inbox.put(None)  # wakes the thread, which then aborts cancelled requests
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
            with zeroed_blocks() if len(self.windows) > 1 else nullcontext():
                engine = build_engine(arguments, shares_base=self._settings.shares_base)
            if self._settings.shards > 1:
                settle_ends(engine)
            if self._settings.records_experts and not arguments.get("enable_return_routed_experts"):
                record_experts(engine)
            self._turns = EngineSteps(engine, self._settings, self.windows)
            self.vocab_size = int(engine.vllm_config.model_config.get_vocab_size())
        except BaseException as error:  # the constructor raises it again
            self._forget_policies()
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._closing:
                self._turn()
            self._stop(lambda: EngineError("the engine was closed"))
        except BaseException as error:  # whatever the error is, no caller may be left waiting
            log.exception("the engine thread died")
            cause = lost_shard(engine, self._settings.shards) or f"{type(error).__name__}: {error}"
            self._stop(lambda: EngineDied(f"the engine died of {cause}; restart its worker (traceback in the log)"))
        self._forget_policies()
        engine.engine_core.shutdown()
        self._turns.close()

    def _forget_policies(self) -> None:
        for window in self.windows:
            window.clear()

    def _turn(self) -> None:
        self._take(block=self._turns.idle)
        self._turns.turn()

    def _take(self, block: bool) -> None:
        """Moves commands from the inbox to the backlog; with block, first waits until one arrives."""
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


class VllmEngine:
    """An Engine on vLLM 0.31 to 0.33, CPU or CUDA. The constructor blocks until the model is loaded.

    With `others` it is the engine of several runs, each with its own policies (`of_run`); it is itself that of run 0.

    others: the settings of further runs; rollout.vllm.arguments.common says in what they may differ.

    Raises:
        EngineError: the process was not started with rollout.vllm.environment.required_env, or the card has less free
            memory than settings.room.
        ValueError: the adapter rank is above every rank vLLM supports; nf4, sleeps, or fp8 without AVX-512 on a CPU;
            in_flight "continue" on a vLLM that does not say which version sampled a token (0.32 does, 0.31 does not).
        WrongInput: the model's files lack tensors, which vLLM would leave uninitialised, or hold unknown ones.
    """

    def __init__(self, settings: EngineSettings, *others: EngineSettings) -> None:
        from vllm.platforms import current_platform

        self._of_runs, settings = [settings, *others], common([settings, *others])

        cuda = bool(current_platform.is_cuda())
        check_env(cuda, os.environ)
        if settings.form:  # runner V2, vLLM's default on cards, has logits processors of another kind
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        arguments = engine_arguments(settings, cuda)
        if settings.in_flight == "continue":
            check_can_continue()
        key = "model.path" if settings.prompt_logprobs is None else "model.teacher"
        here = as_it_is(settings)
        if not here:
            here = check_fit(settings.model, key)
            arguments |= quantised_arguments(settings, cuda)
        if cuda and settings.room > 0:
            wait_for_room(settings.room, lambda: torch.cuda.mem_get_info()[0])
        if not cuda:
            from rollout.vllm.cpu import prepare_cpu_process

            prepare_cpu_process()
        self._settings, self._run, self._open = self._of_runs[0], 0, set(range(len(self._of_runs)))
        self._ids = count()
        read = read_continued if settings.in_flight == "continue" else read_completions
        self._read = partial(read, experts=settings.records_experts)
        self._thread = EngineThread(settings, [one.adapter_window for one in self._of_runs], arguments)
        if not here:  # the files were downloaded by vLLM just now, so they could not be checked before
            check_model(settings.model, key)

    def of_run(self, run: int, settings: EngineSettings | None = None) -> VllmEngine:
        """The same engine as one of its runs sees it: with that run's policies and settings. It ends when it was closed
        for each run. settings: that run's, with its stop tokens; None: those that the engine was made with."""
        other = copy.copy(self)
        other._run, other._settings = run, settings or self._of_runs[run]
        return other

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        """See Engine.generate. Cancelling the call also ends its requests in the engine."""
        prompt = checked_prompt(prompt_ids, sampling.max_tokens, self._settings.max_model_len, self._thread.vocab_size)
        params = completion_params(sampling, self._settings.stop_ids, self._settings.stop, self._settings.form)
        request = Request(f"r{next(self._ids)}", prompt, params, self._read, run=self._run)
        completions: list[Completion] = await self._thread.call(request)
        return completions

    async def probe(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See Engine.probe. vLLM also samples one token, so at most max_model_len - 1 tokens fit."""
        if len(token_ids) < 2:
            raise ValueError(f"a probe needs at least 2 tokens, got {len(token_ids)}")
        prompt = checked_prompt(token_ids, 1, self._settings.max_model_len, self._thread.vocab_size)
        request = Request(f"r{next(self._ids)}", prompt, probe_params(), read_probe, run=self._run, in_turn=False)
        logprobs: NDArray[np.float32] = await self._thread.call(request)
        return logprobs

    async def completion_logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> TeacherLogprobs:
        """The logprobs of a completion behind its prompt, by an engine with EngineSettings.prompt_logprobs. vLLM also
        samples one token, as for a probe. Cancelling the call ends its request."""
        top = self._settings.prompt_logprobs
        if top is None:
            raise ValueError("the engine must be started with prompt_logprobs, got None; set it in EngineSettings")
        if not len(completion_ids):
            return TeacherLogprobs(
                np.zeros(0, np.float32), np.zeros((0, top), np.int32), np.zeros((0, top), np.float32)
            )
        ids = checked_prompt([*prompt_ids, *completion_ids], 1, self._settings.max_model_len, self._thread.vocab_size)
        read = partial(read_prompt_logprobs, prompt=len(prompt_ids), top=top)
        found: TeacherLogprobs = await self._thread.call(Request(f"r{next(self._ids)}", ids, probe_params(top), read))
        return found

    async def held(self) -> Held:
        """See Engine.held. The call waits for the current step and for nothing else."""
        held: Held = await self._thread.call(Read(self._run))
        return held

    async def peak_memory(self) -> float:
        """See Engine.peak_memory."""
        if self._settings.shards == 1:
            return peak_memory()
        peak: float = await self._thread.call(Peak())
        return peak

    async def load_adapter(self, adapter: Adapter) -> str:
        """See Engine.load_adapter. With in_flight "finish" the call waits while every version is in use, and later
        calls wait behind it; with "continue" it waits for the current step only."""
        staged = await asyncio.to_thread(self._thread.windows[self._run].stage, adapter)
        digest: str = await self._thread.call(Load(staged))
        return digest

    async def load_weights(self, weights: Weights) -> str:
        """See Engine.load_weights."""
        staged = await asyncio.to_thread(self._thread.windows[self._run].stage, weights)
        digest: str = await self._thread.call(Load(staged, weights))
        return digest

    async def share_base(self) -> Manifest:
        """See Engine.share_base. The call waits for the current step; on a CPU it reads all weights, for digests."""
        manifest: Manifest = await self._thread.call(Share())
        return manifest

    async def sleep(self) -> None:
        """See Engine.sleep."""
        await self._thread.call(Rest(asleep=True))

    async def wake(self) -> None:
        """See Engine.wake."""
        await self._thread.call(Rest(asleep=False))

    async def close(self) -> None:
        """See Engine.close. Raises EngineError if the engine does not come back from its current step."""
        self._open.discard(self._run)
        if not self._open:
            await self._thread.close()
