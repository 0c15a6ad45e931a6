"""Turns EngineSettings into vLLM's engine arguments, and builds the LLMEngine from them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

import torch

from cluster.errors import WrongInput
from cluster.memory.generator import BLOCK_CPU, PREFILL_TOKENS
from cluster.memory.shape import EXPERTS
from rollout.architecture import ATTENTION, has_experts
from rollout.data.model_files import CONFIG, joined, read_json, split
from rollout.engine import EngineSettings
from rollout.quantised import check_base, check_kernel, format_of
from rollout.vllm.cpu import LORA_DTYPE, PRIORITY
from rollout.vllm.read_back import shard_arguments, workers_environment
from rollout.vllm.text_view import FLOAT32_LOGITS, served_config, view_arguments

# What vLLM's registry is asked about a model before the engine is built.


def know_model(model: str, revision: str | None = None) -> None:
    """Has vLLM inspect the model's class in this process.

    Otherwise vLLM starts a process for that, once per architecture and user, which imports all of vLLM again (8
    CPU-seconds), lest CUDA be initialised in a process that is forked later. The process of gleaner's engine is not.
    """
    from vllm import ModelRegistry

    for name in served_config(joined(model, revision)).architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def has_states(kind: type) -> bool:
    """Whether layers of a model class of vLLM keep a state in place of keys and values, as Mamba, linear attention and
    short convolutions do."""
    return bool(getattr(kind, "is_hybrid", False) or getattr(kind, "is_attention_free", False))


def keeps_states(model: str, revision: str | None = None) -> bool:
    """Whether layers of the model in a folder or on the hub keep a state (has_states)."""
    from vllm import ModelRegistry

    names = served_config(joined(model, revision)).architectures or ()
    return any(
        has_states(ModelRegistry.models[name].load_model_cls()) for name in names if name in ModelRegistry.models
    )


def lora_arguments(model: str, targets: Sequence[str], revision: str | None = None) -> dict[str, Any]:
    """Keyword arguments of vllm.EngineArgs that say which layers get LoRA kernels. Without them vLLM would also put
    LoRA kernels around the output embedding, and run them in every step.

    targets: see EngineSettings.lora_targets; in a model with experts only the attention is adapted, and the experts if
    they are named.

    Raises WrongInput if vLLM does not serve the model with LoRA. Only vLLM's own classes can be asked; a name that vLLM
    serves by transformers' code is not checked.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    config = served_config(joined(model, revision))
    known = [name for name in config.architectures or () if name in ModelRegistry.models]
    kinds = {name: ModelRegistry.models[name].load_model_cls() for name in known}
    for name, kind in kinds.items():
        if not supports_lora(kind):
            raise WrongInput(without_lora(name, model))
    if has_experts(config.to_dict()) and EXPERTS in targets:
        # PEFT has the gate and up projections of all experts in one pair. vLLM's kernel takes that where a model's
        # class says so, and else turns it into a pair for each.
        as_one = any(getattr(kind, "is_3d_moe_weight", False) for kind in kinds.values())
        return {"lora_target_modules": [*ATTENTION, EXPERTS], "enable_mixed_moe_lora_format": not as_one}
    if has_experts(config.to_dict()):
        return {"lora_target_modules": list(ATTENTION)}
    return {"lora_target_modules": list(targets) or _linear_layers(config)}


def _linear_layers(config: Any) -> list[str]:
    """Last parts of the names of all linear layers but the output embedding, from a model built without weights."""
    from torch import device
    from transformers import AutoModelForCausalLM

    from rollout.weights import linear_layers

    auto: Any = AutoModelForCausalLM  # the class's methods carry no annotations
    with device("meta"):  # with eager attention, since that which config.json names may not be installed
        lm = auto.from_config(config, attn_implementation="eager")
    return sorted({name.rpartition(".")[2] for name in linear_layers(lm)})


def without_lora(name: str, model: str) -> str:
    """The error message for an architecture that vLLM serves without LoRA."""
    return (
        f"model.path: vLLM serves {name} ({model}) without LoRA; set learner.mode=full or learner.push=merged, or give "
        "another architecture (docs/models.md)"
    )


_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM accepts no other max_lora_rank


# One engine for several runs, whose policies are adapters on the same base.

SUMS = ("kv_cache_bytes", "max_num_seqs", "adapter_window")  # each run brings its own
MAXIMA = ("max_model_len", "max_lora_rank", "room")
OF_REQUESTS = ("seed", "stop_ids", "stop")  # what is sampled depends on the seeds of requests alone


def common(runs: Sequence[EngineSettings]) -> EngineSettings:
    """The settings of an engine that serves several runs. Raises ValueError if they cannot share one."""
    first, *others = runs
    if not others:
        return first
    if first.max_lora_rank == 0 or first.in_flight != "finish" or first.sleeps or first.shares_base:
        raise ValueError(
            "an engine of several runs holds adapters that requests finish under, and neither sleeps nor shares its "
            f"base: got max_lora_rank={first.max_lora_rank}, in_flight={first.in_flight}, sleeps={first.sleeps}, "
            f"shares_base={first.shares_base}"
        )
    free = {*SUMS, *MAXIMA, *OF_REQUESTS}
    for name in [field.name for field in fields(first) if field.name not in free]:
        values = {getattr(one, name) for one in runs}
        if len(values) > 1:
            raise ValueError(f"{name} must be the same in all runs of an engine, got {sorted(map(repr, values))}")
    changed: dict[str, Any] = {name: sum(getattr(one, name) for one in runs) for name in SUMS}
    changed |= {name: max(getattr(one, name) for one in runs) for name in MAXIMA}
    return replace(first, **changed, stop=next((one.stop for one in runs if one.stop), ()))


@contextmanager
def zeroed_blocks() -> Iterator[None]:
    """A context in which vLLM builds an engine that clears each block of its KV cache before it is used again.

    Attention multiplies what a block holds beyond a sequence's end by 0, and 0 * nan is nan: without this, numbers that
    are not finite, of one run's policy, would spread to the completions of another run. vLLM has the clearing, for
    caches that need it for other reasons.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    caches: Any = KVCacheConfig
    before = caches.needs_kv_cache_zeroing
    caches.needs_kv_cache_zeroing = property(lambda config: True)
    try:
        yield
    finally:
        caches.needs_kv_cache_zeroing = before


def engine_arguments(settings: EngineSettings, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of vllm.EngineArgs.

    Raises ValueError for a LoRA rank above vLLM's highest, and on a CPU for sleeps, or for fp8 without AVX-512.
    """
    if settings.max_lora_rank > _LORA_RANKS[-1]:
        raise ValueError(f"max_lora_rank must be at most {_LORA_RANKS[-1]} (vLLM), got {settings.max_lora_rank}")
    model, revision = split(settings.model)
    arguments: dict[str, Any] = {
        "model": model,
        "revision": revision,
        "tokenizer_revision": revision,
        "trust_remote_code": False,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(PREFILL_TOKENS, settings.max_num_seqs),
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "kv_cache_dtype": settings.kv_cache_dtype,
        # The learner's logprobs are those of the whole distribution. Processed logprobs are of the tokens that top_p,
        # top_k and min_p keep; raw ones ignore the temperature, so it must be 1 where tokens are left out.
        "logprobs_mode": "raw_logprobs" if settings.truncates else "processed_logprobs",
        # Completions of a group share the KV blocks of their prompt.
        "enable_prefix_caching": True,
        **_form_arguments(settings),
        # Prompts and completions are tokens; vLLM needs the text for stop strings only.
        "skip_tokenizer_init": not settings.stop,
        "generation_config": "auto",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    arguments |= _policy_arguments(settings)
    if settings.records_experts and cuda:
        arguments["enable_return_routed_experts"] = True
    if not cuda:
        _check_cpu(settings)
    if settings.sleeps:
        arguments["enable_sleep_mode"] = True
    if settings.base == "nf4":
        # vLLM quantises while it reads the files, as the learner does: NF4, blocks of 64, doubly quantised scales.
        arguments |= {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    arguments |= _cuda_arguments(settings) if cuda else _cpu_arguments(settings)
    if settings.prompt_logprobs is not None:
        arguments |= _teacher_arguments(settings)
    return arguments | (shard_arguments(settings.shards, cuda=cuda) if settings.shards > 1 else {})


def quantised_arguments(settings: EngineSettings, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of vllm.EngineArgs for a checkpoint whose weights are quantised, which vLLM reads as it is; {}
    for another.

    Raises WrongInput if vLLM would not compute with these weights as the learner does.
    """
    packed = format_of(read_json(settings.model, CONFIG), settings.model)
    if packed is None:
        return {}
    uses = {"model.base: nf4": settings.base == "nf4", "cluster.tensor_parallel": settings.shards > 1}
    check_base(packed, settings.model, uses)
    check_kernel(packed, settings.model, settings.dtype, cuda=cuda)
    # Marlin's FP8 kernel computes with activations in 16 bits. vLLM's choice would round them to 8 bits on newer cards.
    return {"linear_backend": "marlin"} if packed.name == "FP8" else {}


def _form_arguments(settings: EngineSettings) -> dict[str, Any]:
    if not settings.form:
        return {}
    return {"logits_processors": ["rollout.vllm.structured:StructuredOutputs"]}


def _cuda_arguments(settings: EngineSettings) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "hf_overrides": dict(FLOAT32_LOGITS),
    }


def _cpu_arguments(settings: EngineSettings) -> dict[str, Any]:
    return {
        # LoRA switches compilation off on CPU anyway, after half a minute of compiling.
        "enforce_eager": True,
        # A seeded request whose prefill is split kills the engine: "CPU Generator does not use offset".
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(PREFILL_TOKENS, settings.max_num_seqs, settings.max_model_len),
        # The smallest block that the CPU kernel takes; vLLM's default is 128. A group shares full blocks of its prompt,
        # and each completion computes the rest of the prompt again: 16 tokens on average instead of 64.
        "block_size": BLOCK_CPU,
        "ir_op_priority": PRIORITY,
        "lora_dtype": LORA_DTYPE,
    }


def _teacher_arguments(settings: EngineSettings) -> dict[str, Any]:
    """For an engine that computes prompts alone. It decodes nothing that CUDA graphs would make faster, and vLLM reads
    no cached prefix for a request that wants its prompt's logprobs (SamplingParams.skip_reading_prefix_cache)."""
    return {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,  # no request is seeded, so that a CPU can split them, too
        "max_num_batched_tokens": settings.step_tokens,
        "max_logprobs": settings.prompt_logprobs,
        "logprobs_mode": "raw_logprobs",
    }


def _check_cpu(settings: EngineSettings) -> None:
    """Raises ValueError for settings that vLLM does not support on this CPU."""
    if settings.sleeps:
        raise ValueError("sleeps: vLLM sleeps on CUDA only, on a CPU it ignores the call; set sleeps=False (got True)")
    if settings.max_lora_rank > 0 and EXPERTS in settings.lora_targets:
        raise ValueError(
            "lora_targets: vLLM has LoRA for experts on CUDA only; leave experts out, or push whole weights"
        )
    if settings.kv_cache_dtype == "fp8" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise ValueError("kv_cache_dtype: fp8 on a CPU needs one with AVX-512 (vLLM); set rollout.kv_cache_dtype=auto")


def _policy_arguments(settings: EngineSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if settings.max_lora_rank > 0:
        arguments |= {
            "enable_lora": True,
            "max_loras": settings.adapter_window,
            "max_cpu_loras": settings.adapter_window,
            "lora_target_modules": list(settings.lora_targets),
            "max_lora_rank": _LORA_RANKS[bisect_left(_LORA_RANKS, settings.max_lora_rank)],
        }
    return arguments


def check_can_continue() -> None:
    """Raises ValueError if this vLLM does not say which policy version sampled a token."""
    import vllm
    from vllm.outputs import CompletionOutput

    if "weight_versions" not in {field.name for field in fields(CompletionOutput)}:
        raise ValueError(
            "in_flight=continue needs a vLLM that labels tokens with weight versions (0.32 does), got "
            f"{vllm.__version__}; install a newer one, or set rollout.in_flight=finish"
        )


def build_engine(arguments: dict[str, Any], *, shares_base: bool) -> Any:
    """Builds a vLLM LLMEngine in this process; the calling thread owns it from then on.

    shares_base: whether the learner will map the base model (rollout.vllm.shared_base).
    """
    if arguments.get("quantization") == "bitsandbytes":
        check_bitsandbytes()
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    model, revision = arguments["model"], arguments["revision"]
    shards, on_cpu = arguments.get("tensor_parallel_size", 1), current_platform.is_cpu()
    arguments = arguments | view_arguments(joined(model, revision), cuda=not on_cpu, shards=shards)
    if arguments.get("enable_lora"):
        arguments = arguments | lora_arguments(model, arguments["lora_target_modules"], revision)
    if arguments.get("enable_chunked_prefill") is False and keeps_states(model, revision):
        arguments = arguments | {"enable_prefix_caching": False}  # vLLM caches states only with chunked prefill
    if on_cpu:
        know_model(model, revision)
    with workers_environment(shards):
        engine_args = EngineArgs(**arguments)  # loads vLLM's plugins, which register their loaders
        with _recorded(arguments.get("load_format", "auto")) if shares_base else nullcontext():
            return LLMEngine.from_engine_args(engine_args)


def _recorded(load_format: str) -> AbstractContextManager[None]:
    """A context in which vLLM loads a model so that the learner can map it."""
    from rollout.vllm.shared_base import recorded

    return recorded(load_format)


def check_bitsandbytes() -> None:
    """Raises ValueError if this vLLM cannot load a base model in 4 bits."""
    if find_spec("vllm_bnb_plugin") is None:
        raise ValueError(
            "model.base: nf4 needs vLLM's bitsandbytes support, which is a plugin and not installed here; run:"
            " pip install --no-deps vllm-bnb-plugin, or set model.base=none"
        )
