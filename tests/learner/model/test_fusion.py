"""MLPs and rotary embeddings on a card's operators: whose they become, and that gradients stay what they were. The
fused RMSNorm against its formula in float64, what it keeps, and which norms it takes the place of.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from examples.random_families import FAMILIES, make_family
from learner.model import fusion
from learner.model.fusion import fuse_norms, rms_norm
from learner.model.policy import CheckpointPolicy, apply
from tests.learner.model.test_policy import SMALL

# The fused RMSNorm against its formula in float64, what it keeps, and which norms it takes the place of.


def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@settings(max_examples=25)
@given(
    shape=st.sampled_from([(7, 5), (1, 4, 16), (2, 3, 4, 8)]),
    scale=st.sampled_from([1e-4, 1.0, 50.0]),
    eps=st.sampled_from([1e-6, 1e-3]),
    wants=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_values_and_gradients(shape: tuple[int, ...], scale: float, eps: float, wants: tuple[bool, bool]) -> None:
    torch.manual_seed(len(shape))
    exact = [(scale * torch.randn(*shape)).double(), torch.randn(shape[-1]).double()]
    pull = torch.cos(torch.arange(exact[0].numel(), dtype=torch.float64)).view(shape)
    for tensor, wanted in zip(exact, wants, strict=True):
        tensor.requires_grad_(wanted)
    expected = plain(exact[0], exact[1], eps)
    slopes = torch.autograd.grad(expected, [x for x in exact if x.requires_grad], pull)
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        x, weight = (tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) for tensor in exact)
        found = rms_norm(x, weight, eps, on_card=False)
        own = torch.autograd.grad(found, [y for y in (x, weight) if y.requires_grad], pull.to(dtype))
        for one, other in zip((found, *own), (expected, *slopes), strict=True):
            assert one.dtype == dtype
            assert (one - other).norm() <= bound * other.norm()


def test_it_keeps_its_input_as_it_is_and_a_number_a_row() -> None:
    kept: dict[int, int] = {}
    x, weight = torch.randn(30, 16).bfloat16().requires_grad_(), torch.ones(16, dtype=torch.bfloat16)
    with saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t.nbytes) and t, lambda t: t):
        y = rms_norm(x, weight, 1e-6, on_card=False)
    assert kept[x.data_ptr()] == 2 * 30 * 16
    assert sum(kept.values()) == 2 * 30 * 16 + 4 * 30 + 2 * 16
    assert y.grad_fn is not None


@pytest.mark.parametrize(
    ("family", "fused"),
    [("mixtral", True), ("glm4", True), ("qwen3_moe", True), ("gemma3", False), ("cohere", False)],
)
def test_which_norms(family: str, fused: bool, tmp_path: Path) -> None:
    """Gemma multiplies by 1 + weight, Cohere takes the mean away: theirs stay."""
    make_family(tmp_path, family)
    lm: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    norms = [module for name, module in lm.named_modules() if "norm" in name.rpartition(".")[2]]
    for norm in norms:
        nn.init.normal_(norm.weight)
    ids = torch.arange(5, 14)[None]
    with torch.no_grad():
        before = lm(input_ids=ids).logits
        fuse_norms(lm, on_card=False)
        assert (lm(input_ids=ids).logits - before).abs().max() < 1e-4
    assert {"forward" in vars(norm) for norm in norms} == {fused}


class Half(nn.Module):
    """Has what a norm has, and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return plain(x, self.weight, self.eps) / 2


class Gated(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        found: Tensor = super().forward(hidden_states)
        return found if gate is None else found * gate


def test_what_only_looks_like_a_norm_stays_and_mixed_types_are_left_to_it() -> None:
    lm = nn.ModuleList([Half(), nn.LayerNorm(8, bias=False), Gated(8), LlamaRMSNorm(8, eps=1e-3)])
    fuse_norms(lm, on_card=False)
    assert ["forward" in vars(module) for module in lm] == [False, False, False, True]
    x = torch.randn(3, 8).bfloat16()
    norm: Any = lm[3]
    assert torch.equal(norm(x), LlamaRMSNorm.forward(norm, x))  # float32 weights, as transformers does it


CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "llama, gelu": LlamaConfig(**SMALL, hidden_act="gelu"),
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 3], [9, 8, 7, 2, 1, 0]])


def swiglu_forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a, b, a * a.sigmoid() * b


def swiglu_backward(a: Tensor, b: Tensor, dc: Tensor) -> None:
    gate = a.sigmoid()
    to_a, to_b = dc * b * (gate + a * gate * (1 - gate)), dc * a * gate
    a.copy_(to_a)
    b.copy_(to_b)


def rope_forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> None:
    for x in (q, k):
        assert x.transpose(1, 2).is_contiguous()
        left, right = x.chunk(2, -1)
        x.copy_(x * cos[:, None] + sign * torch.cat([-right, left], -1) * sin[:, None])


def rope_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> None:
    rope_forward(dq, dk, cos, sin, -1)


@pytest.fixture(autouse=True)
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"swiglu": [swiglu_forward, swiglu_backward], "rope": [rope_forward, rope_backward]}
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, functions in names.items():
        module: Any = ModuleType(f"liger_kernel.ops.{name}")
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, module.__name__, module)


def model_of(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def fuse_for_a_card(lm: nn.Module) -> None:
    """But for the norms, whose gradient no operator of a CPU computes."""
    fusion._fuse_mlps(lm)
    fusion._fuse_rotary(lm)


def gradients(lm: Any) -> tuple[Tensor, list[Tensor]]:
    logits = lm(input_ids=IDS, use_cache=False).logits
    return logits, list(torch.autograd.grad(logits.square().sum(), list(lm.parameters())))


def exchanged(lm: nn.Module) -> set[str]:
    return {type(module).__name__.lower()[-3:] for module in lm.modules() if "forward" in vars(module)}


@pytest.mark.parametrize("checkpointing", ["none", "mlp", "full"])
@pytest.mark.parametrize(("name", "parts"), [
    ("llama", {"mlp", "ion"}), ("qwen2", {"mlp", "ion"}), ("qwen3", {"mlp", "ion"}), ("llama, gelu", {"ion"}),
])  # fmt: skip
def test_values_and_gradients_are_transformers(name: str, parts: set[str], checkpointing: CheckpointPolicy) -> None:
    wanted, found = model_of(CONFIGS[name]), model_of(CONFIGS[name])
    fuse_for_a_card(found)
    assert exchanged(found) == parts
    apply(found, checkpointing, name)
    (logits, slopes), (own, own_slopes) = gradients(wanted), gradients(found)
    for one, other in zip((own, *own_slopes), (logits, *slopes), strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_other_models_compute_what_they_computed(name: str, tmp_path: Path) -> None:
    """Rotary embeddings that turn pairs or a part of each head, MLPs of one matrix, experts."""
    make_family(tmp_path, name)
    wanted, found = (model_of(AutoConfig.from_pretrained(tmp_path), torch.float32) for _ in range(2))
    fuse_for_a_card(found)
    (logits, slopes), (own, own_slopes) = gradients(wanted), gradients(found)
    most = 5e-5 if name == "qwen3_next" else 1e-5  # a recurrence adds its rounding up over the tokens: 1.2e-5
    for one, other in zip((own, *own_slopes), (logits, *slopes), strict=True):
        assert (one - other).norm() <= most * other.norm()


def test_an_mlp_that_limits_its_gate_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(mlp: Any, x: Tensor) -> Tensor:
        found: Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x).clamp(max=10)) * mlp.up_proj(x))
        return found

    monkeypatch.setattr(LlamaMLP, "forward", limited)
    lm = model_of(CONFIGS["llama"])
    fuse_for_a_card(lm)
    assert exchanged(lm) == {"ion"}


def test_a_rotation_of_a_part_of_each_head_stays_transformers() -> None:
    """Which rotary embeddings a model hands over, its forward pass decides: of heads of 8, here 4 are turned."""
    asked: list[tuple[int, ...]] = []

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(tuple(cos.shape))
        return q, k

    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    fusion._rotary(plain, q, k, torch.ones(1, 3, 4), torch.zeros(1, 3, 4))
    fusion._rotary(plain, q, k, torch.ones(1, 3, 8), torch.zeros(1, 3, 8))
    assert asked == [(1, 3, 4)]


def test_a_model_is_exchanged_alone() -> None:
    fused, other = model_of(CONFIGS["llama"]), model_of(CONFIGS["llama"])
    fuse_for_a_card(fused)
    assert exchanged(other) == set()
    assert "rotate" not in str(type(other.model.layers[0].self_attn).forward.__globals__[fusion.ROTARY])
