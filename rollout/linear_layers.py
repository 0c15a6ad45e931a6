"""The layers that LoRA may adapt: the learner puts adapters on them, a generator gives them LoRA kernels."""

from typing import Any

from torch import nn


def linear_layers(lm: Any) -> set[str]:
    """Names of all linear layers of a causal language model of transformers but its output embedding."""
    head = lm.get_output_embeddings()
    return {name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head}
