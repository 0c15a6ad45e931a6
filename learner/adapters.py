"""LoRA adapters on one base: the policy's, and frozen ones that may be switched in for another role."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from torch import nn

from learner.config import ModelConfig
from learner.learner_config import LoraConfig

POLICY, REFERENCE = "default", "reference"
WEIGHTS_FILE = "adapter_model.safetensors"


def attach(lm: Any, model: ModelConfig, lora: LoraConfig, seed: int) -> Any:
    """The PEFT model: a new adapter, or the one of model.adapter, to be trained.

    The reference, where it is not the bare base (model.reference, or the adapter that training starts from), is a
    second adapter on the same base, frozen.
    """
    if model.adapter is not None:
        _check_adapter(peft.PeftConfig.from_pretrained(model.adapter), model.adapter, lora)
        wrapped: Any = peft.PeftModel.from_pretrained(lm, model.adapter, adapter_name=POLICY, is_trainable=True)
    else:
        wrapped = _fresh(lm, lora, seed)
    reference = model.reference or model.adapter
    if reference is not None:
        add_frozen(wrapped, REFERENCE, reference, lm.dtype)
    return wrapped


def add_frozen(wrapped: Any, name: str, folder: str, dtype: torch.dtype) -> None:
    """Loads the adapter of a folder beside the others, frozen, in the base's type.

    Raises:
        ValueError: it is no plain LoRA adapter, or the name is taken.
    """
    if name in wrapped.peft_config:
        raise ValueError(f"adapter {name!r}: its name must be new, there are {', '.join(wrapped.peft_config)}")
    kind = peft.PeftConfig.from_pretrained(folder).peft_type
    if getattr(kind, "value", kind) != "LORA":
        raise ValueError(f"adapter {name!r}: {folder} must be a LoRA adapter, got {kind}; export one with this project")
    modes = [(module, module.training) for module in wrapped.modules()]
    wrapped.load_adapter(folder, name, is_trainable=False)
    for module, training in modes:  # PEFT calls eval() on everything; checkpointing and 4-bit layers hang on the flag
        module.training = training
    for key, weight in wrapped.named_parameters():
        if f".{name}." in key:
            weight.data = weight.data.to(dtype)
            weight.requires_grad = False


@contextmanager
def acting_as(wrapped: Any, name: str | None) -> Iterator[None]:
    """Within it the model computes with the adapter `name`, or with the bare base (None); nothing of it is trained.

    Which weights train is the same after as before: PEFT's switches set requires_grad, so it is put back.
    """
    trained = [(weight, weight.requires_grad) for weight in wrapped.parameters()]
    try:
        if name is None:
            with wrapped.disable_adapter():
                yield
        else:
            wrapped.set_adapter(name, inference_mode=True)
            yield
    finally:
        wrapped.set_adapter(POLICY)
        for weight, wanted in trained:
            weight.requires_grad = wanted


def as_json(config: peft.PeftConfig) -> dict[str, Any]:
    """The content of adapter_config.json."""
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    plain["inference_mode"] = True
    return {name: getattr(value, "value", value) for name, value in plain.items()}


def _fresh(lm: Any, lora: LoraConfig, seed: int) -> Any:
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=lora.targets,
        lora_dropout=0.0,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
    )
    if lora.targets != "all-linear":
        _check_targets(lm, list(lora.targets))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(lm, settings, adapter_name=POLICY)


def _check_targets(lm: Any, targets: list[str]) -> None:
    head = lm.get_output_embeddings()
    linear = {name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head}
    known = sorted({name.rsplit(".", 1)[-1] for name in linear})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ValueError(
                f"learner.lora.targets: each must name linear layers of the model other than its output embedding, got "
                f"{target!r}; known: {', '.join(known)}, or all-linear"
            )


def _check_adapter(config: Any, folder: str, lora: LoraConfig) -> None:
    wanted: dict[str, Any] = {
        "peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none", "use_dora": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    for name, value in wanted.items():
        found = getattr(config, name, None)
        if found != value:
            raise ValueError(
                f"model.adapter: {name} of {folder} must be {value!r}, got {found!r}; set learner.lora.rank and .alpha "
                "to the adapter's, or start from a plain LoRA adapter"
            )
