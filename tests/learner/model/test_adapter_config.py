"""model.adapter: what contradicts the settings is refused by name, by its file alone; what is left open follows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from learner.config.settings import LoraConfig
from learner.model.adapter_config import follow, read_adapter

PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none",
    "init_lora_weights": True, "lora_dropout": 0.1, "rank_pattern": {}, "modules_to_save": None, "use_dora": False,
}  # fmt: skip


def written(folder: Path, **changes: Any) -> str:
    (folder / "adapter_config.json").write_text(json.dumps(changes | PLAIN | changes))
    (folder / "adapter_model.safetensors").touch()
    return str(folder)


def test_what_is_left_open_follows_the_adapter(tmp_path: Path) -> None:
    folder = written(tmp_path, target_modules=["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"])
    assert follow(LoraConfig(), folder) == LoraConfig(rank=8, alpha=16, targets=["q_proj"])
    assert follow(LoraConfig(rank=8), folder) == LoraConfig(rank=8, alpha=16, targets=["q_proj"])
    assert follow(LoraConfig(targets="all-linear"), folder).targets == "all-linear"  # compared once the model is there


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"rank": 16},
            "model.adapter: r of .* must be 16 as learner.lora.rank says, got 8; leave",
        ),
        ({"alpha": 32}, "model.adapter: lora_alpha of .* must be 32.0 as learner.lora.alpha says, got 16; leave"),
        ({"targets": ["q_proj"]}, r"target_modules of .* must be \['q_proj'\] as .* got \['q_proj', 'v_proj'\]; leave"),
    ],
)
def test_what_is_set_must_be_the_adapters(tmp_path: Path, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        follow(LoraConfig(**lora), written(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type of FILE must be 'LORA', got 'IA3': vLLM serves no other kind of adapter; "),
        (
            {"num_attention_heads": 4, "num_virtual_tokens": 8, "peft_type": "PREFIX_TUNING"},
            "peft_type of FILE must be 'LORA', got 'PREFIX_TUNING': vLLM serves no other",
        ),
        ({"bias": "all"}, "bias of FILE must be 'none', got 'all'"),
        ({"lora_bias": True}, "lora_bias of FILE must not be set, got True"),
        (
            {"use_dora": True},
            "use_dora of FILE must not be set, got True: vLLM does not serve DoRA; merge this one into",
        ),
        ({"init_lora_weights": "pissa"}, "init_lora_weights of FILE must not be set, got 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights of FILE must not be set, got 'olora'"),
        (
            {"modules_to_save": ["lm_head"]},
            "modules_to_save of FILE must not be set, got ['lm_head']: vLLM serves no whole layers",
        ),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern of FILE must not be set, got {'q_proj': 4}"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters of FILE must not be set"),
        ({"a_form_of_next_year": {"x": 1}}, "a_form_of_next_year of FILE must not be set, got {'x': 1}"),
        ({"target_modules": ".*_proj"}, "target_modules of FILE must be a list of layers, got '.*_proj'"),
    ],
)
def test_an_adapter_that_is_no_plain_one_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = written(tmp_path, **change)
    message = f"model.adapter: {words}".replace("FILE", f"{tmp_path}/adapter_config.json")
    with pytest.raises(WrongInput, match=re.escape(message)) as refused:
        read_adapter(folder, "model.adapter")
    assert "\n" not in str(refused.value)


def test_ranks_that_there_are_not_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"r of .* must be one of 1, 2, 4, 8, 16, .*, got 3"):
        follow(LoraConfig(), written(tmp_path, r=3))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(WrongInput, match=r"must hold adapter_model.safetensors, and does not"):
        read_adapter(str(tmp_path), "model.adapter")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(WrongInput, match="must be JSON"):
        read_adapter(str(tmp_path), "model.adapter")
    with pytest.raises(WrongInput, match=r"model.reference: must be a folder with an adapter_config.json, got /nope"):
        read_adapter("/nope", "model.reference")


def test_rslora_is_carried(tmp_path: Path) -> None:
    assert read_adapter(written(tmp_path, use_rslora=True), "model.adapter")["use_rslora"]


def test_the_defaults_of_peft_are_plain(tmp_path: Path) -> None:
    import peft

    from learner.model.lora import as_json

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM")
    (tmp_path / "adapter_config.json").write_text(json.dumps(as_json(config)))
    (tmp_path / "adapter_model.safetensors").touch()
    assert follow(LoraConfig(), str(tmp_path)).targets == ["q_proj"]
