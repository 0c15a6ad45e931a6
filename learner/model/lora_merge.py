"""learner.push: merged. The weights of a model with its LoRA adapter multiplied out, W + alpha / r B A (Hu et al. 2021,
section 4.1), for a generator that holds no adapter.

What the adapter does not touch is not sent: a generator has it from the model's files. But a block (the linear layers
of one module, as self_attn with q, k, v and o) is sent as a whole, biases included, since vLLM fuses some of its layers
into one and fills a fused layer that comes in part with anything.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from learner.model.lora import POLICY
from rollout.safetensors_stream import Source


def merged(lm: Any) -> dict[str, Source]:
    """The checkpoint's name of each weight to send -> how it is made. The model itself stays as it is.

    Raises ValueError for an adapter on layers that are not nn.Linear.
    """
    blocks = {name.rpartition(".")[0] for name, module in lm.named_modules() if _is_adapted(module)}
    return {f"{block}.{name}": source for block in sorted(blocks) for name, source in _block(lm.get_submodule(block))}


def _block(block: nn.Module) -> Iterator[tuple[str, Source]]:
    for name, layer in block.named_children():
        base = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
        if not isinstance(base, nn.Linear):
            if base is layer:
                continue  # a norm, an activation
            raise ValueError(
                f"learner.push: merged is for adapters of nn.Linear, {name} is {type(base).__name__}; set push=adapter"
            )
        for kind, weight in base.named_parameters():
            moved = kind == "weight" and _is_adapted(layer)
            yield f"{name}.{kind}", Source(weight.shape, partial(_merge, layer)) if moved else Source.of(weight)


def _is_adapted(module: nn.Module) -> bool:
    """By the policy's adapter; another role's may lie on further layers."""
    return isinstance(module, LoraLayer) and POLICY in module.scaling


def _merge(layer: Any, place: Tensor) -> None:
    """In float32, from the weights that the learner computes with, then in the model's type."""
    weight: Tensor = layer.get_base_layer().weight
    a, b = layer.lora_A[POLICY].weight.float(), layer.lora_B[POLICY].weight.float()
    there = place.dtype == torch.float32 and place.device == weight.device
    wide = place if there else torch.empty_like(weight, dtype=torch.float32)
    wide.copy_(weight).addmm_(b, a, alpha=layer.scaling[POLICY])
    if not there:
        # Converted before it goes to another device, to which copy_ would take the bytes of float32.
        place.copy_(wide if wide.device == place.device else wide.to(place.dtype))
