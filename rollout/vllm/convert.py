"""Between our values and vLLM's: engine arguments, sampling parameters, adapter requests, outputs.

Everything is passed by keyword, since positions differ between vLLM 0.26 and 0.33.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.memory.generator import PREFILL_TOKENS
from cluster.memory.kv_cache import BLOCK_CPU
from rollout.engine import EngineSettings
from rollout.types import Completion, EngineError, Sampling
from rollout.vllm.adapter_cache import Resident
from rollout.vllm.startup import lora_arguments, shorten_start

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM accepts no other max_lora_rank
_FINISH_REASONS = ("stop", "length", "abort")


def engine_arguments(settings: EngineSettings, cuda: bool) -> dict[str, Any]:
    """Keywords of vllm.EngineArgs.

    Raises ValueError for a LoRA rank above vLLM's highest, and for nf4, sleeps or fp8 where a CPU does not do them.
    """
    if settings.max_lora_rank > _LORA_RANKS[-1]:
        raise ValueError(f"max_lora_rank must be at most {_LORA_RANKS[-1]} (vLLM), got {settings.max_lora_rank}")
    arguments: dict[str, Any] = {
        "model": settings.model,
        "trust_remote_code": False,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(PREFILL_TOKENS, settings.max_num_seqs),
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "kv_cache_dtype": settings.kv_cache_dtype,
        # The default, raw_logprobs, ignores temperature and top-p: not what was sampled from.
        "logprobs_mode": "processed_logprobs",
        # Completions of a group share the KV blocks of their prompt.
        "enable_prefix_caching": True,
        # Tokens in, tokens out; only stop strings need the text.
        "skip_tokenizer_init": not settings.stop,
        "generation_config": "auto",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    arguments |= _policy_arguments(settings)
    if not cuda:
        _check_cpu(settings)
    if settings.sleeps:
        arguments["enable_sleep_mode"] = True
    if settings.base == "nf4":
        # Quantised as the files are read: NF4 in blocks of 64 with doubly quantised scales, like the learner's.
        arguments |= {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    if cuda:
        return arguments | {"gpu_memory_utilization": settings.gpu_memory_utilization}
    return arguments | {
        # LoRA switches compilation off on CPU anyway, after half a minute of compiling.
        "enforce_eager": True,
        # A seeded request whose prefill is split kills the engine: "CPU Generator does not use offset".
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(PREFILL_TOKENS, settings.max_num_seqs, settings.max_model_len),
        # The smallest that the CPU kernel takes; default 128. A group shares the whole blocks of its prompt, and each
        # completion computes the rest of it again: 16 tokens on average, not 64.
        "block_size": BLOCK_CPU,
    }


def _check_cpu(settings: EngineSettings) -> None:
    """Raises ValueError for what vLLM does not do on this CPU."""
    if settings.sleeps:
        raise ValueError("sleeps: vLLM sleeps on CUDA only, on a CPU it ignores the call; set sleeps=False (got True)")
    if settings.base == "nf4":
        raise ValueError("base: nf4 needs vLLM on CUDA, on a CPU it has no bitsandbytes; set model.base=none")
    if settings.kv_cache_dtype == "fp8" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise ValueError("kv_cache_dtype: fp8 on a CPU needs one with AVX-512 (vLLM); set rollout.kv_cache_dtype=auto")


def _policy_arguments(settings: EngineSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if settings.max_lora_rank > 0:
        arguments |= {
            "enable_lora": True,
            "max_loras": settings.adapter_window,
            "max_cpu_loras": settings.adapter_window,
            "max_lora_rank": _LORA_RANKS[bisect_left(_LORA_RANKS, settings.max_lora_rank)],
        }
    if settings.in_flight == "continue":
        # Else vLLM on CUDA computes one step ahead, and that step's tokens, sampled before the policy was replaced,
        # come out after it with the new version's label.
        arguments["async_scheduling"] = False
    return arguments


def check_can_continue() -> None:
    """Raises ValueError if this vLLM cannot tell the tokens before a change of the policy from those after it."""
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    if not hasattr(LLMEngine, "set_weight_version"):
        raise ValueError(
            "in_flight=continue needs a vLLM that labels tokens with weight versions (0.32 does), got "
            f"{vllm.__version__}; install a newer one, or set rollout.in_flight=finish"
        )


def build_engine(arguments: dict[str, Any]) -> Any:
    """A vllm LLMEngine in this process; the calling thread owns it from here on."""
    if arguments.get("quantization") == "bitsandbytes":
        _check_bitsandbytes()
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if arguments.get("enable_lora"):
        arguments = arguments | lora_arguments(arguments["model"])
    shorten_start(arguments["model"])
    preload = os.environ.get("LD_PRELOAD")
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    finally:
        # vLLM on CPU sets LD_PRELOAD (libgomp, tcmalloc) for worker processes that we do not have; reward processes
        # would inherit it from this one, tcmalloc's large reservations included.
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload


def _check_bitsandbytes() -> None:
    homes = ("vllm.model_executor.layers.quantization.bitsandbytes", "vllm_bnb_plugin")
    if not any(find_spec(home) for home in homes):
        raise ValueError(
            "model.base: nf4 needs vLLM's bitsandbytes support, which is a plugin of its own from vLLM 0.28 on and not "
            "installed here; run: pip install vllm-bnb-plugin, or set model.base=none"
        )


def checked_prompt(token_ids: Sequence[int], max_tokens: int, max_model_len: int, vocab_size: int) -> list[int]:
    """The prompt as a list of int. Raises ValueError for one that vLLM would refuse late, or whose completion it
    would cut below max_tokens without a word."""
    ids = [int(token) for token in token_ids]
    if not ids:
        raise ValueError("the prompt must hold at least 1 token, got 0")
    if len(ids) + max_tokens > max_model_len:
        raise ValueError(
            f"prompt and completion must fit in max_model_len={max_model_len} tokens, got {len(ids)} + {max_tokens}; "
            "raise max_model_len, or filter longer prompts"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(
            f"token ids must be in [0, {vocab_size}), got {min(ids)} to {max(ids)}; "
            "use the tokenizer of the engine's model"
        )
    return ids


def completion_params(sampling: Sampling, stop_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> Any:
    """vllm SamplingParams: all n completions at once when the last is done, with the sampled tokens' logprobs.

    stop_ids, stop: as of EngineSettings; strings need an engine that has its tokenizer.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        # Without its tokenizer vLLM knows the end tokens of the model's configuration only.
        stop_token_ids=list(stop_ids),
        stop=list(stop),
        include_stop_str_in_output=True,  # else it leaves the end token out of the text that it compares
        logprobs=0,  # of the sampled token and no other
        flat_logprobs=True,  # one list of floats, not a dictionary and an object for each token
        detokenize=bool(stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def probe_params() -> Any:
    """vllm SamplingParams that ask for the prompt's own logprobs, which ignore the temperature."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def lora_request(adapter: Resident, *, load_inplace: bool = False) -> Any:
    """A name for each version, because the prefix cache is keyed by it, not by id or content.

    load_inplace: read the files again though the id is loaded; in a request it would do so at every step.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(
        lora_name=f"policy-v{adapter.version}",
        lora_int_id=adapter.lora_id,
        lora_path=str(adapter.folder),
        load_inplace=load_inplace,
    )


def abort(engine: Any, request_id: str) -> Any:
    """Ends a request. Its RequestOutput with what was sampled by now: "abort" where a completion is not finished.

    vLLM makes that output only for a request with a queue to put it in, and for n > 1 once, with the last completion.
    """
    processor, kept = engine.output_processor, list[Any]()
    for name in processor.external_req_ids.get(request_id, ()):
        processor.request_states[name].queue = SimpleNamespace(put=kept.append)
    engine.abort_request([request_id])
    # vLLM forgets the children of an aborted request with n > 1, and keeps the parent with their output.
    parents = processor.parent_requests
    for name in [name for name, parent in parents.items() if parent.external_req_id == request_id]:
        del parents[name]
    return kept[-1]


def read_completions(output: Any, version: int) -> list[Completion]:
    """The G completions of a finished or aborted RequestOutput, in order, all of one version.

    Raises EngineError if vLLM failed one of them.
    """
    parts = sorted(output.outputs, key=lambda part: part.index)
    return [_completion(part, np.full(len(part.token_ids), version, np.int32)) for part in parts]


def read_continued(output: Any, _began_with: int) -> list[Completion]:
    """The same where the version may change on the way: vLLM's spans say from which token on."""
    parts = sorted(output.outputs, key=lambda part: part.index)
    return [_completion(part, _versions(part.weight_versions)) for part in parts]


def _versions(spans: Sequence[Any]) -> NDArray[np.int32]:
    """[T] the label of each token; spans hold [start, end) token indices."""
    labels = np.array([int(span.version) for span in spans], np.int32)
    return labels.repeat(np.array([span.end - span.start for span in spans], np.int64))


def _completion(part: Any, versions: NDArray[np.int32]) -> Completion:
    count = len(part.token_ids)
    if part.finish_reason not in _FINISH_REASONS:
        raise EngineError(
            f"vLLM must finish a completion with one of {', '.join(_FINISH_REASONS)}, got {part.finish_reason!r} "
            f"after {count} tokens; ask again"
        )
    tokens = np.array(part.token_ids, np.int32)
    return Completion(tokens, _flat(part.logprobs, count), part.finish_reason, versions)


def read_probe(output: Any, _version: int) -> NDArray[np.float32]:
    """[len - 1] float32 nats: nothing precedes the first token, so vLLM has no entry for it."""
    return _flat(output.prompt_logprobs, len(output.prompt_token_ids) - 1)


def _flat(logprobs: Any, count: int) -> NDArray[np.float32]:
    """[count] the values of vLLM's FlatLogprobs, which must be one for each token."""
    values = np.array(logprobs.logprobs, np.float32)
    if len(values) != count:
        raise EngineError(f"vLLM must give one logprob for each of {count} tokens, got {len(values)}; ask again")
    return values
