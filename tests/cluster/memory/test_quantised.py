"""Bytes of quantised checkpoints, by hand, and the quantization_config from which they are read."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.memory.quantised import FORMATS, stored_as
from cluster.memory.shape import SHAPES, SPARSE, Shape, base_bytes

LLAMA = SHAPES["Llama-3.1-8B"]  # 6,979,321,856 weights in matrices of layers, 1,050,939,392 others
MATRICES, OTHERS = 6_979_321_856, 1_050_939_392
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "group_size": 128, "symmetric": True,
    }}},
}  # fmt: skip


def with_quantisation(config: dict[str, Any]) -> Shape:
    return Shape.from_config(LLAMA.to_config() | {"quantization_config": config}, "quantised")


@pytest.mark.parametrize(
    ("config", "name", "eighths"),
    [
        (PACKED, "W4A16", 33),  # of half a byte and a 16-bit scale for 128: 4.125 bits
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ of 4 bits", 33.25),  # and a zero point of 4 bits
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "AWQ of 4 bits", 34.5),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8", 64),
    ],
)
def test_bytes_by_hand(config: dict[str, Any], name: str, eighths: float) -> None:
    """eighths: of a bit, for each weight of the layers' matrices. Embeddings, head and norms stay in 16 bits."""
    shape = with_quantisation(config)
    assert shape.stored is not None
    assert shape.stored.name == name
    assert base_bytes(shape, "none", 2) == pytest.approx(MATRICES * eighths / 64 + 2 * OTHERS, abs=8)
    assert shape.params == LLAMA.params


def test_the_formats_that_are_compared() -> None:
    assert base_bytes(LLAMA, "w4a16", 2) == base_bytes(with_quantisation(PACKED), "none", 2)
    assert base_bytes(LLAMA, "fp8", 2) == MATRICES + 2 * OTHERS
    assert FORMATS["mxfp4"].bytes(32) == 17


def test_mxfp4_holds_experts_alone() -> None:
    """gpt-oss-20b: 24 layers of 32 experts with three matrices of 2880 x 2880."""
    experts = 24 * 32 * 3 * 2880 * 2880
    shape = SPARSE["gpt-oss-20b"]
    assert shape.expert_params == experts
    assert base_bytes(shape, "none", 2) == experts * 17 // 32 + 2 * (shape.params - experts)


def test_modules_that_are_not_quantised() -> None:
    queries = 32 * 4096 * 4096
    for ignore in (["re:.*self_attn.q_proj"], ["model.layers.5.self_attn.q_proj"], ["q_proj", "lm_head"]):
        found = base_bytes(with_quantisation(PACKED | {"ignore": ignore}), "none", 2)
        assert found == base_bytes(LLAMA, "w4a16", 2) + 2 * queries - FORMATS["w4a16"].bytes(queries)
    fp8 = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "ignored_layers": ["model.layers.0.self_attn.q_proj"],
    }
    assert base_bytes(with_quantisation(fp8), "none", 2) == base_bytes(LLAMA, "fp8", 2) + queries
    whole = with_quantisation(PACKED | {"ignore": ["re:.*language_model.*q_proj", "re:^(?!.*language_model).*"]})
    assert base_bytes(whole, "none", 2) == base_bytes(LLAMA, "w4a16", 2) + 2 * queries - FORMATS["w4a16"].bytes(queries)
    tower = with_quantisation(PACKED | {"ignore": ["vision_tower.encoder.layers.0.self_attn.q_proj"]})
    assert base_bytes(tower, "none", 2) == base_bytes(LLAMA, "w4a16", 2)
    gate = with_quantisation(PACKED | {"ignore": ["model.layers.0.mlp.gate"]})  # a router, not gate_proj
    assert base_bytes(gate, "none", 2) == base_bytes(LLAMA, "w4a16", 2)


def test_a_quantised_base_stays_as_it_is_stored() -> None:
    shape = with_quantisation(PACKED)
    assert base_bytes(shape, "none", 2) < base_bytes(LLAMA, "nf4", 2) < base_bytes(LLAMA, "fp8", 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "must be a mapping, got str"),
        ({"quant_method": "hqq"}, "quant_method whose bytes are known .* got 'hqq'"),
        ({"quant_method": "gptq", "group_size": 128}, "must give bits"),
        ({"quant_method": "compressed-tensors"}, "config_groups whose weights are all of one num_bits and type"),
        (PACKED | {"ignore": ["re:("]}, "ignore of quantization_config must hold regular expressions, got 're:\\('"),
        (
            PACKED
            | {"config_groups": PACKED["config_groups"] | {"group_1": {"weights": {"num_bits": 8, "type": "int"}}}},
            "all of one num_bits and type",
        ),
    ],
)
def test_what_is_not_known_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stored_as(config)
