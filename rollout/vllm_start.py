"""What makes vLLM's start shorter; benchmarks/engine_settings.py measures it."""

from __future__ import annotations

import gc


def shorten_start(model: str) -> None:
    """To be called before the engine of `model` (folder or hub name) is built in this process."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        know_model(model)
    # Building an engine collects garbage five times, and each time looks at a million objects of imported modules.
    gc.freeze()


def know_model(model: str) -> None:
    """Inspects the class of the model in this process.

    vLLM starts a process for that, once per architecture and user, which imports all of vLLM again (8 CPU-seconds),
    lest CUDA start in a process that is forked later. The process that holds an engine of ours is not forked.
    """
    from vllm import ModelRegistry
    from vllm.transformers_utils.config import get_config

    for name in get_config(model, trust_remote_code=False).architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
