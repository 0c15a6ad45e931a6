"""A quantised base computes with the weights of its format's definition, and no layer of it is ever random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from cluster.errors import WrongInput
from examples.quantised_checkpoints import E2M1, KINDS, e4m3, make_gpt_oss, make_quantised
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.base import load_base
from learner.model.bases.quantised import QuantisedLinear, dequantised, dequantised_blocks
from learner.model.policy import Policy
from rollout.quantised import Format

CPU = torch.device("cpu")
LORA = LoraConfig(rank=8, alpha=16)


def loaded(path: Path, dtype: Any = "float32", **model: Any) -> Any:
    return load_base(ModelConfig(path=str(path), dtype=dtype, **model), CPU, lora=True)


def weight_of(lm: Any, name: str) -> Tensor:
    layer = lm.get_submodule(name.removesuffix(".weight"))
    assert type(layer) is QuantisedLinear
    return layer.whole()


@pytest.mark.parametrize(
    ("kind", "towers"),
    [*((kind, None) for kind in KINDS), ("w4a16", "gemma3"), ("awq", "qwen3_vl"), ("fp8_block", "qwen3_vl")],
)
def test_weights_are_those_of_the_definition(tmp_path: Path, kind: str, towers: str | None) -> None:
    """Bit for bit, in the type in which the files hold the scales."""
    defined = make_quantised(tmp_path, kind, towers=towers)
    for dtype in ("float32", "bfloat16" if kind.startswith("w4a16") else "float16"):
        lm = loaded(tmp_path, dtype)
        assert len(defined) == (14 if towers is None else 13)
        assert sum(isinstance(module, QuantisedLinear) for module in lm.modules()) == len(defined)
        for name, weight in defined.items():
            assert torch.equal(weight_of(lm, name), torch.from_numpy(weight).to(getattr(torch, dtype)))


def test_scales_are_rounded_to_the_type_of_the_model_first() -> None:
    """As vLLM does when it loads them: 1.0625 + 2^-10 is a float16, which is 1.0625 in bfloat16; 5 of it are 5.3125."""
    words = torch.full((1, 8), 13, dtype=torch.int32)  # the first of eight inputs is 13 - 8 = 5
    tensors = {"qweight": words, "scales": torch.full((1, 8), 1.0625 + 2**-10, dtype=torch.float16)}
    found = dequantised(Format("GPTQ", (1, 8), "scales"), tensors, torch.bfloat16)
    assert found[0].tolist() == [5.3125, *[-8.5] * 7]


def test_all_numbers_of_e2m1_and_of_an_exponent_are_exact() -> None:
    codes = torch.arange(32, dtype=torch.uint8) % 16
    blocks = (codes[::2] | codes[1::2] << 4)[None, None]
    for exponent in (1, 126, 127, 130, 250):
        found = dequantised_blocks(blocks, torch.full((1, 1), exponent, dtype=torch.uint8), torch.float32)
        assert np.array_equal(
            found[0].numpy(), np.tile(E2M1, 2).astype(np.float32) * np.float32(2.0 ** (exponent - 127))
        )


def test_all_numbers_of_e4m3_are_exact() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)[None]
    tensors = {"weight": codes, "weight_scale": torch.full((1, 1), 0.75)}
    found = dequantised(Format("FP8", (1, 0), "weight_scale"), tensors, torch.float32)
    assert found[0].tolist() == [e4m3(int(code)) * 0.75 for code in codes[0]]


def test_experts_in_mxfp4_are_the_model_of_the_definition(tmp_path: Path) -> None:
    defined, ids = make_gpt_oss(tmp_path), torch.arange(40).view(2, 20)
    lm = loaded(tmp_path)
    for name, weight in defined.items():
        home, _, leaf = name.rpartition(".")
        own = torch.stack([lm.get_submodule(home).whole(leaf, expert) for expert in range(len(weight))])
        assert torch.equal(own.transpose(1, 2), torch.from_numpy(weight).float())
    tensors = load_file(tmp_path / "model.safetensors")
    state = {name: one.float() for name, one in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    state |= {name: torch.from_numpy(weight).float() for name, weight in defined.items()}
    auto: Any = AutoModelForCausalLM
    plain: Any = auto.from_config(lm.config, attn_implementation="eager").eval()
    plain.load_state_dict(state)
    for one in (plain.requires_grad_(False), lm.eval()):
        one.get_input_embeddings().weight.requires_grad_(True)
        one(input_ids=ids).logits.square().sum().backward()
    assert torch.allclose(lm(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)
    slopes, wanted = (one.get_input_embeddings().weight.grad for one in (lm, plain))
    assert torch.allclose(slopes, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def in_16_bits(path: Path, folder: Path, defined: dict[str, Any]) -> Path:
    """The same checkpoint with the weights of the definition, which are float32 here."""
    plain: Any = loaded(path)
    state = {
        name: one for name, one in plain.state_dict().items() if name.rpartition(".")[0] + ".weight" not in defined
    }
    state |= {name: torch.from_numpy(weight).float() for name, weight in defined.items()}
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["awq", "fp8_block"])
def test_a_policy_on_it_learns_as_on_the_dequantised_weights(tmp_path: Path, kind: str) -> None:
    defined = make_quantised(tmp_path / "packed", kind)
    folders = (tmp_path / "packed", in_16_bits(tmp_path / "packed", tmp_path / "plain", defined))
    ids, found = torch.arange(20)[None], []
    for folder in folders:
        policy = Policy(ModelConfig(path=str(folder), dtype="float32"), LORA, checkpointing="full", seed=0, device=CPU)
        with torch.no_grad():
            for name, weight in policy.trained.weights.items():
                weight.add_(0.01 if "lora_B" in name else 0.0)
        policy.hidden(ids).square().sum().backward()
        with policy.acting_as("reference"), torch.no_grad():
            base = policy.hidden(ids)
        found.append((base, {name: weight.grad for name, weight in policy.trained.weights.items()}))
    (base, slopes), (wanted, wanted_slopes) = found
    assert torch.equal(base, wanted)
    assert len(slopes) == 28
    assert all(torch.equal(slopes[name], grad) for name, grad in wanted_slopes.items())


def test_no_pass_keeps_a_weight(tmp_path: Path) -> None:
    make_quantised(tmp_path, "gptq")
    layer = loaded(tmp_path).get_submodule("model.layers.0.mlp.up_proj")
    kept: list[int] = []

    def noted(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    x = torch.randn(3, layer.in_features, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        y = layer(x)
    y.sum().backward()
    assert sum(kept) < layer.weight.numel()
    assert torch.equal(x.grad, torch.ones(3, layer.out_features) @ layer.whole())  # type: ignore[arg-type]


Change = Callable[[dict[str, Tensor]], object]
UP = "model.layers.1.mlp.up_proj"


def as_float(tensors: dict[str, Tensor]) -> None:
    """Layer 1's projection as if it had never been quantised."""
    for name in [name for name in tensors if name.startswith(UP)]:
        del tensors[name]
    tensors[f"{UP}.weight"] = torch.zeros(384, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{UP}.scales"), f"1 tensor of .* \\(GPTQ\\) are missing, first {UP}.scales"),
        (
            lambda t: [t.pop(f"{UP}.{part}") for part in ("scales", "qweight", "qzeros", "g_idx")],
            f"lacks .*{UP}.weight",
        ),
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensor .*model.norm.weight"),
        (lambda t: t.update({f"{UP}.g_idx2": torch.zeros(1)}), "no place for: .*g_idx2"),
        (as_float, f"{UP}.weight of .* is not quantised in the files"),
    ],
)
def test_no_layer_is_random_or_left_out(tmp_path: Path, change: Change, message: str) -> None:
    make_quantised(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WrongInput, match=message) as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lora", "base", "message"),
    [(False, "none", "learner.mode: full is not for a quantised"), (True, "nf4", "model.base: nf4 .*quantised twice")],
)
def test_it_is_a_frozen_base_alone(tmp_path: Path, lora: bool, base: Any, message: str) -> None:
    make_quantised(tmp_path, "w4a16")
    with pytest.raises(WrongInput, match=message):
        load_base(ModelConfig(path=str(tmp_path), base=base), CPU, lora=lora)


def test_without_content_it_has_the_bytes_of_its_format(tmp_path: Path) -> None:
    """What the planner asks: 4 bits and a scale of 16 bits for 32 inputs."""
    make_quantised(tmp_path, "w4a16")
    lm = load_base(ModelConfig(path=str(tmp_path)), torch.device("meta"), lora=True)
    layers = [module for module in lm.modules() if isinstance(module, QuantisedLinear)]
    assert len(layers) == 14
    assert not any(isinstance(module, nn.Linear) and type(module) is nn.Linear for module in lm.model.modules())
    for layer in layers:
        nbytes = sum(one.nbytes for one in layer.parameters())
        assert nbytes == layer.in_features * layer.out_features * (0.5 + 2 / 32)
