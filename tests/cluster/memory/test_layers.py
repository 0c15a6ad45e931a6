"""Parameters of models whose layers are not alike, from config.json alone, against the classes of transformers on the
meta device: tiny ones, and the sizes of published models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.memory.shape import ALL, Shape
from examples.random_families import TINY
from tests.model_rows import EXPERTS, ROWS

HYBRID = ROWS["qwen3_next"]
DENSE_HYBRID = {key: value for key, value in HYBRID.items() if key not in EXPERTS}
SHARING = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 16,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "global_head_dim": 64, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 260,
}  # fmt: skip
WITHOUT_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
# case -> (model_type, settings beside TINY)
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, ROWS[kind]) for kind in (
        "qwen3_moe", "mixtral", "qwen3_next", "olmo_hybrid", "lfm2", "gpt_oss", "llama4_text", "gemma4_text",
        "ministral3",
    )},
    "qwen3_moe, some layers dense": ("qwen3_moe", ROWS["qwen3_moe"] | {"decoder_sparse_step": 2}),
    "qwen3_5": ("qwen3_5_text", DENSE_HYBRID),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRID),
    "llama4, experts in every other layer": (
        "llama4_text", ROWS["llama4_text"] | {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 128},
    ),
    "gemma4, sharing": ("gemma4_text", SHARING),
    "gemma4, keys are values": ("gemma4_text", SHARING | WITHOUT_VALUES | {"num_kv_shared_layers": 0}),
    "gemma4, experts": (
        "gemma4_text",
        SHARING | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    ),
    "lfm2, by indices": (
        "lfm2", {"full_attn_idxs": [1], "block_ff_dim": 200, "block_multiple_of": 32, "conv_bias": True},
    ),
}  # fmt: skip
# Sizes of models on the hub. From transformers' defaults where they are of that model: Qwen3-Next-80B-A3B,
# Qwen3.5-9B and -35B-A3B, Llama 4 Scout, Mixtral-8x7B, OLMo-Hybrid; the others as their config.json is remembered,
# which no network was there to read: gpt-oss-20b, Qwen3-30B-A3B, LFM2-1.2B, and Ministral-3 (8B) as its default.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": ("qwen3_moe", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8,
    }),
    "Qwen3-Next-80B-A3B": ("qwen3_next", {}),
    "Qwen3.5-9B": ("qwen3_5_text", {}),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", {}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "Llama-4-Scout": ("llama4_text", {}),
    "Llama 4 with 128 experts in every other layer": (
        "llama4_text", {"num_local_experts": 128, "interleave_moe_layer_step": 2},
    ),
    "Mixtral-8x7B": ("mixtral", {}),
    "LFM2-1.2B": ("lfm2", {
        "hidden_size": 2048, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_ff_dim": 12288,
    }),
    "OLMo-Hybrid-7B": ("olmo_hybrid", {}),
    "Ministral-3-8B": ("ministral3", {}),
    "Gemma 4 with per-layer embeddings": ("gemma4_text", {"num_kv_shared_layers": 10, "use_double_wide_mlp": True}),
    "Gemma 4 with experts": ("gemma4_text", {
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0,
    }),
}  # fmt: skip
# Parameters that were published with the model, in billions: all, and at work for a token. OpenAI counts 3.6 of gpt-oss
# at work, without the 0.58 of its input embedding.
BILLIONS = {
    "Qwen3-30B-A3B": (30.5, 3.3), "Qwen3-Next-80B-A3B": (80, 3.9), "gpt-oss-20b": (20.9, 4.2),
    "Llama-4-Scout": (109, 17), "Mixtral-8x7B": (46.7, 12.9), "LFM2-1.2B": (1.17, 1.17),
}  # fmt: skip


def on_meta(kind: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(the text model without weights, the content of its config.json)."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    hf: Any = transformers
    config = hf.AutoConfig.for_model(kind, **settings)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = model_class(config)
    return model, json.loads(json.dumps(config.to_dict()))


def _check(kind: str, settings: dict[str, Any], name: str) -> Shape:
    model, config = on_meta(kind, settings)
    shape = Shape.from_config(config, name)
    assert shape.params == sum(weight.numel() for weight in model.parameters())
    return shape


@pytest.mark.parametrize("name", SMALL)
def test_parameters_are_those_of_transformers(name: str) -> None:
    kind, settings = SMALL[name]
    _check(kind, TINY | settings, name)


QUICK = ("Qwen3-30B-A3B", "Qwen3.5-35B-A3B", "gpt-oss-20b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in PUBLISHED]
)
def test_parameters_of_published_sizes(name: str) -> None:
    shape = _check(*PUBLISHED[name], name)
    if name in BILLIONS:
        assert (shape.params / 1e9, shape.active_params / 1e9) == pytest.approx(BILLIONS[name], rel=0.03)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "gemma4, sharing", "qwen3_moe", "qwen3_5_moe"])
def test_an_adapter_has_the_weights_that_peft_counts(name: str) -> None:
    import peft

    from learner.model.lora import lora_targets

    kind, settings = SMALL[name]
    model, config = on_meta(kind, TINY | settings)
    chosen = peft.LoraConfig(r=4, target_modules=lora_targets(model, "all-linear"))
    count, _ = peft.get_peft_model(model, chosen).get_nb_trainable_parameters()
    assert Shape.from_config(config).lora_params(4, ALL) == count


def test_towers_are_left_out_and_published_files_may_leave_settings_out() -> None:
    text = Shape.from_config({"model_type": "qwen3_vl_text"} | TINY)
    whole = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"} | TINY, "vision_config": {"a": 1}}
    assert Shape.from_config(whole) == text
    # As google/gemma-3-4b-it has it, of which 3.88 billion weights are text.
    gemma = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
             "sliding_window": 1024}  # fmt: skip
    assert Shape.from_config({"model_type": "gemma3", "text_config": gemma}).params == pytest.approx(3.88e9, rel=0.005)
    with pytest.raises(ValueError, match="must give num_attention_heads, vocab_size as whole numbers"):
        Shape.from_config(gemma)


def test_gemma_4_is_read_as_it_is_published_and_as_transformers_writes_it() -> None:
    kind, settings = SMALL["gemma4, keys are values"]
    _, written = on_meta(kind, TINY | settings)
    assert "per_layer_config" in written
    published = {"model_type": kind} | TINY | settings
    assert Shape.from_config(published, "it").params == Shape.from_config(written, "it").params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": None}, "config.json must give linear_num_value_heads as whole numbers"),
        ({"num_experts": 0}, "config.json must give num_experts as whole numbers of at least 1"),
        ({"moe_intermediate_size": "48"}, "config.json must give moe_intermediate_size as whole numbers"),
        ({"layer_types": ["linear_attention"]}, "layer_types of config.json must name 2 layers"),
        ({"layer_types": ["mamba", "full_attention"]}, "each one of linear_attention, full_attention"),
        ({"layer_types": ["linear_attention"] * 2}, "must name a layer of attention, and names none"),
    ],
)
def test_a_config_json_without_what_its_family_needs_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = {"model_type": "qwen3_next", "linear_conv_kernel_dim": 4} | TINY | HYBRID | EXPERTS
    assert Shape.from_config(config, "mine").params > 0
    with pytest.raises(ValueError, match=f"^mine: .*{message}"):
        Shape.from_config(config | change, "mine")
