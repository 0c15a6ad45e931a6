"""One vLLM engine beside the same policies in Hugging Face + PEFT, on a tiny random model in float32."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from examples.random_model import make_adapter
from learner.model.policy import merged
from rollout.engine import EngineSettings
from rollout.types import Adapter, Completion, Sampling, Weights
from rollout.vllm.engine import VllmEngine
from rollout.weights import pack

PROMPT = list(range(40, 60))
TOLERANCE = 1e-4  # nats; measured 1e-6
GROUP = Sampling(n=16, max_tokens=300, seed=0)

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(120):
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


class EngineCase:
    """One engine, the adapters it was given, and the same policies in Hugging Face + PEFT."""

    def __init__(self, model: Path, *, targets: Any = "all-linear", **changes: Any) -> None:
        self.model, self._targets = model, targets
        self._takes_adapters = changes.get("max_lora_rank") != 0
        self.engine = VllmEngine(settings(model, **changes))
        self.adapters: list[Adapter] = []

    @property
    def newest(self) -> int:
        return len(self.adapters) - 1

    def next_adapter(self) -> Adapter:
        version = len(self.adapters)
        self.adapters.append(Adapter.build(version, *make_adapter(self.model, seed=version, targets=self._targets)))
        return self.adapters[-1]

    async def push(self) -> None:
        """The next policy into the engine: the adapter, or into an engine without LoRA the weights merged with it."""
        adapter = self.next_adapter()
        if self._takes_adapters:
            assert await self.engine.load_adapter(adapter) == adapter.digest
        else:
            weights = self.weights(adapter.version)
            assert await self.engine.load_weights(weights) == weights.digest

    def weights(self, version: int) -> Weights:
        """What a learner with learner.push merged sends."""
        policy = self._policy(version).get_base_model()
        return Weights.build(version, pack(merged(policy), policy.dtype))

    def logprobs(self, version: int, ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """[len - 1] of token i+1 given tokens <= i."""
        return self.mixed_logprobs([version] * (len(ids) - 1), ids, temperature)

    def mixed_logprobs(self, versions: list[int], ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """[len - 1] the same where versions[i] reads token i, on the keys and values that those before it left."""
        every = self.distributions(versions, ids, temperature)
        return np.take_along_axis(every, np.array(ids)[1:, None], -1)[:, 0]

    def distributions(self, versions: list[int], ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """[len - 1, vocabulary] of every token behind each of ids but the last."""
        import torch
        from transformers import DynamicCache

        tokens, cache, rows = torch.tensor([ids]), DynamicCache(), []
        with torch.no_grad():
            for version, run in groupby(range(len(ids) - 1), lambda i: versions[i]):
                part = tokens[:, list(run)]
                rows.append(self._policy(version)(part, past_key_values=cache).logits[0])
        return np.asarray((torch.cat(rows) / temperature).log_softmax(-1))

    def _policy(self, version: int) -> Any:
        import torch
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
        from safetensors.torch import load
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        adapter = self.adapters[version]
        policy = get_peft_model(base, LoraConfig(**adapter.config)).eval()
        set_peft_model_state_dict(policy, load(bytes(adapter.payload)))
        return policy

    def check(self, completion: Completion, prompt: list[int], version: int, temperature: float = 1.0) -> None:
        assert completion.versions.tolist() == [version] * len(completion.token_ids)
        expected = self.logprobs(version, prompt + completion.token_ids.tolist(), temperature)[len(prompt) - 1 :]
        assert completion.logprobs.shape == completion.token_ids.shape
        assert np.abs(completion.logprobs - expected).max() < TOLERANCE
