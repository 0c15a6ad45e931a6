"""Layers in 4 bits on memory of a generator (memory.base: shared, model.base: nf4): bitsandbytes' own Linear4bit, as
transformers would have made them, but for their scales, which the generator holds in float32 and not nested.

What is multiplied out is the same to the bit: un-nested scales are what bitsandbytes makes of nested ones each time.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from rollout.shared_base.manifest import Quantised


def replace_layers(lm: Any, names: Collection[str], quantization: BitsAndBytesConfig) -> None:
    """Puts a layer in 4 bits, still without weights, in the place of each linear layer whose weight is named."""
    from bitsandbytes.nn.modules import Linear4bit  # here: slow to import, and few runs use it

    for name in names:
        path = name.removesuffix(".weight")
        plain: nn.Linear = lm.get_submodule(path)
        with torch.device("meta"):
            layer = Linear4bit(  # type: ignore[no-untyped-call]
                plain.in_features,
                plain.out_features,
                plain.bias is not None,
                compute_dtype=quantization.bnb_4bit_compute_dtype,
                quant_type=quantization.bnb_4bit_quant_type,
            )
        lm.set_submodule(path, layer)
    lm.is_loaded_in_4bit = True  # what PEFT goes by


def weight_of(layer: Any, packed: Tensor, scales: Tensor, quantised: Quantised) -> Any:
    """The weight of such a layer: [out * in / 2, 1] packed, with its scales [out * in / block]."""
    from bitsandbytes.functional import QuantState, get_4bit_type
    from bitsandbytes.nn.modules import Params4bit

    layer.quant_state = QuantState(  # type: ignore[no-untyped-call]
        absmax=scales,
        shape=torch.Size(quantised.shape),
        code=get_4bit_type("nf4", device=packed.device),  # type: ignore[no-untyped-call]
        blocksize=quantised.block,
        quant_type="nf4",
        dtype=layer.compute_dtype,
    )
    return Params4bit(
        packed,
        requires_grad=False,
        quant_state=layer.quant_state,
        blocksize=quantised.block,
        quant_type="nf4",
        bnb_quantized=True,
        module=layer,
    )
