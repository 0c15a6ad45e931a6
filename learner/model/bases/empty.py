"""A model whose weights are put in place afterwards: mapped, in shards, or quantised."""

from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, GenerationConfig

from rollout.data.model_files import read_json


def empty_model(config: Any, dtype: torch.dtype, source: str | None = None, **options: Any) -> Any:
    """Returns the causal language model of a transformers config without weights, tied where config says so.

    Args:
        source: ModelConfig.source, whose generation_config.json the model gets: `from_config` does not read it, and
            checkpoints and exports write it. None: the model keeps transformers' default.
        options: arguments of `from_config`.
    """
    with init_empty_weights(include_buffers=False):  # buffers are not in a checkpoint, so they are computed here
        lm: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=False, **options
        )
    if source is not None and (told := read_json(source, "generation_config.json")):
        lm.generation_config = GenerationConfig.from_dict(told)
    lm.tie_weights()
    return lm
