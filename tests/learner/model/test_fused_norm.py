"""The fused RMSNorm against its formula in float64, what it keeps, and which norms it takes the place of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from examples.random_families import make_family
from learner.model.fusion import fuse_norms, rms_norm


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
