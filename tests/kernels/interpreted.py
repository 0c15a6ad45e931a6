"""vLLM's kernels as it would import them on a card. To be imported before anything of vllm.lora.ops or its runner."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
import vllm.triton_utils
from vllm.triton_utils import importing

# vLLM asks for a driver, which the interpreter does not need.
utils: Any = vllm.triton_utils
utils.HAS_TRITON = importing.HAS_TRITON = True
utils.triton, utils.tl = triton, tl

from vllm.lora.layers import LoRAMapping  # noqa: E402
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU  # noqa: E402
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs  # noqa: E402

__all__ = ["compute_token_logprobs", "wrapper_of"]


class Settings:
    """What the wrapper reads of vLLM's LoRAConfig."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras, self.specialize_active_lora = max_loras, False


def wrapper_of(rows: list[int], adapters: list[int]) -> Any:
    """The LoRA wrapper of a step. rows: each row's adapter, 0 for none; adapters: those in the slots, in order."""
    wrapper: Any = PunicaWrapperGPU(64, 8, "cpu", lora_config=Settings(len(adapters)))
    mapping = LoRAMapping(tuple(rows), tuple(rows), is_prefill=True)
    wrapper.update_metadata(mapping, list(adapters), len(adapters), vocab_size=512)
    return wrapper
