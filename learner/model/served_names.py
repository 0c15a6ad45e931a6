"""An adapter under the names that vLLM has for its layers, where these are not those of transformers and PEFT.

vLLM takes a fused layer of GLM-4 for two (packed_modules_mapping in its glm4.py). With A shared and B = [B1; B2] one
adapter of the fused layer is one of each part: [W1; W2] + B A = [W1 + B1 A; W2 + B2 A].
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# model_type -> fused layer -> its parts, in the order of their rows
SPLIT: dict[str, dict[str, tuple[str, ...]]] = {"glm4": {"gate_up_proj": ("gate_proj", "up_proj")}}


def differ(model_type: str, config: Mapping[str, Any]) -> bool:
    """Whether vLLM has other names for what an adapter of this content of adapter_config.json changes."""
    return bool(served_config(model_type, config)["target_modules"] != config["target_modules"])


def served_weights(model_type: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's name of each weight -> vLLM's; without a copy."""
    served: dict[str, Tensor] = {}
    for name, weight in weights.items():
        layer, _, matrix = name.partition(".lora_")
        parts = _parts(model_type, layer)
        pieces = weight.chunk(len(parts)) if matrix.startswith("B") else [weight] * len(parts)
        served |= {f"{part}.lora_{matrix}": piece for part, piece in zip(parts, pieces, strict=True)}
    return served


def served_config(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of adapter_config.json that goes with served_weights."""
    targets = [part for target in config["target_modules"] for part in _parts(model_type, target)]
    return {**config, "target_modules": targets}


def _parts(model_type: str, layer: str) -> list[str]:
    """vLLM's names of a layer, by its whole name or the last part of it."""
    block, dot, leaf = layer.rpartition(".")
    return [f"{block}{dot}{part}" for part in SPLIT.get(model_type, {}).get(leaf, (leaf,))]
