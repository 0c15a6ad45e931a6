"""Names and configuration of the text part of a checkpoint with towers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from cluster.errors import WrongInput
from examples.random_towers import CHECKPOINTS, TEXT
from rollout.text_part import of_text, text_adapter, text_name, text_part, whole_adapter

LAYER = "layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (f"language_model.model.{LAYER}", f"model.{LAYER}"),  # Gemma 3, Mistral 3, Llama 4
        (f"model.language_model.{LAYER}", f"model.{LAYER}"),  # Gemma 4, Qwen3-VL, Qwen3.5
        (f"model.{LAYER}", f"model.{LAYER}"),  # Qwen2.5-VL
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", None),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("mtp.fc.weight", None),
        ("image_newline", "image_newline"),  # nobody has said that text does not need it
    ],
)
def test_a_tensor_has_the_name_that_a_model_of_text_has(stored: str, wanted: str | None) -> None:
    assert text_name(stored) == wanted
    assert wanted is None or text_name(wanted) == wanted


def test_only_a_checkpoint_with_towers_is_renamed() -> None:
    tensors = {f"language_model.model.{LAYER}": 1, "vision_tower.x.weight": 2}
    assert of_text({"vision_config": {"depth": 2}}, tensors) == {f"model.{LAYER}": 1}
    assert of_text({"model_type": "llama"}, tensors) == tensors


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_goes_to_the_whole_checkpoint_and_back(prefix: str) -> None:
    own = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight": torch.ones(1) for half in "AB"}
    head = {"base_model.model.score.weight": torch.zeros(1)}
    targets = ["model.layers.0.self_attn.q_proj", "up_proj"]
    whole, config = whole_adapter(own | head, {"r": 8, "target_modules": targets}, prefix)
    assert [name.startswith(f"base_model.model.{prefix}layers.0.") for name in whole] == [True, True, False]
    assert text_adapter(whole) == own | head == text_adapter(own | head)
    excluded = re.compile(config.pop("exclude_modules"))  # what PEFT would adapt of towers
    assert excluded.fullmatch("model.visual.blocks.0.mlp.up_proj")
    assert not excluded.fullmatch("model.language_model.layers.0.mlp.up_proj")
    assert config == {"r": 8, "target_modules": [f"{prefix}layers.0.self_attn.q_proj", "up_proj"]}
    assert whole_adapter(own, {"r": 8}, None) == (own, {"r": 8})


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_text_part_names_a_class_of_its_own(name: str) -> None:
    kind, text, others = CHECKPOINTS[name]
    part = text_part(AutoConfig.for_model(kind, text_config={**TEXT, **text}, **others))
    assert part.architectures[0].endswith("ForCausalLM")
    assert part.vocab_size == TEXT["vocab_size"]
    assert part.tie_word_embeddings == text.get(
        "tie_word_embeddings", others.get("tie_word_embeddings", part.tie_word_embeddings)
    )
    assert text_part(part) is part


@pytest.mark.parametrize("inside", [True, False])
def test_layers_that_are_not_quantised_have_the_names_of_text(inside: bool) -> None:
    kind, text, others = CHECKPOINTS["gemma3"]
    told = {"quant_method": "awq", "modules_to_not_convert": ["vision_tower", f"language_model.model.{LAYER[:-7]}"]}
    where: dict[str, Any] = {"quantization_config": told}
    config = AutoConfig.for_model(
        kind, text_config={**TEXT, **text, **(where if inside else {})}, **others, **({} if inside else where)
    )
    part = text_part(config)
    assert part.quantization_config["modules_to_not_convert"] == ["vision_tower", f"model.{LAYER[:-7]}"]


def test_the_scale_of_queries_beyond_the_original_length_is_told_vllm() -> None:
    """vLLM's Mistral reads llama_4_scaling; without it logprobs beyond the original length are 0.09 nats off."""
    kind, text, others = CHECKPOINTS["ministral3"]
    part = text_part(AutoConfig.for_model(kind, text_config={**TEXT, **text}, **others))
    assert part.llama_4_scaling == {"original_max_position_embeddings": 128, "beta": 0.1}


def test_a_text_part_without_a_class_is_refused() -> None:
    config: Any = AutoConfig.for_model("blip-2")
    config.text_config.model_type = "no_such_text"
    with pytest.raises(WrongInput, match=r"model.path: the text part of blip-2 \(no_such_text\) must be a causal"):
        text_part(config)
