"""The learner's own code on a model without weights (torch's meta device): what its constructor would refuse.

A process of its own (learner.driver.trials): a configuration as JSON on stdin, a list of sentences as the last line on
stdout.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import peft
import torch

from learner.config import ModelConfig, RunConfig
from learner.model.adapter_config import HEAD
from learner.model.base import head_of, load_base
from learner.model.logits import logits_of
from learner.model.lora import POLICY, attach
from learner.model.roles import without_head
from learner.model.weight_files import Stored, WeightsError, adapter_weights, model_weights
from rewards.config import adapters_of

SHOWN = 3  # names in a message


def wrong_with(config: RunConfig) -> list[str]:
    """One sentence for each thing that is wrong."""
    # The same layers as of a base in 4 bits, without the library that makes those.
    model = config.model.model_copy(update={"base": "none", "adapter": None, "reference": None})
    try:
        lm = load_base(model, torch.device("meta"), lora=config.learner.mode == "lora")
        head_of(lm, model.path)
        logits_of(lm.config.get_text_config())
    except Exception as error:  # transformers', of a config.json that does not hold together
        return [_sentence(error, "model.path: ")]
    found = list(_weights(lm, model.source))
    if config.memory.base == "sharded":
        found += _not_in_files(lm, model.source)
        reference = config.model.reference if config.learner.mode == "full" else None
        found += [] if reference is None else _not_in_files(lm, reference)
    if config.learner.mode == "lora":
        try:
            with torch.device("meta"):
                attach(lm, model, config.learner.lora, config.seed)
        except Exception as error:  # peft's
            found.append(_sentence(error, "learner.lora: "))
        for key, folder in (
            ("model.adapter", config.model.adapter),
            ("model.reference", config.model.reference),
            ("learner.value.start", config.learner.value.start),
        ):
            if folder is not None:
                found += _adapter(model, folder, key)
        for reward in adapters_of(config.rewards):
            found += _adapter(model, str(reward.adapter), f"rewards: {reward.name}")
    return found


def _weights(lm: Any, path: str) -> Iterator[str]:
    """Tensors of the model's own names whose shapes are not those of its files; what is stored otherwise (experts one
    by one, say) is known to the loading code alone."""
    try:
        stored = model_weights(path)
    except WeightsError:  # said by learner.driver.model_checks
        return
    if stored is None:
        return
    wanted = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
    wrong = [name for name, shape in wanted.items() if name in stored and stored[name].shape != shape]
    if wrong:
        name = wrong[0]
        yield (
            f"model.path: {len(wrong)} tensors of {path} have not the shape of its config.json, first {name}: must be "
            f"{list(wanted[name])}, got {list(stored[name].shape)}; give weights and config.json of one model"
        )
    if not any(name in stored or f"model.{name}" in stored or name.removeprefix("model.") in stored for name in wanted):
        names = ", ".join(sorted(stored)[:SHOWN])
        yield f"model.path: none of the weights of {path} belongs to its config.json ({names}, ...); give another"


def _not_in_files(lm: Any, path: str) -> Iterator[str]:
    """Weights that cannot be read in parts."""
    from learner.model.sharded_base import missing_from  # here: slow to import, and few runs use it

    try:
        stored = model_weights(path)
    except WeightsError:
        return
    if stored is not None and (wrong := missing_from(dict(lm.named_parameters()), stored, path)):
        yield wrong


def _adapter(model: ModelConfig, folder: str, key: str) -> Iterator[str]:
    """What of an adapter does not fit the layers that its own adapter_config.json names."""
    try:
        stored = adapter_weights(folder, key)
    except WeightsError:  # said by learner.driver.model_checks
        return
    try:
        base = load_base(model, torch.device("meta"), lora=True)
        with torch.device("meta"):
            wrapped = peft.get_peft_model(base, without_head(peft.LoraConfig.from_pretrained(folder)), POLICY)
    except Exception as error:  # peft's
        yield _sentence(error, f"{key}: ")
        return
    wanted = {
        name.replace(f".{POLICY}.", "."): tuple(weight.shape)
        for name, weight in wrapped.named_parameters()
        if ".lora_" in name
    }
    if HEAD in stored:
        wanted[HEAD] = (1, head_of(base, model.path).shape[1])
    if sentence := _difference(wanted, stored, key, folder):
        yield sentence


def _difference(wanted: dict[str, tuple[int, ...]], stored: dict[str, Stored], key: str, folder: str) -> str:
    missing, strange = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    for names, what in ((strange, "has weights that the model has no place for"), (missing, "lacks weights")):
        if names:
            return f"{key}: {folder} {what}: {len(names)}, first {names[0]}; give an adapter of this model"
    wrong = [name for name, shape in wanted.items() if stored[name].shape != shape]
    if wrong:
        name = wrong[0]
        return (
            f"{key}: {len(wrong)} weights of {folder} have another shape than the model's, first {name}: must be "
            f"{list(wanted[name])}, got {list(stored[name].shape)}; give an adapter of this model"
        )
    return ""


def _sentence(error: Exception, key: str) -> str:
    """An error in one line; those of this project begin with the key already."""
    text = " ".join(str(error).split())[:500] or type(error).__name__
    known = text.startswith(("model.", "learner.", "rollout.", "memory.", "rewards:"))
    return text if known else f"{key}{text}; see docs/models.md for what can be trained"


if __name__ == "__main__":
    print(json.dumps(wrong_with(RunConfig.model_validate_json(sys.stdin.read()))))
