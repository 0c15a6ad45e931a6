"""The table of shapes against the classes of transformers, on the meta device: no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.memory.shape import LINEAR, SHAPES, Shape, hub_name, shape_of

# What the hub shows beside the safetensors of each model.
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen3-8B": 8_190_735_360,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Gemma-2-2B": 2_614_341_888,
    "SmolLM2-135M": 134_515_008,
}


def on_meta(shape: Shape) -> Any:
    import torch
    import transformers

    settings = shape.to_config()
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_transformers(name: str) -> None:
    from torch import nn

    shape = SHAPES[name]
    model = on_meta(shape)
    assert shape.params == sum(weight.numel() for weight in model.parameters())
    linear = [m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    assert shape.linear_params == sum(linear)
    assert shape.params == PUBLISHED.get(name, shape.params)


def test_lora_parameters_are_those_of_peft() -> None:
    import peft

    shape = SHAPES["Qwen3-0.6B"]
    for targets in (tuple(LINEAR), ("q_proj", "down_proj")):
        settings = peft.LoraConfig(r=16, target_modules=list(targets))
        count, _ = peft.get_peft_model(on_meta(shape), settings).get_nb_trainable_parameters()
        assert shape.lora_params(16, targets) == count


def test_a_config_json_gives_the_shape_back(tmp_path: Path) -> None:
    for shape in SHAPES.values():
        assert Shape.from_config(shape.to_config(), shape.name) == shape
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["Qwen3-4B"].to_config()))
    assert shape_of(str(tmp_path)).params == SHAPES["Qwen3-4B"].params
    assert shape_of("meta-llama/Llama-3.2-1B-Instruct") is SHAPES["Llama-3.2-1B"]
    assert shape_of("mistralai/Mistral-7B-Instruct-v0.3") is SHAPES["Mistral-7B-v0.3"]
    assert shape_of("Qwen/Qwen3-4B-Instruct-2507") is SHAPES["Qwen3-4B"]
    assert shape_of("Qwen/Qwen3.5-4B") is SHAPES["Qwen3.5-4B"]
    for name, there in {
        "Gemma-3-1B": "google/gemma-3-1b-it", "Qwen2.5-1.5B": "Qwen/Qwen2.5-1.5B-Instruct", "Qwen3-4B": "Qwen/Qwen3-4B",
        "Llama-3.1-8B": "meta-llama/Llama-3.1-8B-Instruct", "Mistral-7B-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
        "SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M-Instruct",
    }.items():  # fmt: skip
        assert hub_name(name, SHAPES[name]) == there
    assert hub_name("Qwen2.5-7B-Instruct", SHAPES["Qwen2.5-7B"]) == "Qwen/Qwen2.5-7B-Instruct"
    assert hub_name("someone/Qwen3-4B", SHAPES["Qwen3-4B"]) == "someone/Qwen3-4B"
    assert hub_name(str(tmp_path), SHAPES["Qwen3-4B"]) == str(tmp_path)
    with pytest.raises(ValueError, match="not in the table"):
        shape_of("Qwen/Qwen9")
    with pytest.raises(ValueError, match="'bloom' is not known; known: llama"):
        Shape.from_config({"model_type": "bloom"})
