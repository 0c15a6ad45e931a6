"""Which layers of a model attend to a window of the last tokens alone, by its config.json. Pure."""

from collections.abc import Mapping
from math import ceil
from typing import Any

GEMMA_3_PATTERN = 6  # each sixth layer attends to all


def windowed_layers(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int, int]:
    """(layers, tokens of their window), (0, 0) where there are none. Where the file does not name each layer's type,
    as transformers derives it from the kind of model."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return 0, 0
    types = config.get("layer_types")
    if isinstance(types, list):
        count = types.count("sliding_attention")
    elif kind == "gemma2":
        count = ceil(layers / 2)
    elif kind == "gemma3_text":
        count = layers - layers // int(config.get("sliding_window_pattern") or GEMMA_3_PATTERN)
    elif kind == "mistral":
        count = layers
    else:
        count = max(0, layers - int(config.get("max_window_layers") or 0)) if config.get("use_sliding_window") else 0
    return (count, window) if count else (0, 0)
