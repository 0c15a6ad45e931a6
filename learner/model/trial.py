"""Tries a configuration on a model without weights (torch's meta device), before a run starts. Each trial is a process
of its own, which learner.driver.input_checks starts:

    python -m learner.model.trial model | shared_base

The process reads a configuration as JSON on stdin, and prints a list of sentences as its last line. `model` reports
what the constructor of the policy would refuse; `shared_base` reports why memory.layout: shared would not work.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import peft
import torch

from cluster.errors import WrongInput
from learner.config import ModelConfig, RunConfig
from learner.model.adapter_config import HEAD, NOTE
from learner.model.base import head_of, load_base
from learner.model.bases.quantised import wrong_layers
from learner.model.bases.shared import no_views, refusal
from learner.model.logprob import logits_of
from learner.model.lora import POLICY, attach
from learner.model.roles import without_head
from rewards.config import adapters_of
from rollout.data.model_files import CONFIG, adapter_weights, model_weights, read_json
from rollout.data.weight_names import adapter_misfits, transformers_misfits
from rollout.quantised import format_of
from rollout.types import View
from rollout.vllm.environment import required_env
from rollout.weights import linear_layers


def wrong_with(config: RunConfig) -> list[str]:
    """Returns a sentence for each fault of the configuration that the policy's constructor would refuse."""
    # The model without quantisation has the same layers as a base in 4 bits, and needs no bitsandbytes.
    model = config.model.model_copy(update={"base": "none", "adapter": None, "reference": None})
    try:
        lm = load_base(model, torch.device("meta"), lora=config.learner.mode == "lora")
        head_of(lm, model.path)
        logits_of(lm.config.get_text_config())
    except Exception as error:  # transformers may raise any exception for an inconsistent config.json
        return [_sentence(error, "model.path: ")]
    found = _weights(lm, model.source)
    reference = config.model.reference if config.learner.mode == "full" else None
    found += [] if reference is None else _weights(lm, reference, "model.reference")
    if config.arrangement.in_shards and not found:
        found += _not_in_files(lm, model.source)
        found += [] if reference is None else _not_in_files(lm, reference)
    if config.learner.mode == "lora":
        try:
            with torch.device("meta"):
                attach(lm, model, config.learner.lora, config.seed)
        except Exception as error:  # peft may raise any exception
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


def _weights(lm: Any, path: str, key: str = "model.path") -> list[str]:
    """Returns messages about tensors of the files that transformers would not read into the model, and about missing
    ones."""
    try:
        stored = model_weights(path, key)
        if stored is None:
            return []
        packed = format_of(read_json(path, CONFIG), path)
        return (
            transformers_misfits(path, key, stored, lm)
            if packed is None
            else wrong_layers(lm, stored, packed, path, key)
        )
    except WrongInput:  # learner.driver.input_checks reports it
        return []


def _not_in_files(lm: Any, path: str) -> Iterator[str]:
    """Yields a message if a sharded base could not read some weights from the files."""
    from learner.model.bases.sharded import missing_from  # imported here: it is slow, and few runs use it

    try:
        stored = model_weights(path)
    except WrongInput:
        return
    if stored is not None and (wrong := missing_from(dict(lm.named_parameters()), stored, path)):
        yield wrong


def _adapter(model: ModelConfig, folder: str, key: str) -> Iterator[str]:
    """Yields messages about weights of an adapter that do not fit the layers which its adapter_config.json names."""
    try:
        stored = adapter_weights(folder, key)
    except WrongInput:  # learner.driver.input_checks reports it
        return
    try:
        base = load_base(model, torch.device("meta"), lora=True)
        with torch.device("meta"):
            wrapped = peft.get_peft_model(base, without_head(peft.LoraConfig.from_pretrained(folder)), POLICY)
    except Exception as error:  # peft may raise any exception
        yield _sentence(error, f"{key}: ")
        return
    wanted = {
        name.replace(f".{POLICY}.", "."): tuple(weight.shape)
        for name, weight in wrapped.named_parameters()
        if ".lora_" in name
    }
    if HEAD in stored:
        wanted[HEAD] = (1, head_of(base, model.path).shape[1])
    yield from adapter_misfits(wanted, stored, key, folder)


def _sentence(error: Exception, key: str) -> str:
    """Returns an error as one line that begins with the setting; gleaner's own messages begin with it already."""
    text = " ".join(str(error).split())[:500] or type(error).__name__
    known = text.startswith(("model.", "learner.", "rollout.", "memory.", "rewards:"))
    return text if known else f"{key}{text}; see docs/models.md for what can be trained"


def wrong_with_mapping(config: RunConfig) -> list[str]:
    """Returns a sentence if the learner could not map the generator's base (memory.layout: shared), else an empty list.

    It compares names and shapes only, by running vLLM's loading code and making the learner's model without weights.
    What cannot be found out so, since vLLM needs weights or a GPU for it, is checked when the run starts.
    """
    from rollout.vllm.shared_base import views_of

    try:
        stored = model_weights(config.model.source)
        if format_of(read_json(config.model.source, CONFIG), config.model.path) is not None:
            return []  # learner.driver.input_checks refuses it
        lm = load_base(config.model.model_copy(update={"base": "none"}), torch.device("meta"), lora=True)
    except (ValueError, OSError):  # learner.driver.input_checks and wrong_with report it
        return []
    if stored is None:  # the model is not in this machine's cache
        return []
    try:
        views, refused = views_of(
            config.model.source, config.model.dtype, {name: own.shape for name, own in stored.items()}
        )
    except Exception as error:  # vLLM may raise any exception; a trial that failed is no reason to refuse a run
        tell(f"memory.layout: shared was not tried before the start: {error!r}")
        return []
    if config.model.base == "nf4":
        scattered = not_by_rows(lm, views)
        views = {name: view for name, view in views.items() if name not in scattered}
        refused |= scattered
    wanted = dict(lm.named_parameters())
    wrong = no_views(wanted, {name: view.shape for name, view in views.items()}, refused)
    return [refusal(wrong, len(wanted))] if wrong else []


def not_by_rows(lm: Any, views: dict[str, View]) -> dict[str, str]:
    """Returns the matrices that would be packed in 4 bits and whose rows are not contiguous, each with the reason why
    it cannot be mapped. vLLM's layout of 4-bit weights differs from `views`, but it fuses the same tensors in the same
    order."""
    names = {f"{name}.weight" for name in linear_layers(lm)}
    return {
        name: f"its rows do not lie one after the other there (strides {list(view.strides)}), as packed ones must"
        for name, view in views.items()
        if name in names and view.strides != (view.shape[1], 1)
    }


def tell(text: str) -> None:
    """Prints a note for the user that is no reason to refuse a run (learner.driver.input_checks reads stderr)."""
    print(NOTE + " ".join(text.split()), file=sys.stderr)


def main(kind: str) -> None:
    run = RunConfig.model_validate_json(sys.stdin.read())
    if kind == "shared_base":
        os.environ.update(required_env(cuda=run.cluster.gpus.generator > 0))
    print(json.dumps((wrong_with_mapping if kind == "shared_base" else wrong_with)(run)))


if __name__ == "__main__":
    main(sys.argv[1])
