"""Between our values and vLLM's: sampling parameters, adapter requests, outputs.

Everything is passed by keyword, since positions differ between vLLM 0.26 and 0.33.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.types import Completion, EngineError, Sampling
from rollout.vllm.adapter_cache import Resident

FORM = "gleaner_form"  # in extra_args: what rollout.vllm.structured reads
_FINISH_REASONS = ("stop", "length")


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


def completion_params(
    sampling: Sampling, stop_ids: Sequence[int] = (), stop: Sequence[str] = (), form: str = ""
) -> Any:
    """vllm SamplingParams: all n completions at once when the last is done, with the sampled tokens' logprobs.

    stop_ids, stop, form: as of EngineSettings; strings need an engine that has its tokenizer.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        # Without its tokenizer vLLM knows the end tokens of the model's configuration only.
        stop_token_ids=list(stop_ids),
        stop=list(stop),
        include_stop_str_in_output=True,  # else it leaves the end token out of the text that it compares
        logprobs=0,  # of the sampled token and no other
        flat_logprobs=True,  # one list of floats, not a dictionary and an object for each token
        detokenize=bool(stop),
        extra_args={FORM: form} if form else None,
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


def read_completions(output: Any, version: int) -> list[Completion]:
    """The G completions of a finished RequestOutput, in order, all of one version.

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
