"""Which quantised checkpoints are refused, by config.json and by their files, each in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.errors import WrongInput
from examples.quantised_checkpoints import GROUPED, KINDS, make_gpt_oss, make_quantised
from rollout.data.weight_names import check_fit, check_model
from rollout.quantised import NOT_WITH, Format, check_base, check_kernel, format_of

LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
W4A16, GPTQ, AWQ, CHANNEL, BLOCK = (KINDS[kind][1] for kind in ("w4a16", "gptq", "awq", "fp8_channel", "fp8_block"))


def grouped(weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    """W4A16 with other settings of its only group."""
    group = W4A16["config_groups"]["group_0"]
    return W4A16 | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights} | others}}


def test_formats_are_told_by_config_alone() -> None:
    found = {kind: format_of(LLAMA | {"quantization_config": told}, "m") for kind, (_, told) in KINDS.items()}
    assert {kind: (one.name, one.block, one.zeros) for kind, one in found.items() if one} == {
        "w4a16": ("W4A16", (1, 32), False),
        "w4a16_zeros": ("W4A16", (1, 32), True),
        "gptq": ("GPTQ", (1, 32), False),
        "awq": ("AWQ", (1, 32), True),
        "fp8_channel": ("FP8", (1, 0), False),
        "fp8_block": ("FP8", (128, 128), False),
    }
    assert format_of(LLAMA, "m") is None


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"\(bitsandbytes\) are of a kind that is not read"),
        ("awq", r"\(awq\) are of a kind"),
        (W4A16 | {"config_groups": {"a": {}, "b": {}}}, "are of 2 different kinds for different layers"),
        (W4A16 | {"config_groups": {}}, "have no kind"),
        (W4A16 | {"format": "nvfp4-pack-quantized"}, "have the format nvfp4-pack-quantized, which is not read"),
        (W4A16 | {"transform_config": {"R1": {}}}, r"have a transform or sparsity \(transform_config\)"),
        (W4A16 | {"kv_cache_scheme": {"num_bits": 8}}, r"\(kv_cache_scheme\)"),
        (grouped({}, targets=["re:.*q_proj"]), r"are for the layers \['re:.\*q_proj'\], where Linear is read"),
        (grouped({"num_bits": 8}), "have numbers of 8 bits, int, by group"),
        (grouped({"strategy": "tensor"}), "by tensor, where pack-quantized is read with 4 bits"),
        (grouped({"actorder": "group"}), r"have reordered columns \(actorder\)"),
        (grouped({}, input_activations={"num_bits": 8, "dynamic": True}), "go with activations of few bits"),
        (grouped({"group_size": 7}), "must have groups of a multiple of 8 inputs, and have 7"),
        (GPTQ | {"desc_act": True}, r"have reordered columns \(desc_act, act-order\)"),
        (GPTQ | {"sym": False}, "have zero points of their own"),
        (GPTQ | {"bits": 8}, "have numbers of 8 bits, where 4 are read"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, r"are of different kinds for different layers \(dynamic\)"),
        (GPTQ | {"checkpoint_format": "marlin"}, "have the format marlin"),
        (GPTQ | {"lm_head": True}, "include the output embedding"),
        (AWQ | {"zero_point": False}, "have no zero points"),
        (AWQ | {"version": "gemv"}, "have the layout gemv"),
        (BLOCK | {"weight_block_size": None}, "have one scale for a whole layer"),
        (BLOCK | {"activation_scheme": "static"}, "go with activations whose scales are in the files"),
        (BLOCK | {"weight_block_size": [128]}, "must have blocks of two numbers"),
        ({"quant_method": "mxfp4"}, "are not of gpt-oss"),
        (W4A16 | {"config_groups": {"a": None}}, "are for the layers None"),
        (W4A16 | {"ignore": "lm_head"}, "must have lists of names of layers, and have 'lm_head'"),
        (W4A16 | {"ignore": ["re:("]}, "must have regular expressions that compile"),
    ],
)
def test_other_kinds_are_refused(told: Any, message: str) -> None:
    with pytest.raises(
        WrongInput, match=f"model.path: the quantised weights of m .*{message}.*; give the 16-bit"
    ) as one:
        format_of(LLAMA | {"quantization_config": told}, "m")
    assert "\n" not in str(one.value)


def test_experts_are_read_in_mxfp4_alone() -> None:
    mixtral = {"model_type": "mixtral", "num_local_experts": 8, "quantization_config": GPTQ}
    with pytest.raises(WrongInput, match="are experts', which are read in MXFP4 alone"):
        format_of(mixtral, "m")
    with pytest.raises(WrongInput, match="are not of gpt-oss, whose layout alone is known"):
        format_of(mixtral | {"quantization_config": {"quant_method": "mxfp4"}}, "m")


@pytest.mark.parametrize(
    ("settings", "layer", "covered"),
    [
        (W4A16, "lm_head", False),
        (W4A16, "model.layers.0.mlp.up_proj", True),
        (W4A16 | {"ignore": ["re:.*mlp.*"]}, "model.layers.0.mlp.up_proj", False),
        (W4A16 | {"ignore": ["mlp.up_proj"]}, "model.layers.0.mlp.up_proj", True),
        (AWQ | {"modules_to_not_convert": ["mlp"]}, "model.layers.0.mlp.up_proj", False),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "model.layers.0.mlp.up_proj", False),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "model.layers.0.self_attn.q_proj", True),
    ],
)
def test_layers_that_stay_as_they_are_are_named(settings: dict[str, Any], layer: str, covered: bool) -> None:
    found = format_of(LLAMA | {"quantization_config": settings}, "m")
    assert found is not None
    assert found.covers(layer) is covered


TOWERS = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {"depth": 2}}


@pytest.mark.parametrize("kept", [f"{prefix}layers.0.mlp.up_proj" for prefix in ("language_model.model.", "model.")])
def test_layers_of_a_text_part_are_named_as_in_the_whole_checkpoint(kept: str) -> None:
    ignore = [kept, "vision_tower.encoder.layers.0.mlp.down_proj", "language_model.lm_head", "re:.*vision_tower.*"]
    found = format_of(TOWERS | {"quantization_config": W4A16 | {"ignore": ignore}}, "m")
    assert found is not None
    names = ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
    assert [found.covers(name) for name in names] == [False, False, True]
    with pytest.raises(WrongInput, match=r"by the regular expression 're:language_model.\*up_proj', which is for the"):
        format_of(TOWERS | {"quantization_config": W4A16 | {"ignore": ["re:language_model.*up_proj"]}}, "m")


@pytest.mark.parametrize(
    "settings",
    [
        W4A16 | {"ignore": ["re:.*language_model\\.lm_head", "re:^(?!.*language_model).*", "re:.*vision.*"]},
        GPTQ | {"dynamic": {"-:.*visual.*": {}, "-:.*mtp.*": {}}},
        GPTQ | {"modules_in_block_to_quantize": [["model.language_model.layers.0.mlp.up_proj"]]},
    ],
)
def test_what_leaves_out_towers_alone_is_passed_over(settings: dict[str, Any]) -> None:
    told = {"quantization_config": settings}
    for config in (TOWERS | told, TOWERS | {"text_config": {"model_type": "gemma3_text"} | told}):
        found = format_of(config, "m")
        assert found is not None
        assert found.covers("model.layers.0.mlp.up_proj")
    with pytest.raises(WrongInput, match="different kinds for different layers"):
        format_of(TOWERS | {"quantization_config": GPTQ | {"dynamic": {"-:.*mlp.*": {}}}}, "m")


Change = Callable[[dict[str, Tensor]], object]
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("w4a16", lambda t: t.pop(f"{Q}.weight_scale"), f"1 tensor of .* are missing, first {Q}.weight_scale"),
        (
            "w4a16",
            lambda t: t.update({f"{Q}.weight_shape": torch.tensor([128, 256])}),
            "must hold the numbers .128, 128.",
        ),
        ("w4a16", lambda t: t.update({f"{Q}.weight_scale": torch.ones(128, 8)}), "of the shape .128, 4., first"),
        ("w4a16", lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(128)}), f"no place for: {Q}.weight_g_idx"),
        ("gptq", lambda t: t[f"{Q}.g_idx"].copy_(t[f"{Q}.g_idx"].flip(0)), r"have reordered columns \(act-order\)"),
        ("gptq", lambda t: t[f"{Q}.qzeros"].zero_(), "must hold 0x77777777 alone"),
        (
            "gptq",
            lambda t: t.update({f"{Q}.qweight": torch.zeros(17, 128, dtype=torch.int32)}),
            "groups of 32 do not divide",
        ),
        ("awq", lambda t: t.update({f"{Q}.qweight": torch.zeros(128, 16)}), "must be I32 of the shape"),
        ("awq", lambda t: [t.pop(name) for name in [*t] if name.startswith(Q)], f"lacks 1 tensor .*{Q}.weight"),
        ("fp8_block", lambda t: t[f"{Q}.weight"].view(torch.uint8).fill_(0x7F), f"not finite .*{Q}.weight"),
        ("fp8_channel", lambda t: t.update({f"{Q}.input_scale": torch.ones(1)}), f"no place for: {Q}.input_scale"),
    ],
)
def test_files_that_are_not_of_the_format_are_refused(tmp_path: Path, kind: str, change: Change, message: str) -> None:
    make_quantised(tmp_path, kind, layers=1)
    check_model(str(tmp_path))
    assert check_fit(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WrongInput, match=message):
        check_model(str(tmp_path))


def test_a_family_that_transformers_is_asked_about_is_checked_too(tmp_path: Path) -> None:
    make_gpt_oss(tmp_path)
    assert check_fit(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WrongInput, match="hold exponents that are not numbers .*down_proj_scales"):
        check_fit(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "dtype", "cuda", "message"),
    [
        ("FP8", "bfloat16", False, "weights in FP8, and vLLM rounds activations to 8 bits for it on a CPU"),
        ("MXFP4", "bfloat16", False, "has no kernel for it on a CPU; give the generator a card"),
        ("GPTQ", "float32", False, "model.dtype: must be bfloat16 for m"),
        ("AWQ", "float32", True, "must be bfloat16 or float16 for m"),
    ],
)
def test_where_sampler_and_learner_would_differ_it_is_refused(name: str, dtype: str, cuda: bool, message: str) -> None:
    check_kernel(Format(name, (1, 32), "scales"), "m", "bfloat16", cuda=True)
    with pytest.raises(WrongInput, match=message):
        check_kernel(Format(name, (1, 32), "scales"), "m", dtype, cuda=cuda)


@pytest.mark.parametrize("setting", NOT_WITH)
def test_settings_that_do_not_go_with_it_are_named(setting: str) -> None:
    found = Format("GPTQ", (1, 32), "scales")
    check_base(found, "m", dict.fromkeys(NOT_WITH, False))
    with pytest.raises(WrongInput, match=f"{setting} is not for a quantised checkpoint, which m is .GPTQ.: "):
        check_base(found, "m", {setting: True})


def test_zero_points_of_compressed_tensors_are_packed_along_the_outputs() -> None:
    told = LLAMA | {"quantization_config": grouped(GROUPED | {"symmetric": False})}
    found = format_of(told, "m")
    assert found is not None
    assert found.tensors(64, 96)["weight_zero_point"] == (("I32",), (8, 3))
