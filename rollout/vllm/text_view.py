"""Has vLLM serve the text part of a checkpoint with towers as a causal language model of its own (rollout.text_part).

vLLM is given the text part's configuration (hf_overrides), whose architecture is one of vLLM's for text. A subclass of
that architecture's class renames the checkpoint's tensors and leaves the towers' out. So no tower is in memory, and no
processor of images is needed. The subclass stands in vLLM's registry under the architecture's name; it is registered in
each process that computes, and changes nothing for a model of text alone, whose names are not renamed.
"""

from __future__ import annotations

import re
from typing import Any

from rollout.architecture import other_inputs
from rollout.data.model_files import split
from rollout.text_part import NAMES, text_part, text_tensors

# For a model's configuration on a card: logits are float32, as in the learner. In bfloat16 rounding alone would be 0.04
# to 0.07 nats (rms).
FLOAT32_LOGITS = {"head_dtype": "float32"}
TEXT = "gleaner_text"  # attribute of a class of vLLM that reads the text part of a checkpoint with towers


def served_config(model: str, key: str = "model.path") -> Any:
    """vLLM's configuration of a model, a folder, hub name or name@revision; of a checkpoint with towers that of its
    text part. Raises WrongInput if the text part has no class. key: the setting that names the model."""
    return text_part(_config(model), key)


def view_arguments(model: str, *, cuda: bool, shards: int) -> dict[str, Any]:
    """Keyword arguments of vllm.EngineArgs by which vLLM serves the text part of a checkpoint with towers; {} for a
    model of text alone."""
    config = _config(model)
    if not other_inputs(config.to_dict()):
        return {}
    register_text(text_part(config))
    view = text_on_card if cuda else text_part
    if cuda and shards > 1:
        return {"hf_overrides": view, "worker_cls": "rollout.vllm.shard.Shard"}
    return {"hf_overrides": view}


def text_on_card(config: Any) -> Any:
    """The text part's configuration with FLOAT32_LOGITS."""
    text = text_part(config)
    text.update(FLOAT32_LOGITS)
    return text


def register_text(config: Any) -> None:
    """Registers the classes of a text part's configuration in this process so that they read checkpoints with
    towers."""
    from vllm import ModelRegistry

    for name in config.architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, _of_text(ModelRegistry.models[name].load_model_cls()))


def register_in_worker(vllm_config: Any) -> None:
    """In a worker process: registers the classes that the engine's process has registered, if it serves a text part."""
    if vllm_config.model_config.hf_overrides in (text_part, text_on_card):
        register_text(vllm_config.model_config.hf_config)


def _of_text(served: Any) -> Any:
    from vllm.model_executor.models.utils import WeightsMapper

    if getattr(served, TEXT, False):
        return served
    own = getattr(served, "hf_to_vllm_mapper", None) or WeightsMapper()
    renames = WeightsMapper(orig_to_new_regex={re.compile(pattern): new for pattern, new in NAMES.items()})

    def load_weights(self: Any, weights: Any) -> Any:
        return served.load_weights(self, text_tensors(weights))

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        served.__init__(self, vllm_config=vllm_config, prefix=prefix)
        if (made := vars(self).get("hf_to_vllm_mapper")) is not None:  # GLM-4 makes its own of the configuration
            self.hf_to_vllm_mapper = renames | made

    content = {TEXT: True, "hf_to_vllm_mapper": renames | own, "load_weights": load_weights, "__init__": __init__}
    return type(served.__name__, (served,), content)


def _config(model: str) -> Any:
    from vllm.transformers_utils.config import get_config

    name, revision = split(model)
    return get_config(name, trust_remote_code=False, revision=revision)
