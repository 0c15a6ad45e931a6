"""What makes vLLM's start shorter; benchmarks/engine/engine_settings.py measures it."""

from __future__ import annotations

import gc
from typing import Any

from rollout.architecture import ATTENTION, ArchitectureError, has_experts


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


def lora_arguments(model: str) -> dict[str, Any]:
    """Keywords of vllm.EngineArgs for the adapters of a model: of one with experts only the attention is adapted.

    Raises ArchitectureError if vLLM does not serve the model with LoRA. Known to it are names that it may serve by
    transformers' own code, so only one of its own classes can be asked.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora
    from vllm.transformers_utils.config import get_config

    config = get_config(model, trust_remote_code=False)
    for name in config.architectures or ():
        entry = ModelRegistry.models.get(name)
        if entry is not None and not supports_lora(entry.load_model_cls()):
            raise ArchitectureError(without_lora(name, model))
    return {"lora_target_modules": list(ATTENTION)} if has_experts(config.to_dict()) else {}


def without_lora(name: str, model: str) -> str:
    """What a user is told of an architecture that vLLM serves without LoRA."""
    return (
        f"model.path: vLLM serves {name} ({model}) without LoRA; set learner.mode=full or learner.push=merged, or give "
        "another architecture (docs/models.md)"
    )
