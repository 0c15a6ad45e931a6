"""The text part of a checkpoint that also takes images or sound: its configuration, its class and its tensors' names.

Such a checkpoint holds a decoder for text, under a prefix of its own, and a tower for each other kind of input. Learner
and generators take the decoder alone, as a causal language model under the names that a model of text alone has
(`model.layers...`, `lm_head`). So nothing else in gleaner has to know towers: adapters, weight sync and its proof use
the names of text. Only what leaves gleaner, an exported adapter, has the checkpoint's own names again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from cluster.errors import WrongInput
from rollout.architecture import SAME_OF_TEXT, other_inputs

T = TypeVar("T")

# Patterns of names in the files -> names of a model of text; also for transformers' key_mapping. Some checkpoints hold
# the head inside the decoder's prefix, and some keep the prefix of their decoder's layers.
NAMES = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
}
# Tensors that text does not need: towers, what joins them to the decoder, and layers for multi-token prediction.
TOWERS = (
    "visual|vision_tower|vision_model|vision_encoder|audio_tower|embed_vision|embed_audio|multi_modal_projector"
    "|patch_merger|vision_language_adapter|mtp"
)
OUTSIDE = re.compile(rf"^(?:model\.)?(?:{TOWERS})\.")
PEFT = "base_model.model."  # PEFT's prefix of the names of all layers
# For `exclude_modules` of an adapter's configuration: on the whole checkpoint PEFT would also adapt layers of towers
# that have the names of adapted ones.
EXCLUDED = rf"(?:.*\.)?(?:{TOWERS})\..*"
# Lists of layers in a quantization_config: those that stay in 16 bits, and GPTQ's of those that do not.
KEPT = ("ignore", "ignored_layers", "modules_to_not_convert")
LISTS = (*KEPT, "modules_in_block_to_quantize")
# Layers that stand for all of a text part where a regular expression is tried, by their names in the whole checkpoint.
WHOLE = tuple(
    f"{prefix}layers.0.{layer}"
    for prefix in ("language_model.model.", "model.language_model.", "language_model.")
    for layer in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "linear_attn.out_proj")
)


def text_part(config: Any, key: str = "model.path") -> Any:
    """Returns the transformers configuration of a checkpoint's text part, a causal language model of its own with
    `architectures`; `config` itself if the checkpoint is of text alone.

    Raises WrongInput if transformers has no causal language model for the text part. key: the setting that names the
    model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    content = config.to_dict()
    if not other_inputs(content):
        return config
    text = config.get_text_config()
    if text.model_type in SAME_OF_TEXT:
        plain = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "architectures")}
        rope = {name: value for name, value in plain["rope_parameters"].items() if not name.startswith("mrope")}
        text = AutoConfig.for_model(SAME_OF_TEXT[text.model_type], **plain | {"rope_parameters": rope})
    if text.model_type not in CLASSES:
        raise WrongInput(
            f"{key}: the text part of {config.model_type} ({text.model_type}) must be a causal language model of "
            "transformers, which has none for it; give another model (docs/models.md)"
        )
    if "tie_word_embeddings" not in content.get("text_config", {}):
        text.tie_word_embeddings = config.tie_word_embeddings
    text.architectures = [CLASSES[text.model_type]]
    if getattr(text, "dtype", None) is None:
        text.dtype = config.dtype
    told = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if isinstance(told, Mapping):
        text.quantization_config = text_quantisation(told)
    rope = getattr(text, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" in rope:  # the form in which vLLM's Mistral reads the scale of queries
        length = rope["original_max_position_embeddings"]
        scaling = {"original_max_position_embeddings": length, "beta": rope["llama_4_scaling_beta"]}
        text.llama_4_scaling = scaling
    return text


def text_name(name: str) -> str | None:
    """The name that a model of text has for a tensor of such a checkpoint; None for a tensor that text does not need.
    Names of a model of text stay as they are."""
    if OUTSIDE.match(name):
        return None
    for pattern, new in NAMES.items():
        name, count = re.subn(pattern, new, name, count=1)
        if count:
            break
    return name


def text_quantisation(told: Mapping[str, Any]) -> dict[str, Any]:
    """A quantization_config whose layers have the names of a model of text; towers' keep theirs, which no layer of text
    has. Left out are regular expressions and GPTQ's exceptions (`dynamic`) that are of towers alone, by WHOLE. Others
    stay as they are."""

    def named(layer: Any) -> Any:
        if isinstance(layer, list):
            return [named(one) for one in layer]
        own = text_name(f"{layer}.") if isinstance(layer, str) and not layer.startswith("re:") else None
        return layer if own is None else own.removesuffix(".")

    found = {
        name: [named(layer) for layer in value if not _of_towers(layer)]
        if name in LISTS and isinstance(value, list) else value
        for name, value in told.items()
    }  # fmt: skip
    if isinstance(dynamic := told.get("dynamic"), Mapping):
        left_out = {rule for rule in dynamic if str(rule).startswith("-:") and not _meets_text(str(rule)[2:])}
        found["dynamic"] = {rule: value for rule, value in dynamic.items() if rule not in left_out}
    return found


def _of_towers(layer: Any) -> bool:
    """Whether an entry is a regular expression for the names of the whole checkpoint, and of no layer of its text."""
    written = isinstance(layer, str) and layer.startswith("re:") and "language_model" in layer
    return written and not _meets_text(layer.removeprefix("re:"))


def _meets_text(expression: str) -> bool:
    """Whether a regular expression meets one of the layers of WHOLE, or does not compile, which others say."""
    try:
        return any(re.match(expression, name) for name in WHOLE)
    except re.error:
        return True


def text_tensors(tensors: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Those of (name, tensor) that text needs, under the names of a model of text."""
    for name, tensor in tensors:
        if (own := text_name(name)) is not None:
            yield own, tensor


def text_adapter(tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors of an adapter in PEFT's format by the names that they have on a model of text. Exported adapters have
    the names of their whole checkpoint."""
    found = {}
    for name, one in tensors.items():
        layer = name.removeprefix(PEFT)
        own = text_name(layer) if layer != name else None
        found[name if own is None else f"{PEFT}{own}"] = one
    return found


def whole_adapter(
    tensors: Mapping[str, T], config: Mapping[str, Any], prefix: str | None
) -> tuple[dict[str, T], dict[str, Any]]:
    """An adapter of the text part as others load it on the whole checkpoint: its tensors, by the inverse of
    text_adapter, and the content of its adapter_config.json, whose targets may be whole names. A scalar head keeps its
    name.

    prefix: what names of the decoder's layers begin with on the whole checkpoint; None: it has no towers, and nothing
    changes.
    """
    if prefix is None:
        return dict(tensors), dict(config)
    layers = f"{PEFT}model."
    whole = {
        f"{PEFT}{prefix}{name.removeprefix(layers)}" if name.startswith(layers) else name: one
        for name, one in tensors.items()
    }
    own = config.get("target_modules") or ()
    targets = [f"{prefix}{one.removeprefix('model.')}" if one.startswith("model.") else one for one in own]
    return whole, {**config, "target_modules": targets, "exclude_modules": EXCLUDED}


def of_text(config: Mapping[str, Any], tensors: Mapping[str, T]) -> dict[str, T]:
    """A model's tensors by the names of a model of text. config: the content of its config.json."""
    return dict(text_tensors(tensors.items())) if other_inputs(config) else dict(tensors)
