"""What makes vLLM's start and end shorter, and what it must know of a model's adapters before."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from rollout.architecture import ATTENTION, ArchitectureError, has_experts


def import_cpu_engine() -> None:
    """What build_engine and the engine import on a CPU but the model's own class: nine tenths of its start."""
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401


def shorten_start(model: str, revision: str | None) -> None:
    """To be called before the engine of `model` (folder or hub name) is built in this process."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        know_model(model, revision)
    # Building an engine collects garbage five times, and each time looks at a million objects of imported modules.
    gc.freeze()


def shut_down(engine: Any) -> None:
    """Ends the engine core, without the two full collections of garbage in it: each looks at a million objects of
    imported modules, together nine tenths of its second. Nearly all that it holds goes with its last reference, and the
    process of a generator ends next; another that goes on collects the rest in its own time."""
    collect = gc.collect
    gc.collect = _nothing  # vLLM has no setting for it, and undoes a freeze of its own first
    try:
        engine.engine_core.shutdown()
    finally:
        gc.collect = collect
        gc.unfreeze()


def _nothing(generation: int = 2) -> int:
    return 0


def know_model(model: str, revision: str | None = None) -> None:
    """Inspects the class of the model in this process.

    vLLM starts a process for that, once per architecture and user, which imports all of vLLM again (8 CPU-seconds),
    lest CUDA start in a process that is forked later. The process that holds an engine of ours is not forked.
    """
    from vllm import ModelRegistry
    from vllm.transformers_utils.config import get_config

    for name in get_config(model, trust_remote_code=False, revision=revision).architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def has_states(kind: type) -> bool:
    """Whether layers of a class of vLLM keep a state, as Mamba, linear attention and short convolutions do, in place of
    keys and values."""
    return bool(getattr(kind, "is_hybrid", False) or getattr(kind, "is_attention_free", False))


def keeps_states(model: str, revision: str | None = None) -> bool:
    """The same of a folder or hub name."""
    from vllm import ModelRegistry
    from vllm.transformers_utils.config import get_config

    names = get_config(model, trust_remote_code=False, revision=revision).architectures or ()
    return any(
        has_states(ModelRegistry.models[name].load_model_cls()) for name in names if name in ModelRegistry.models
    )


def lora_arguments(model: str, targets: Sequence[str], revision: str | None = None) -> dict[str, Any]:
    """Keywords of vllm.EngineArgs for the adapters of a model: which layers get LoRA kernels. Without them vLLM would
    put these around the output embedding too, and run them in every step.

    targets: as of EngineSettings.lora_targets; of a model with experts only the attention is adapted.

    Raises ArchitectureError if vLLM does not serve the model with LoRA. Known to it are names that it may serve by
    transformers' own code, so only one of its own classes can be asked.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora
    from vllm.transformers_utils.config import get_config

    config = get_config(model, trust_remote_code=False, revision=revision)
    for name in config.architectures or ():
        entry = ModelRegistry.models.get(name)
        if entry is not None and not supports_lora(entry.load_model_cls()):
            raise ArchitectureError(without_lora(name, model))
    if has_experts(config.to_dict()):
        return {"lora_target_modules": list(ATTENTION)}
    return {"lora_target_modules": list(targets) or _linear_layers(config)}


def _linear_layers(config: Any) -> list[str]:
    """The last part of the names of all linear layers but the output embedding, from a model without weights."""
    from torch import device
    from transformers import AutoModelForCausalLM

    from rollout.linear_layers import linear_layers

    auto: Any = AutoModelForCausalLM  # its methods carry no annotations
    with device("meta"):  # in no attention that its config.json may want, and that is not installed
        lm = auto.from_config(config, attn_implementation="eager")
    return sorted({name.rpartition(".")[2] for name in linear_layers(lm)})


def without_lora(name: str, model: str) -> str:
    """What a user is told of an architecture that vLLM serves without LoRA."""
    return (
        f"model.path: vLLM serves {name} ({model}) without LoRA; set learner.mode=full or learner.push=merged, or give "
        "another architecture (docs/models.md)"
    )
