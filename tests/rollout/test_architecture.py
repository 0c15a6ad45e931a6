"""Which models are refused, by their config.json alone, and with which sentence."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import WrongInput
from rollout.architecture import (
    NO_FLOAT16,
    check_architecture,
    check_length,
    check_on_cpu,
    check_shards,
    check_type,
    has_experts,
)

LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
PHI: dict[str, Any] = {"model_type": "phi3", "original_max_position_embeddings": 4096}
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize("lora", [True, False])
def test_a_language_model_of_text_is_taken(lora: bool) -> None:
    check_architecture(LLAMA, "m", lora=lora)
    check_architecture({"model_type": "llama"}, "m", lora=lora)  # a file that names no class


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama4", "vision_config": {"x": 1}, "text_config": {"num_local_experts": 16}},
         "(model_type llama4) takes vision beside text and names no text part"),
        ({"model_type": "qwen2_audio", "audio_config": {"x": 1}}, "(model_type qwen2_audio) takes audio beside text"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "(model_type t5) is an encoder and a decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "(model_type bert) is a BertForMaskedLM"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "(model_type gpt2) are Conv1D"),
    ],
)  # fmt: skip
def test_others_are_refused_with_a_sentence(config: dict[str, Any], words: str) -> None:
    with pytest.raises(WrongInput) as refused:
        check_architecture(config, "some/model", lora=True)
    text = str(refused.value)
    assert text.startswith("model.path: ")
    assert "some/model" in text
    assert words in text
    assert "docs/models.md" in text


def test_experts_are_trained_with_lora_only() -> None:
    mixtral = {"model_type": "mixtral", "num_local_experts": 8}
    assert has_experts(mixtral)
    assert has_experts({"text_config": {"num_experts": 4}})
    assert not has_experts({"model_type": "granitemoehybrid", "num_local_experts": 0})
    check_architecture(mixtral, "m", lora=True)
    with pytest.raises(WrongInput, match="learner.mode: full is not for models with experts .* set learner"):
        check_architecture(mixtral, "m", lora=False)


@pytest.mark.parametrize("config", [PHI | {"rope_parameters": LONG}, PHI | {"rope_scaling": {"type": "su"}}])
def test_longrope_is_refused_beyond_the_length_at_which_its_factors_change(config: dict[str, Any]) -> None:
    check_length(config, "m", 4096)
    with pytest.raises(WrongInput, match=r"must be at most 4096 for m, whose longrope .* got 4097; lower one"):
        check_length(config, "m", 4097)


def test_other_positions_have_no_such_length() -> None:
    check_length(PHI, "m", 10**6)
    check_length(PHI | {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 8}}, "m", 10**6)


@pytest.mark.parametrize(("lora", "why"), [(True, "without LoRA"), (False, "holds transposed")])
def test_layers_that_are_no_linear_ones_are_refused_in_both_modes(lora: bool, why: str) -> None:
    with pytest.raises(WrongInput, match=f"gpt2\\) are Conv1D, .*{why}.*; give another"):
        check_architecture({"model_type": "gpt2"}, "m", lora=lora)


def test_a_model_is_spread_evenly_or_refused() -> None:
    model = LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}
    for shards in (1, 2, 4):
        check_shards(model, "m", shards)
    with pytest.raises(WrongInput, match="of 3 processes .* and m has 4 key and value heads; take a number"):
        check_shards(model, "m", 3)
    with pytest.raises(WrongInput, match="has 12 attention heads, 4 key and value heads;"):
        check_shards(model, "m", 8)
    three = model | {"num_key_value_heads": 3}
    check_shards(three | {"vocab_size": 129}, "m", 3)  # padded to 192
    with pytest.raises(WrongInput, match="m has 320 rows of embeddings, as vLLM pads them;"):
        check_shards(three | {"vocab_size": 300}, "m", 3)


def test_what_vllm_does_not_compute_in_float16() -> None:
    """vLLM's own table, so that a start says it before its generators do."""
    from vllm.config import model

    assert {*NO_FLOAT16} == {*model._FLOAT16_NOT_SUPPORTED_MODELS}
    check_type({"model_type": "gemma2"}, "m", "bfloat16")
    check_type(LLAMA, "m", "float16")
    with pytest.raises(WrongInput, match="model.dtype: must be bfloat16 or float32 for m .model_type gemma2."):
        check_type({"model_type": "gemma2"}, "m", "float16")


@pytest.mark.parametrize("setting", ["mamba_d_state", "conv_L_cache", "linear_conv_kernel_dim", "ssm_state_size"])
def test_layers_with_a_state_are_refused_on_a_cpu(setting: str) -> None:
    check_on_cpu(LLAMA, "m")
    check_on_cpu({"model_type": "nemotron_h", setting: 3}, "m")
    check_on_cpu({"model_type": "granitemoehybrid", setting: 3, "layer_types": ["attention"] * 2}, "m")
    with pytest.raises(WrongInput, match="carry a state"):
        check_on_cpu({"model_type": "x", setting: 3, "layer_types": ["linear_attention", "full_attention"]}, "m")
    for config in ({**LLAMA, setting: 3}, {"model_type": "x", "text_config": {setting: 3}}):
        with pytest.raises(WrongInput, match=r"model.path: m \(model_type .*\) has layers that carry a state along"):
            check_on_cpu(config, "m")
