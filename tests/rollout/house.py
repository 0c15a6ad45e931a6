"""One vLLM engine beside the same policies in Hugging Face + PEFT, on a tiny random model in float32."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollout.engine import Adapter, Completion, EngineSettings
from rollout.vllm_engine import VllmEngine
from tests.tiny import make_adapter

PROMPT = list(range(40, 60))
TOLERANCE = 1e-4  # nats; measured 1e-6

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(bounded())


def settings(model: Path, **changes: Any) -> EngineSettings:
    base = EngineSettings(
        model=str(model),
        dtype="float32",
        max_model_len=448,
        kv_cache_bytes=64 << 20,
        max_num_seqs=64,
        max_lora_rank=8,
        adapter_window=3,
        seed=1,
    )
    return dataclasses.replace(base, **changes)


class House:
    """One engine, the adapters it was given, and the same policies in Hugging Face + PEFT."""

    def __init__(self, model: Path, **changes: Any) -> None:
        self.model = model
        self.engine = VllmEngine(settings(model, **changes))
        self.adapters: list[Adapter] = []

    @property
    def newest(self) -> int:
        return len(self.adapters) - 1

    def next_adapter(self) -> Adapter:
        version = len(self.adapters)
        self.adapters.append(Adapter.build(version, *make_adapter(self.model, seed=version)))
        return self.adapters[-1]

    def logprobs(self, version: int, ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """[len - 1] of token i+1 given tokens <= i."""
        import torch
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
        from safetensors.torch import load
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        adapter = self.adapters[version]
        policy = get_peft_model(base, LoraConfig(**adapter.config)).eval()
        set_peft_model_state_dict(policy, load(adapter.payload))
        tokens = torch.tensor([ids])
        with torch.no_grad():
            rows = (policy(tokens).logits[0, :-1] / temperature).log_softmax(-1)
        return np.asarray(rows.gather(-1, tokens[0, 1:, None])[:, 0])

    def check(self, completion: Completion, prompt: list[int], version: int, temperature: float = 1.0) -> None:
        assert completion.policy_version == version
        expected = self.logprobs(version, prompt + completion.token_ids.tolist(), temperature)[len(prompt) - 1 :]
        assert completion.logprobs.shape == completion.token_ids.shape
        assert np.abs(completion.logprobs - expected).max() < TOLERANCE
