"""An engine, a trainer and what it learns from, for benchmarks.engine.delivery_power: one type and one learning
rate."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

T = TypeVar("T")

# -> type of weights and activations, type of keys and values
TYPES = {"float32": ("float32", "auto"), "bfloat16": ("bfloat16", "auto"), "fp8": ("bfloat16", "fp8")}
GROUPS, COMPLETIONS, LENGTH, PROMPT = 1, 4, 48, 16
BATCHES = 8  # of recorded groups; their rewards are drawn anew for each step


class Cell:
    """An engine, a trainer and its recorded completions, for one type and learning rate."""

    def __init__(self, folder: Path, kind: str, rate: float) -> None:
        from examples.random_model import make_tiny_model
        from learner.config import ModelConfig
        from learner.config.settings import LearnerConfig, LoraConfig, ScheduleConfig
        from learner.trainer.trainer import Trainer
        from rollout.engine import EngineSettings
        from rollout.vllm.engine import VllmEngine

        dtype, cache = TYPES[kind]
        path = str(make_tiny_model(folder))
        self.kind, self.random = kind, np.random.default_rng(0)
        self.seconds: dict[str, list[float]] = {}
        self._made: dict[tuple[int, int, tuple[int, ...]], pa.Table] = {}
        self.engine: Any = VllmEngine(
            EngineSettings(
                path,
                dtype,
                max_model_len=256,
                kv_cache_bytes=32 << 20,
                max_num_seqs=64,
                max_lora_rank=8,
                adapter_window=1,
                seed=1,
                kv_cache_dtype=cache,
                in_flight="continue",
            )
        )
        learner = LearnerConfig(
            learning_rate=rate, lora=LoraConfig(rank=8, alpha=16), schedule=ScheduleConfig(warmup=0.0)
        )
        self.trainer = Trainer(
            ModelConfig.model_validate({"path": path, "dtype": dtype}), learner, temperature=1.0,
            max_completion_length=LENGTH, total_steps=10**6, seed=0, device="cpu",
        )  # fmt: skip

    async def record(self) -> None:
        """What the trainer learns from: groups that the engine samples under the first policy."""
        from rollout.types import Sampling

        await self.engine.load_adapter((await self.trainer.outgoing())[0].value)
        self.batches: list[list[tuple[list[int], Any]]] = []
        for batch in range(BATCHES):
            prompts = [[int(token) for token in self.random.integers(40, 120, PROMPT)] for _ in range(GROUPS)]
            seeds = [1000 * batch + 100 * group for group in range(GROUPS)]
            self.batches.append(
                [(p, await self.engine.generate(p, Sampling(COMPLETIONS, LENGTH, seed=s)))
                 for p, s in zip(prompts, seeds, strict=True)]
            )  # fmt: skip

    def groups(self, version: int) -> list[pa.Table]:
        """Half of the completions of a group are rewarded, which ones is drawn anew."""
        batch = version % BATCHES
        wins = [tuple(sorted(self.random.permutation(COMPLETIONS)[: COMPLETIONS // 2].tolist())) for _ in range(GROUPS)]
        return [self._group(batch, position, won) for position, won in enumerate(wins)]

    def _group(self, batch: int, position: int, won: tuple[int, ...]) -> pa.Table:
        from rollout.fakes import make_group

        key = (batch, position, won)
        if key not in self._made:
            prompt, completions = self.batches[batch][position]
            self._made[key] = make_group(
                position,
                completions=completions,
                prompt_ids=[prompt] * COMPLETIONS,
                rewards=[float(j in won) for j in range(COMPLETIONS)],
            )
        return self._made[key]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within it vLLM's layers keep the tensors they have, whatever is loaded."""
        (worker,) = self.engine._thread._turns.engine.collective_rpc(lambda worker: worker)
        layers = list(worker.model_runner.lora_manager._adapter_manager.modules.values())
        for layer in layers:
            layer.set_lora = layer.reset_lora = lambda *_, **__: None
        yield
        for layer in layers:
            del layer.set_lora, layer.reset_lora

    async def timed(self, what: str, work: Awaitable[T]) -> T:
        started = time.perf_counter()
        result = await work
        self.seconds.setdefault(what, []).append(time.perf_counter() - started)
        return result
