"""What a rollout worker asks of a generator, and the values that cross that border. Numpy only.

Letters: P prompt tokens, T completion tokens, G completions per prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# vLLM raises any temperature in (0, 0.01) to 0.01 with no more than a log line; the recorded logprobs would then
# belong to another temperature than the learner assumes.
MIN_TEMPERATURE = 0.01
DTYPES = ("float32", "bfloat16", "float16")
BASES = ("none", "nf4")
IN_FLIGHT = ("finish", "continue")
KV_CACHE_DTYPES = ("auto", "fp8")


class EngineError(RuntimeError):
    """Base of everything an engine raises about itself; a bad argument is a ValueError."""


class EngineDied(EngineError):
    """The engine stopped on an internal error; pending and later calls all fail with it. Restart the worker."""


class EngineClosed(EngineError):
    """The call came after close(), or close() came before the call finished."""


class EngineEnvError(EngineError):
    """The process environment is not the one that rollout.engine_env.required_env asks for."""


class EngineAsleep(EngineError):
    """generate, probe or a new policy between sleep() and wake()."""


class NoAdapter(EngineError):
    """generate or probe before the first load_adapter."""


class AdapterRefused(EngineError):
    """The adapter is intact but cannot be used: stale version, other modules than before, or a rank above the limit."""


class AdapterCorrupt(EngineError):
    """The payload does not match the digest that came with it."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled continuation of a prompt. Compared by identity, since == of arrays is not one truth value.

    Attributes:
        token_ids: [T] int32, the end token included if it was sampled.
        logprobs: [T] float32, nats, of the distribution really sampled (temperature and top-p applied);
            greedy sampling (temperature 0) records the logprobs at temperature 1.
        finish_reason: "stop" (an end token), "length" (max_tokens reached) or "abort" (stopped before either; T may
            be 0).
        versions: [T] int32, policy version that sampled each token. What one call of generate samples has one version,
            or with in_flight "continue" versions that never fall. A completion that several calls went on with (see
            rollout.partial) has theirs, one after the other.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    versions: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample the completions of one prompt.

    Attributes:
        n: completions per prompt (G).
        max_tokens: tokens per completion, the end token included.
        temperature: 0 is greedy (then n must be 1), otherwise at least 0.01.
        top_p: nucleus mass in (0, 1].
        seed: completion j is sampled with seed + j, so seeds of different prompts must differ by at least n,
            or two prompts share random streams. None: drawn from the engine's own seed.

    Raises:
        ValueError: a field is out of its range.
    """

    n: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(f"n and max_tokens must be at least 1, got n={self.n}, max_tokens={self.max_tokens}")
        if self.temperature != 0 and not self.temperature >= MIN_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature}")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"greedy sampling gives {self.n} equal completions; set n=1 or temperature > 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed must be None or at least 0, got {self.seed}")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter on its way from the learner to the generators.

    Attributes:
        version: policy version, from 0, growing; each version is loaded once per engine.
        digest: sha256 of payload, hex.
        payload: safetensors bytes with PEFT's names (base_model.model.….lora_A.weight).
        config: the content of adapter_config.json; must be JSON.
    """

    version: int
    digest: str
    payload: bytes
    config: dict[str, Any]

    @classmethod
    def build(cls, version: int, payload: bytes, config: dict[str, Any]) -> Adapter:
        """Computes the digest. Raises ValueError for a negative version."""
        if version < 0:
            raise ValueError(f"adapter version must be at least 0, got {version}")
        return cls(version=version, digest=digest_of(payload), payload=payload, config=config)

    def verify(self) -> None:
        """Raises AdapterCorrupt if the payload is not the one that the digest was computed from."""
        _verify("adapter", self)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model on their way from the learner to the generators: all of them (learner.mode: full), or those
    that the adapter changes, merged with it (learner.push: merged). version, digest: as of an Adapter.

    payload: safetensors bytes with the names of the checkpoint, a weight that is tied to another left out. Of what
    engines fuse (q, k and v; gate and up), all or nothing.
    """

    version: int
    digest: str
    payload: bytes | memoryview

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with the payload beside it (PEP 574): Ray puts it into shared memory, and readers find it there."""
        return _arrived, (self.version, self.digest, PickleBuffer(self.payload))

    @classmethod
    def build(cls, version: int, payload: bytes | memoryview) -> Weights:
        """Computes the digest."""
        return cls(version=version, digest=digest_of(payload), payload=payload)

    def verify(self) -> None:
        """Raises AdapterCorrupt if the payload is not the one that the digest was computed from."""
        _verify("weights", self)


def _arrived(version: int, digest: str, payload: Any) -> Weights:
    return Weights(version, digest, memoryview(payload))


def _verify(what: str, update: Adapter | Weights) -> None:
    found = digest_of(update.payload)
    if found != update.digest:
        raise AdapterCorrupt(
            f"{what} v{update.version}: sha256 of its {len(update.payload)} payload bytes must be "
            f"{update.digest[:12]}…, got {found[:12]}…; send it again from the learner"
        )


def digest_of(payload: bytes | memoryview) -> str:
    """sha256 of the payload, hex."""
    return hashlib.sha256(payload).hexdigest()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine needs to start; resolved, no "auto".

    Attributes:
        model: path or hub name of the base model.
        dtype: "float32", "bfloat16" or "float16", for weights and adapters.
        max_model_len: prompt and completion together, tokens.
        kv_cache_bytes: bytes of KV cache per device.
        max_num_seqs: sequences decoded at once.
        max_lora_rank: highest LoRA rank that will be loaded (rounded up to a rank the engine supports). 0: no
            adapters, weights are replaced by load_weights.
        adapter_window: adapter versions resident at once. With in_flight "finish" at least 2: load_adapter waits while
            all others are in use, and max_staleness + 2 is enough. With "continue" 1.
        seed: must contain the worker's rank: two engines with one seed sample the same tokens.
        base: "none", or "nf4": the linear layers in 4 bits, quantised as the learner quantises them; CUDA only.
        kv_cache_dtype: "auto", as dtype, or "fp8" (e4m3, scale 1). On a CPU fp8 needs AVX-512 and heads of 32 k.
        in_flight: what becomes of running completions when a newer policy is loaded. "finish": they finish on the
            version they began with; whole weights wait for that. "continue": from the next step on the newer one
            samples them, with the keys and values that are there (PipelineRL, Piché et al. 2025).
        sleeps: sleep() will be called; CUDA only.
        gpu_memory_utilization: on CUDA, the fraction of the card that must be free at start. Sizes nothing, since
            kv_cache_bytes is explicit; kept small so that a learner may share the card.

    Raises:
        ValueError: a field is out of its range.
    """

    model: str
    dtype: str
    max_model_len: int
    kv_cache_bytes: int
    max_num_seqs: int
    max_lora_rank: int
    adapter_window: int
    seed: int
    base: str = "none"
    kv_cache_dtype: str = "auto"
    in_flight: str = "finish"
    sleeps: bool = False
    gpu_memory_utilization: float = 0.05

    def __post_init__(self) -> None:
        choices = {"dtype": DTYPES, "base": BASES, "in_flight": IN_FLIGHT, "kv_cache_dtype": KV_CACHE_DTYPES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.max_lora_rank < 0:
            raise ValueError(f"max_lora_rank must be at least 0, got {self.max_lora_rank}")
        if self.in_flight == "continue" and self.adapter_window != 1:
            raise ValueError(
                "in_flight=continue replaces the one policy in place: adapter_window must be 1, got "
                f"{self.adapter_window}"
            )
        if self.in_flight == "finish" and self.adapter_window < 2:
            raise ValueError(f"adapter_window must be at least 2 (one in use, one arriving), got {self.adapter_window}")
        for name in ("max_model_len", "kv_cache_bytes", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Engine(Protocol):
    """A generator. Safe to call from many tasks of one event loop at once."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, until: asyncio.Future[None] | None = None
    ) -> list[Completion]:
        """sampling.n completions of prompt_ids [P], under the newest adapter at the time of the call; with in_flight
        "continue", under newer ones from the moment that they are loaded.

        As soon as `until` is done, those that are not finished end as they are, with finish_reason "abort".
        Raises ValueError for a prompt that cannot be served, NoAdapter, EngineAsleep, EngineDied, EngineClosed.
        """
        ...

    async def load_adapter(self, adapter: Adapter) -> str:
        """Makes the adapter the newest; returns the sha256 hex of the bytes that were loaded.

        Calls that began before go on as EngineSettings.in_flight says. Loading the newest version again is a no-op.
        Raises AdapterCorrupt, AdapterRefused, EngineAsleep, EngineDied, EngineClosed.
        """
        ...

    async def load_weights(self, weights: Weights) -> str:
        """Replaces the weights that are named; returns the sha256 hex of the bytes that were loaded.

        One engine holds one version: with in_flight "finish" it waits until the calls that began before are done, and
        lets later ones wait. Loading the newest version again is a no-op. Raises AdapterCorrupt, AdapterRefused (also
        if the engine was started for adapters), EngineAsleep, EngineDied, EngineClosed.
        """
        ...

    async def probe(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """[len - 1] float32, nats: logprob of token i+1 given tokens <= i, newest adapter, temperature 1.

        Raises ValueError for fewer than 2 tokens or more than fit, NoAdapter, EngineAsleep, EngineDied, EngineClosed.
        """
        ...

    async def sleep(self) -> None:
        """Frees the device memory (weights wait in host memory, the KV cache is forgotten) until wake(). Idempotent.

        Raises EngineError while calls run or if the engine was not started with sleeps, EngineDied, EngineClosed.
        """
        ...

    async def wake(self) -> None:
        """Ends sleep(): the newest policy is in force again. Idempotent. Raises EngineDied, EngineClosed."""
        ...

    async def close(self) -> None:
        """Stops the engine; calls still running fail with EngineClosed. Idempotent."""
        ...
