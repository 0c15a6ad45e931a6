"""LoRA adapters on one base: the policy's, and a frozen one that may be switched in as the reference."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.config import ModelConfig
from learner.config.learner import LoraConfig
from learner.model.adapter_config import AdapterError, check_same, read_adapter
from learner.model.base import check_finite
from learner.model.lora_targets import check_targets, lora_targets
from learner.model.masters import difference
from rollout.data.weight_files import WEIGHTS_FILE

POLICY, REFERENCE = "default", "reference"


def attach(lm: Any, model: ModelConfig, lora: LoraConfig, seed: int) -> Any:
    """The PEFT model: a new adapter, or the one of model.adapter, to be trained.

    The reference, where it is not the bare base (model.reference, or the adapter that training starts from), is a
    second adapter on the same base, frozen.
    """
    if model.adapter is not None:
        content = read_adapter(model.adapter, "model.adapter")
        check_same(lora, content, model.adapter, LoraConfig.model_fields)
        check_targets(lm, lora.targets, content["target_modules"], model.adapter)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # told by Policy.load
            wrapped: Any = peft.PeftModel.from_pretrained(lm, model.adapter, adapter_name=POLICY, is_trainable=True)
    else:
        wrapped = _fresh(lm, lora, seed)
    reference = model.reference or model.adapter
    if reference is not None:
        _add_reference(wrapped, reference, lm.dtype)
    return wrapped


def _add_reference(wrapped: Any, folder: str, dtype: torch.dtype) -> None:
    """Loads the adapter of a folder beside the policy's, frozen, in the base's type.

    Raises:
        AdapterError: it is no plain LoRA adapter of this base.
        WeightsError: it holds numbers that are not finite.
    """
    what = f"adapter {REFERENCE!r}"
    read_adapter(folder, what)
    tensors = load_file(Path(folder) / WEIGHTS_FILE)
    modes = [(module, module.training) for module in wrapped.modules()]
    wrapped.load_adapter(folder, REFERENCE, is_trainable=False)
    for module, training in modes:  # PEFT calls eval() on everything; checkpointing and 4-bit layers hang on the flag
        module.training = training
    own = {name: weight for name, weight in wrapped.named_parameters() if f".{REFERENCE}." in name}
    named = {name.replace(f".{REFERENCE}.", "."): weight for name, weight in own.items()}
    if odd := difference(named, tensors):  # which PEFT fills with fresh weights, or leaves out
        raise AdapterError(f"{what}: {folder} must have the names and shapes of model.path, {odd}; give another")
    check_finite(tensors.items(), folder, what)
    for weight in own.values():
        weight.data = weight.data.to(dtype)
        weight.requires_grad = False


@contextmanager
def acting_as(wrapped: Any, name: str | None) -> Iterator[None]:
    """Inside this block the model computes with the adapter `name`, or with the base alone (None).

    Which weights train is the same inside and after as before: PEFT's switches set requires_grad, so it is put back. A
    backward pass belongs into the block of its forward pass: activation checkpointing computes again.
    """
    trained = [(weight, weight.requires_grad) for weight in wrapped.parameters()]
    try:
        if name is None:
            with wrapped.disable_adapter():
                yield
        else:
            wrapped.set_adapter(name)
            _set_trained(trained)
            yield
    finally:
        wrapped.set_adapter(POLICY)
        _set_trained(trained)


def _set_trained(weights: Sequence[tuple[Tensor, bool]]) -> None:
    for weight, wanted in weights:
        weight.requires_grad = wanted


def as_json(config: peft.PeftConfig) -> dict[str, Any]:
    """The content of adapter_config.json."""
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    plain["inference_mode"] = True
    return {name: getattr(value, "value", value) for name, value in plain.items()}


def _fresh(lm: Any, lora: LoraConfig, seed: int) -> Any:
    targets = lora_targets(lm, lora.targets)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(lm, settings, adapter_name=POLICY)
        except ValueError as error:
            whole = re.sub(r"\(\n.*\n\)", "", str(error), flags=re.DOTALL)  # the layers of a module that it names
            first = whole.partition(". ")[0].removeprefix("[PEFT:PeftType.LORA] ")
            raise ValueError(f"learner.lora.targets: {first} (PEFT), got {', '.join(targets)}; name others") from None
