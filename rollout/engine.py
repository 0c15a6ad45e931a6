"""The protocol Engine, which a generator must implement for the rollout worker, and the settings it is started with.

rollout.types defines the values that are passed. rollout.vllm.engine implements the protocol with vLLM, rollout.fakes
without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.types import Adapter, Completion, EngineError, Held, Manifest, Sampling, Weights

DTYPES = ("float32", "bfloat16", "float16")
BASES = ("none", "nf4")
IN_FLIGHT = ("finish", "continue")
KV_CACHE_DTYPES = ("auto", "fp8")


class EngineDied(EngineError):
    """The engine stopped on an internal error; pending and later calls all fail with it. rollout.worker makes
    it Unusable, so that a fresh process takes its place."""


class NoAdapter(EngineError):
    """generate or probe before the first load_adapter; rollout.worker then has no group."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings from which an engine starts. The values are final: "auto" of the configuration is resolved before.

    Attributes:
        model: folder, hub name or name@revision of the base model.
        dtype: "float32", "bfloat16" or "float16", for weights and adapters.
        max_model_len: most tokens of prompt and completion together.
        kv_cache_bytes: bytes of KV cache per device.
        shards: processes over which the model is spread (tensor parallelism), each with a device of its own.
        max_num_seqs: sequences decoded at once.
        max_lora_rank: highest LoRA rank that will be loaded (rounded up to a rank the engine supports). 0: policies
            are whole weights (load_weights), no adapters.
        lora_targets: last parts of the names of the layers that an adapter changes; (): all linear layers but the
            output embedding.
        adapter_window: how many adapter versions the engine holds at once. With in_flight "finish" at least 2:
            load_adapter waits while all others are in use, and max_staleness + 2 is enough. With "continue" 1.
        seed: must differ from worker to worker: two engines with one seed sample the same tokens.
        base: "none", or "nf4": the linear layers are in 4 bits, quantised as the learner quantises them, and dtype must
            have 16 bits.
        kv_cache_dtype: "auto" (that of dtype) or "fp8" (e4m3, scale 1). On a CPU fp8 needs AVX-512, and heads whose
            size is a multiple of 32.
        in_flight: what becomes of running completions when a newer policy is loaded. "finish": they finish under the
            version they began with, and whole weights are loaded only after that. "continue": the newer version
            samples their tokens from the next step on, and their KV cache is kept (PipelineRL, Piché et al. 2025).
        stop_ids: tokens that end a completion (finish_reason "stop") and are kept as its last token. The end tokens of
            the model's generation_config.json or config.json do so as well.
        stop: strings that end a completion, looked for in its text decoded without special tokens. The last token of
            the completion is the one that completes the string.
        truncates: whether samplings may set top_p, top_k or min_p, or a form is given; temperature must be 1 or 0 then.
        form: what each completion must look like (StructuredOutputs.form of rollout.config); "": no restriction.
        records_experts: whether completions say which experts each token went to; for models with experts, on one
            device, without a form.
        sleeps: whether sleep() will be called; CUDA only.
        shares_base: whether share_base() will be called; for adapters only, and without sleeps.
        prompt_logprobs: for a teacher, whose engine only computes logprobs of given completions under the model as it
            is, in steps of `step_tokens`, and loads no policy: the number of likeliest tokens at each place of which it
            gives logprobs as well. None: the engine samples.
        step_tokens: with `prompt_logprobs`, most tokens of an engine step. They bound the logits held at once.
        room: on CUDA, bytes of the card that must be free before the model is loaded. The engine waits for them, since
            a lost generator may not have released its memory yet.
        gpu_memory_utilization: on CUDA, the fraction of the card that must be free at start. It sizes nothing, since
            kv_cache_bytes is explicit, and is small so that a learner may share the card.

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
    shards: int = 1
    base: str = "none"
    lora_targets: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    in_flight: str = "finish"
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    truncates: bool = False
    form: str = ""
    records_experts: bool = False
    sleeps: bool = False
    shares_base: bool = False
    prompt_logprobs: int | None = None
    step_tokens: int = 0
    room: int = 0
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
        if self.base == "nf4" and self.dtype == "float32":  # vLLM would lay out a byte for four weights instead of two
            raise ValueError("base=nf4 needs dtype bfloat16 or float16 (vLLM), got float32")
        if self.shares_base and (self.max_lora_rank == 0 or self.sleeps):
            raise ValueError(
                f"shares_base needs adapters, and no sleep: got max_lora_rank={self.max_lora_rank}, "
                f"sleeps={self.sleeps}"
            )
        if self.shards > 1 and (self.base != "none" or self.sleeps or self.shares_base):
            raise ValueError(
                f"shards={self.shards} needs a base in 16 or 32 bits, no sleep and no shared base: got "
                f"base={self.base}, sleeps={self.sleeps}, shares_base={self.shares_base}"
            )
        if self.records_experts and (self.shards > 1 or self.form):
            raise ValueError(f"records_experts needs one shard and no form: got {self.shards} and {self.form!r}")
        if self.form and not self.truncates:
            raise ValueError("form needs truncates=True, got False: else logprobs would be of what it leaves")
        if self.prompt_logprobs is not None and not (
            self.prompt_logprobs >= 0 and self.max_lora_rank == 0 and self.step_tokens >= self.max_num_seqs
        ):
            raise ValueError(
                f"prompt_logprobs must be at least 0, without adapters, and with step_tokens of at least max_num_seqs="
                f"{self.max_num_seqs}: got {self.prompt_logprobs}, max_lora_rank={self.max_lora_rank}, "
                f"step_tokens={self.step_tokens}"
            )
        for name in ("max_model_len", "kv_cache_bytes", "max_num_seqs", "shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Engine(Protocol):
    """A model that samples completions under the newest policy. Many tasks of one event loop may call it at once."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Samples sampling.n completions of prompt_ids [P] under the policy that is the newest at the time of the call;
        with in_flight "continue" under newer policies from the moment they are loaded.

        Raises ValueError for a prompt that cannot be served, NoAdapter, EngineError, EngineDied.
        """
        ...

    async def load_adapter(self, adapter: Adapter) -> str:
        """Makes the adapter the newest policy; returns the digest of the bytes that were loaded.

        Running calls go on as EngineSettings.in_flight says. Loading the newest version again is a no-op.
        Raises AdapterCorrupt, EngineError, EngineDied.
        """
        ...

    async def load_weights(self, weights: Weights) -> str:
        """Replaces the model's weights by those of the same names; returns the digest of the bytes that were loaded.

        An engine holds one version of whole weights: with in_flight "finish" the loading waits for running calls to
        end, and later calls wait for the loading. Loading the newest version again is a no-op. Raises AdapterCorrupt,
        EngineError (also if the engine was started for adapters), EngineDied.
        """
        ...

    async def probe(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """[len - 1] float32, nats: logprob of token i+1 given tokens <= i, under the newest policy, at temperature 1.

        Raises ValueError for fewer than 2 tokens or more than fit, NoAdapter, EngineError, EngineDied.
        """
        ...

    async def held(self) -> Held:
        """Digests of the newest policy, read back from the tensors that the engine computes with, not from what it was
        sent.

        Raises NoAdapter, EngineError, EngineDied.
        """
        ...

    async def peak_memory(self) -> float:
        """The peak memory of the engine's process since its start, in bytes; on CUDA that of torch's allocator.

        With several shards: on CUDA the peak of the process that had most, since each has a card of its own; on a CPU
        the sum of all. Raises EngineDied, EngineError.
        """
        ...

    async def share_base(self) -> Manifest:
        """Describes how another process maps the base model's weights. Each process needs a Manifest of its own.

        Raises EngineError (also if the engine was not started with shares_base), EngineDied.
        """
        ...

    async def sleep(self) -> None:
        """Frees the device memory until wake(): weights move to host memory, the KV cache is dropped. Idempotent.

        Raises EngineError (also while calls run, or if the engine was not started with sleeps), EngineDied.
        """
        ...

    async def wake(self) -> None:
        """Takes the device memory again and puts the newest policy in force. Idempotent. Raises EngineDied,
        EngineError."""
        ...

    async def close(self) -> None:
        """Stops the engine; calls still running fail with EngineError. Idempotent."""
        ...
