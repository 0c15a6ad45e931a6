"""vLLM as an Engine: one LLMEngine in this process, owned by one thread (rollout.vllm.thread)."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.telemetry import peak_memory
from rollout.data.weight_names import check_fit, check_model
from rollout.engine import EngineSettings
from rollout.shared_base.manifest import Manifest
from rollout.types import Adapter, Completion, Held, Sampling, Weights
from rollout.vllm.arguments import check_can_continue, engine_arguments
from rollout.vllm.commands import Load, Peak, Read, Request, Rest, Share
from rollout.vllm.convert import (
    checked_prompt,
    completion_params,
    probe_params,
    read_completions,
    read_continued,
    read_probe,
)
from rollout.vllm.environment import check_env
from rollout.vllm.room import wait_for_room
from rollout.vllm.thread import EngineThread


class VllmEngine:
    """An Engine on vLLM 0.26 to 0.33, CPU or CUDA. The constructor blocks until the model is loaded.

    Raises:
        EngineEnvError: the process was not started with rollout.vllm.environment.required_env.
        EngineError: the card has not the room that the settings ask for.
        ValueError: the adapter rank is above every rank vLLM supports; nf4, sleeps, or fp8 without AVX-512 on a CPU;
            in_flight "continue" on a vLLM that does not tell which version sampled a token (0.32 does, 0.26 not).
        WeightsError: the model's files lack tensors, which vLLM would leave as the memory was, or hold others.
    """

    def __init__(self, settings: EngineSettings) -> None:
        from vllm.platforms import current_platform

        cuda = bool(current_platform.is_cuda())
        check_env(cuda, os.environ)
        arguments = engine_arguments(settings, cuda)
        here = check_fit(settings.model)
        if settings.in_flight == "continue":
            check_can_continue()
        if cuda and settings.room > 0:
            wait_for_room(settings.room, lambda: torch.cuda.mem_get_info()[0])
        if not cuda:
            from rollout.vllm.cpu.process import prepare_cpu_process

            prepare_cpu_process()
        self._settings = settings
        self._ids = itertools.count()
        self._read = read_continued if settings.in_flight == "continue" else read_completions
        self._thread = EngineThread(settings, arguments)
        if not here:  # vLLM has brought the files, which nobody has looked at yet
            check_model(settings.model)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        """See Engine.generate. Cancelling the call frees its slots in the engine, too, and leaves nothing of it."""
        prompt = checked_prompt(prompt_ids, sampling.max_tokens, self._settings.max_model_len, self._thread.vocab_size)
        params = completion_params(sampling, self._settings.stop_ids, self._settings.stop)
        request = Request(f"r{next(self._ids)}", prompt, params, self._read)
        completions: list[Completion] = await self._thread.call(request)
        return completions

    async def probe(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See Engine.probe. vLLM also samples one token, so at most max_model_len - 1 tokens fit."""
        if len(token_ids) < 2:
            raise ValueError(f"a probe needs at least 2 tokens, got {len(token_ids)}")
        prompt = checked_prompt(token_ids, 1, self._settings.max_model_len, self._thread.vocab_size)
        request = Request(f"r{next(self._ids)}", prompt, probe_params(), read_probe)
        logprobs: NDArray[np.float32] = await self._thread.call(request)
        return logprobs

    async def held(self) -> Held:
        """See Engine.held. It waits for the current step and for nothing else."""
        held: Held = await self._thread.call(Read())
        return held

    async def peak_memory(self) -> float:
        """See Engine.peak_memory."""
        if self._settings.shards == 1:
            return peak_memory()
        peak: float = await self._thread.call(Peak())
        return peak

    async def load_adapter(self, adapter: Adapter) -> str:
        """See Engine.load_adapter. With in_flight "finish" it waits, and lets later calls wait behind it, while every
        version is in use; with "continue" it waits for the current step only."""
        staged = await asyncio.to_thread(self._thread.window.stage, adapter)
        digest: str = await self._thread.call(Load(staged))
        return digest

    async def load_weights(self, weights: Weights) -> str:
        """See Engine.load_weights."""
        staged = await asyncio.to_thread(self._thread.window.stage, weights)
        digest: str = await self._thread.call(Load(staged, weights))
        return digest

    async def share_base(self) -> Manifest:
        """See Engine.share_base. It waits for the current step; on a CPU it reads every weight, for their digests."""
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
        await self._thread.close()
