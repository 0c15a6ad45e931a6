"""Quantised checkpoints of tiny random models, written by hand in the layout of the tools that make them, with the
weights that the format's definition gives, worked out in numpy from the numbers before they are packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file, save_file

from examples.random_model import make_tiny_model, make_tokenizer
from examples.random_towers import make_checkpoint
from rollout.text_part import text_name

GROUP = 32
Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]


def pack(numbers: Array, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[..., n] numbers of 4 bits -> [..., n / 8] int32; the number at place k of eight gets the bits 4 order[k]."""
    eights = numbers.astype(np.uint32).reshape(*numbers.shape[:-1], -1, 8)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for k, place in enumerate(order):
        words |= eights[..., k] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32).copy())


def _groups(weight: Array, *, zeros: bool) -> tuple[Array, Array, Array]:
    """(numbers 0..15 [out, in], scales [out, groups], zero points [out, groups]) of round-to-nearest by groups."""
    grouped = weight.reshape(len(weight), -1, GROUP)
    if zeros:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = ((high - low) / 15).astype(np.float16).astype(np.float32)
        middle = np.round(-low / scales)
    else:
        scales = (np.abs(grouped).max(-1) / 7).astype(np.float16).astype(np.float32)
        middle = np.full(scales.shape, 8.0)
    numbers = np.clip(np.round(grouped / scales[..., None]) + middle[..., None], 0, 15)
    return numbers.reshape(weight.shape), scales, middle


def _defined(numbers: Array, scales: Array, middle: Array) -> Array:
    """(q - z) s in float64."""
    grouped = numbers.reshape(len(numbers), -1, GROUP).astype(np.float64)
    return ((grouped - middle[..., None]) * scales.astype(np.float64)[..., None]).reshape(numbers.shape)


def _bfloat16(scales: Array) -> tuple[Array, torch.Tensor]:
    rounded = torch.from_numpy(scales).bfloat16()
    return rounded.float().numpy(), rounded


def w4a16(weight: Array, *, zeros: bool = False) -> tuple[Tensors, Array]:
    """compressed-tensors' pack-quantized layout, with scales in bfloat16."""
    numbers, scales, middle = _groups(weight, zeros=zeros)
    known, scale = _bfloat16(scales)
    tensors = {
        "weight_packed": pack(numbers),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = pack(middle.T).T.contiguous()
    return tensors, _defined(numbers, known, middle)


def gptq(weight: Array) -> tuple[Tensors, Array]:
    """AutoGPTQ's layout: words down the inputs, scales in float16, zero points less one."""
    numbers, scales, middle = _groups(weight, zeros=False)
    inputs = weight.shape[1]
    return {
        "qweight": pack(numbers).T.contiguous(),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "qzeros": pack(middle.T - 1),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }, _defined(numbers, scales, middle)


def awq(weight: Array) -> tuple[Tensors, Array]:
    """AutoAWQ's gemm layout: words along the outputs, in the order 0 2 4 6 1 3 5 7 of their places."""
    numbers, scales, middle = _groups(weight, zeros=True)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    return {
        "qweight": pack(numbers.T, order),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "qzeros": pack(middle.T, order),
    }, _defined(numbers, scales, middle)


def e4m3(code: int) -> float:
    """The value of a byte of float8_e4m3fn (2209.05433, table 1)."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    value = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def _fp8(weight: Array, scales: Array, wide: Array) -> tuple[torch.Tensor, Array]:
    codes = torch.from_numpy((weight / wide).astype(np.float32)).to(torch.float8_e4m3fn)
    values = np.array([e4m3(code) for code in range(256)])[codes.view(torch.uint8).numpy()]
    return codes, (values.astype(np.float32) * wide).astype(np.float32)


def fp8_channel(weight: Array) -> tuple[Tensors, Array]:
    """compressed-tensors' float-quantized layout: a scale for each output."""
    scales = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
    codes, values = _fp8(weight, scales, np.broadcast_to(scales, weight.shape))
    return {"weight": codes, "weight_scale": torch.from_numpy(scales)}, values


def fp8_block(weight: Array, size: int = 128) -> tuple[Tensors, Array]:
    """DeepSeek's layout: a scale for each block of 128 by 128; those at the edge may be smaller."""
    rows, columns = (-(-n // size) for n in weight.shape)
    scales = np.zeros((rows, columns), np.float32)
    wide = np.zeros(weight.shape, np.float32)
    for i in range(rows):
        for j in range(columns):
            part = np.s_[i * size : (i + 1) * size, j * size : (j + 1) * size]
            scales[i, j] = wide[part] = np.abs(weight[part]).max() / 448
    codes, values = _fp8(weight, scales, wide)
    return {"weight": codes, "weight_scale_inv": torch.from_numpy(scales)}, values


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights | {"dynamic": False, "symmetric": weights.get("symmetric", True)},
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group | {"input_activations": None}},
    }  # fmt: skip


GROUPED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
KINDS: dict[str, tuple[Callable[[Array], tuple[Tensors, Array]], dict[str, Any]]] = {
    "w4a16": (w4a16, _compressed("pack-quantized", **GROUPED)),
    "w4a16_zeros": (partial(w4a16, zeros=True), _compressed("pack-quantized", **GROUPED, symmetric=False)),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
                    "lm_head": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
                  "modules_to_not_convert": None}),
    "fp8_channel": (fp8_channel, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "fp8_block": (fp8_block, {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                              "weight_block_size": [128, 128]}),
}  # fmt: skip


def make_quantised(path: Path, kind: str, *, towers: str | None = None, **options: Any) -> dict[str, Array]:
    """Writes a tiny random model in a quantised format under path; returns the weights of its quantised layers by the
    format's definition, by the names of a model of text. towers: a checkpoint of examples.random_towers, of whose text
    part the layers are quantised, all but one where the format can say so; None: a Llama, with options of
    make_tiny_model."""
    given: dict[str, Any] = {"family": "Llama", "hidden_size": 128, "heads": 2, "kv_heads": 1, "tied": False}
    if towers is None:
        make_tiny_model(path, **given | options)
    else:
        make_checkpoint(path, towers)
    quantise, told = KINDS[kind]
    tensors, defined = dict[str, torch.Tensor](), dict[str, Array]()
    for name, weight in load_file(path / "model.safetensors").items():
        left_out = towers is not None and kind != "gptq" and "layers.0.mlp.down_proj" in name
        if left_out or not name.endswith("_proj.weight") or (own := text_name(name)) is None:
            tensors[name] = weight.bfloat16()
            continue
        parts, defined[own] = quantise(weight.numpy())
        tensors |= {f"{name.removesuffix('weight')}{part}": one for part, one in parts.items()}
    if towers is not None:  # the tools name each layer that they leave out
        matrices = [name.removesuffix(".weight") for name, one in tensors.items() if one.dim() == 2]
        kept = [name for name in matrices if text_name(f"{name}.") is None or name.endswith("layers.0.mlp.down_proj")]
        key = "ignore" if "ignore" in told else "modules_to_not_convert"
        told = told | {key: [*(told.get(key) or ()), *kept]}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": told}
    (path / "config.json").write_text(json.dumps(config))
    return defined


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(weight: Array) -> tuple[Tensors, Array]:
    """gpt-oss's layout of weights [experts, out, in]: blocks of 32 inputs, two numbers a byte, lower bits first, and a
    power of two for each block (OCP Microscaling Formats 1.0)."""
    blocks = weight.reshape(*weight.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))).astype(np.int64) - 2
    scaled = blocks / 2.0 ** exponents[..., None]
    codes = np.abs(scaled[..., None] - E2M1).argmin(-1).astype(np.uint8)
    defined = E2M1[codes] * 2.0 ** exponents[..., None]
    return {
        "blocks": torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4),
        "scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }, defined.reshape(weight.shape)


def make_gpt_oss(path: Path, *, hidden_size: int = 64, intermediate_size: int = 96) -> dict[str, Array]:
    """Writes a tiny random gpt-oss with experts in MXFP4 under path; returns the weights [experts, in, out] of its
    experts by the format's definition, by transformers' names."""
    config = transformers.GptOssConfig(
        vocab_size=260, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_local_experts=4, num_experts_per_tok=2,
        eos_token_id=258, pad_token_id=259, initializer_range=0.1, max_position_embeddings=512,
        rope_parameters={"rope_type": "default"},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm: Any = transformers.GptOssForCausalLM(config)  # type: ignore[no-untyped-call]
    lm.bfloat16().save_pretrained(path)
    tensors, defined = dict[str, torch.Tensor](), dict[str, Array]()
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight
            continue
        parts, known = mxfp4(weight.float().numpy().swapaxes(1, 2))
        defined[name] = known.swapaxes(1, 2)
        tensors |= {f"{name}_{part}": one.contiguous() for part, one in parts.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((path / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(told))
    make_tokenizer().save_pretrained(path)
    return defined
