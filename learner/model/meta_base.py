"""A base model without weights: every tensor has its shape, type and bytes, and no content (torch's meta device)."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def without_weights(config: Any, dtype: torch.dtype, quantization: BitsAndBytesConfig | None) -> Any:
    """The causal language model of a transformers config, quantised as `from_pretrained` would do it."""
    with torch.device("meta"), torch.no_grad():
        lm: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=False
        )
        if quantization is not None:
            _quantise(lm, quantization)
    return lm


def _quantise(lm: Any, quantization: BitsAndBytesConfig) -> None:
    # Here: slow to import, and few runs use it.
    from bitsandbytes.functional import name2qmap, quantize_4bit
    from bitsandbytes.nn.modules import Params4bit
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    head = next(name for name, module in lm.named_modules() if module is lm.get_output_embeddings())
    dense = {name: module.weight for name, module in lm.named_modules() if isinstance(module, nn.Linear)}
    replace_with_bnb_linear(lm, modules_to_not_convert=[head], quantization_config=quantization)
    for name, weight in dense.items():
        if name == head:
            continue
        # The operations behind Params4bit.to("cuda"), which a meta tensor does not go through.
        packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        module = lm.get_submodule(name)
        module.weight = Params4bit(
            packed, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True, module=module
        )
        module.quant_state = state
    lm.is_loaded_in_4bit = True  # what PEFT goes by
    name2qmap.pop("dynamic", None)  # bitsandbytes' table for this process, which was just made without content
