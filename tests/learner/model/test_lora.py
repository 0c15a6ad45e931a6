"""Fused LoRA layers against PEFT's own in float64: values, gradients, what is kept, and who computes what when.
model.adapter: what contradicts the settings is refused by name, by its file alone; what is left open follows it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cluster.errors import WrongInput
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model import lora
from learner.model.adapter_config import follow, read_adapter
from learner.model.lora import Adapted, acting_as, adapted_linear, slow_in, widened_linear
from learner.model.policy import Policy
from tests.learner.model.test_policy import SMALL, make_policy, save_model


class Block(nn.Module):
    """Layers that read one tensor, each with the sizes and rank of a row of `sizes`."""

    def __init__(self, width: int, sizes: list[tuple[int, bool]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, out, bias=bias) for out, bias in sizes)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def adapted(block: Block, ranks: list[int], alpha: float) -> Any:
    names = {f"layers.{i}": rank for i, rank in enumerate(ranks)}
    config = peft.LoraConfig(
        r=1, lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=list(names), rank_pattern=names, init_lora_weights=False
    )  # fmt: skip
    return peft.get_peft_model(block, config).double()


def in_type(layer: Any, dtype: torch.dtype) -> Adapted:
    """A PEFT layer's weights in another type, those of the adapter to be differentiated in."""
    base, a, b = layer.base_layer, layer.lora_A.default.weight, layer.lora_B.default.weight
    bias = None if base.bias is None else base.bias.detach().to(dtype)
    a, b = (weight.detach().to(dtype).requires_grad_() for weight in (a, b))
    return Adapted(base.weight.detach().to(dtype), bias, a, b, layer.scaling["default"])


@settings(max_examples=25)
@given(
    width=st.integers(1, 9),
    layers=st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(1, 4)), min_size=1, max_size=4),
    alpha=st.sampled_from([1.0, 3.7]),
    batch=st.sampled_from([(5,), (1, 6), (2, 3)]),
    first=st.booleans(),  # the model's first layers, whose input wants no gradient
)
def test_values_and_gradients_are_pefts(
    width: int, layers: list[tuple[int, bool, int]], alpha: float, batch: tuple[int, ...], first: bool
) -> None:
    torch.manual_seed(width)
    model = adapted(Block(width, [layer[:2] for layer in layers]), [rank for *_, rank in layers], alpha)
    own = list(model.base_model.model.layers)
    wanted_of = [weight for layer in own for weight in (layer.lora_A.default.weight, layer.lora_B.default.weight)]
    exact = torch.randn(*batch, width).double().requires_grad_(not first)
    wanted = [layer(exact) for layer in own]
    pulls = [torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape) for y in wanted]
    slopes = torch.autograd.grad(wanted, wanted_of if first else [*wanted_of, exact], pulls)
    ways = [(adapted_linear, torch.float64, 1e-13), (adapted_linear, torch.float32, 3e-6)]
    for linear, dtype, bound in [*ways, (widened_linear, torch.bfloat16, 0.03)]:
        x = exact.detach().to(dtype).requires_grad_(not first)
        rows = [in_type(layer, dtype) for layer in own]
        found = linear(x, rows)
        found_of = [weight for row in rows for weight in (row.a, row.b)]
        found_slopes = torch.autograd.grad(found, found_of if first else [*found_of, x], [p.to(dtype) for p in pulls])
        for one, other in zip((*found, *found_slopes), (*wanted, *slopes), strict=True):
            assert one.dtype == dtype
            assert (one - other).norm() <= bound * (1 + other.norm())


@pytest.mark.parametrize(("dtype", "native"), [(torch.bfloat16, "avx512_bf16"), (torch.float16, "amx_fp16")])
@pytest.mark.parametrize("there", [False, True])
def test_16_bits_are_widened_where_the_processor_cannot_multiply_them(
    dtype: torch.dtype, native: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", native: there})
    assert slow_in(dtype) is not there
    assert not slow_in(torch.float32)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "aarch64", "bf16": True})
    assert not slow_in(dtype)


@pytest.mark.parametrize("linear", [adapted_linear, widened_linear])
def test_the_gradient_of_an_input_whose_rows_do_not_lie_one_after_the_other(linear: Any) -> None:
    torch.manual_seed(0)
    weight, a, b = (torch.randn(*shape).bfloat16() for shape in ((5, 6), (2, 6), (5, 2)))
    plain = torch.randn(2, 3, 6).bfloat16()
    slopes: list[Tensor] = []
    for x in (plain, plain.transpose(1, 2).contiguous().transpose(1, 2)):
        x.requires_grad_()
        (y,) = linear(x, [Adapted(weight, None, a, b, 0.5)])
        slopes += torch.autograd.grad(y.sum(), x)
    assert torch.equal(*slopes)
    assert slopes[0].abs().min() > 0


def test_widened_sums_are_rounded_once_whatever_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight, a, b = (
        torch.randn(*shape).bfloat16().requires_grad_() for shape in ((40, 33), (20, 33), (4, 33), (20, 4))
    )
    layer, kept = Adapted(weight.detach(), None, a, b, 0.5), []
    with saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):  # type: ignore[func-returns-value]
        (found,) = widened_linear(x, [layer])
    assert set(kept) == {torch.bfloat16}
    wide = x.float() @ weight.float().t() + 0.5 * (x.float() @ a.float().t()) @ b.float().t()
    assert (found != wide.bfloat16()).float().mean() < 0.02  # but for the order of the sums
    slopes = torch.autograd.grad(found.sum(), (x, a, b))
    monkeypatch.setattr(lora, "WIDENED_TILE", 7)
    (tiled,) = widened_linear(x, [layer])
    for one, other in zip((tiled, *torch.autograd.grad(tiled.sum(), (x, a, b))), (found, *slopes), strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL),  # biases
    "cohere": transformers.CohereConfig(**SMALL),  # attention and MLP read one tensor
}
GROUPS = ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"]
IDS = torch.tensor([[5, 6, 7, 8, 9, 3]])


def filled(policy: Policy) -> Policy:
    """With an adapter of which no part is zero."""
    with torch.no_grad():
        for i, master in enumerate(policy.masters.values()):
            master.copy_(torch.randn(master.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
    policy.sync()
    return policy


def run(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    policy.clear_gradients()
    states = policy.hidden(IDS)
    torch.autograd.backward((states * torch.cos(torch.arange(states.numel())).view_as(states)).sum())
    return states.detach(), {name: w.grad.clone() for name, w in policy.trained.weights.items() if w.grad is not None}


def unfused(policy: Policy) -> None:
    """PEFT's own forward passes again."""
    for module in policy._lm.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.__dict__.pop("forward", None)


@pytest.mark.parametrize("checkpointing", ["none", "full", "mlp"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_computes_as_with_peft(
    name: str, checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    plain = adapted_linear

    def watched(x: Tensor, layers: Any) -> Any:
        seen.append(" ".join(names[id(layer.a)] for layer in layers))
        return plain(x, layers)

    policy = filled(make_policy(save_model(CONFIGS[name], tmp_path), checkpointing=checkpointing))
    policy._lm.double()
    names = {
        id(module.lora_A["default"].weight): path.rpartition(".")[2]
        for path, module in policy._lm.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)
    }  # fmt: skip
    monkeypatch.setattr(lora, "adapted_linear", watched)
    found, found_grads = run(policy)
    assert sorted(set(seen)) == sorted(GROUPS)
    unfused(policy)
    wanted, wanted_grads = run(policy)
    assert torch.allclose(found, wanted, atol=1e-12)
    assert found_grads.keys() == wanted_grads.keys() != set()
    assert all(torch.allclose(found_grads[key], wanted_grads[key], atol=1e-12) for key in wanted_grads)


def test_roles_take_the_adapter_they_are(tiny_path: str, adapter_path: str) -> None:
    """The reference's adapter, and the base alone, through the same layers; then the policy's again."""
    policy = make_policy(tiny_path, adapter=adapter_path)
    before = policy.hidden(IDS).detach()
    filled(policy)
    told: dict[bool, list[Tensor]] = {}
    for fused in (True, False):
        told[fused] = [policy.hidden(IDS).detach()]
        for name in ("reference", None):
            with torch.no_grad(), acting_as(policy._peft, name):
                told[fused].append(policy.hidden(IDS))
        unfused(policy)
    for one, other in zip(told[True], told[False], strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.equal(told[True][1], before)  # it is the adapter that training started from: a KL of exactly 0
    assert not torch.allclose(told[True][0], told[True][2], atol=1e-2)


def test_a_pass_that_broke_off_leaves_nothing(tmp_path: Path) -> None:
    """What it had made for the next layer would keep its whole graph, when memory has just run out."""
    policy = filled(make_policy(save_model(CONFIGS["llama"], tmp_path)))
    wanted = policy.hidden(IDS)
    key = policy._lm.model.layers[0].self_attn.k_proj

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    handle = key.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        policy.hidden(IDS)
    handle.remove()
    ready = key.forward.args[2]
    assert ready._outputs
    seen: list[Any] = []
    policy._lm.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(dict(ready._outputs)))
    assert torch.equal(policy.hidden(IDS), wanted)
    assert seen == [{}]
    assert ready._input is None


def test_fewer_targets_make_smaller_groups(tmp_path: Path) -> None:
    policy = make_policy(save_model(CONFIGS["llama"], tmp_path), targets=["q_proj", "v_proj", "down_proj"])
    attention = policy._lm.model.layers[0].self_attn
    assert attention.q_proj.forward.args[1] == [attention.q_proj, attention.v_proj]
    assert "forward" not in vars(attention.k_proj)


@pytest.mark.parametrize("linear", [adapted_linear, widened_linear])
def test_a_layer_in_4_bits_is_what_its_weight_multiplied_out_is(linear: Any) -> None:
    torch.manual_seed(0)
    weight, bias, a, b, x = (
        torch.randn(*shape).bfloat16() for shape in ((64, 128), (64,), (4, 128), (64, 4), (9, 128))
    )
    packed, packing = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    whole = dequantize_4bit(packed, packing)
    assert 0 < (whole - weight).norm() < 0.2 * weight.norm()
    told = []
    for layer in (Adapted(packed, bias, a, b, 0.5, packing), Adapted(whole, bias, a, b, 0.5)):
        given = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
        (y,) = linear(given[0], [layer._replace(a=given[1], b=given[2])])
        told.append([y, *torch.autograd.grad(y.square().sum(), given)])
    for one, other in zip(*told, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).norm() <= 1e-2 * other.norm()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_model_in_4_bits_computes_as_with_peft(checkpointing: str, tmp_path: Path) -> None:
    path = save_model(CONFIGS["qwen2"], tmp_path)
    policy = filled(
        Policy(
            ModelConfig(path=path, dtype="float32", base="nf4"), LoraConfig(rank=8, alpha=16),
            checkpointing=checkpointing, seed=0, device=torch.device("cpu"),
        )
    )  # fmt: skip
    layers = [module for module in policy._lm.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert len([layer for layer in layers if "forward" in vars(layer)]) == 7
    with torch.no_grad(), acting_as(policy._peft, None):
        base = policy.hidden(IDS)
    found, found_grads = run(policy)
    unfused(policy)
    wanted, wanted_grads = run(policy)
    assert (wanted - base).norm() > 0.5 * wanted.norm()
    for one, other in ((found, wanted), *((found_grads[key], wanted_grads[key]) for key in wanted_grads)):
        assert (one - other).norm() <= 1e-4 * other.norm()


# model.adapter: what contradicts the settings is refused by name, by its file alone; what is left open follows it.

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
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters of FILE must be those of routed experts, "),
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
