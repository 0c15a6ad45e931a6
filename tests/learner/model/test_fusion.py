"""MLPs and rotary embeddings on a card's operators: whose they become, and that gradients stay what they were.

Stand-ins for Liger's kernels with their signatures, which overwrite what the real ones overwrite; those run in
tests/kernels/test_liger.py, by the same models.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP

from examples.random_families import FAMILIES, make_family
from learner.model import fusion
from learner.model.policy import CheckpointPolicy, apply
from tests.learner.model.test_policy import SMALL

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
    for one, other in zip((own, *own_slopes), (logits, *slopes), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


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
