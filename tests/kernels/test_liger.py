"""Liger's real kernels under the learner's operators: values and gradients of whole models against transformers' own.

float32: what the interpreter makes of 16 bits is not what a card makes of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from transformers import LlamaConfig, Qwen3Config
from triton.runtime import interpreter

from learner.model.fusion import rotate, silu_mul
from learner.model.policy import CheckpointPolicy, apply
from tests.learner.model.test_fusion import fuse_for_a_card, gradients, model_of
from tests.learner.model.test_policy import SMALL

CONFIGS: dict[str, Any] = {"llama": LlamaConfig(**SMALL), "qwen3": Qwen3Config(**SMALL)}


@pytest.fixture(autouse=True)
def floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that a kernel is given are tensors of float32, as on a card; the interpreter leaves them as they are."""
    plain = interpreter._implicit_cvt

    def converted(arg: Any) -> Any:
        if not isinstance(arg, float):
            return plain(arg)
        return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_are_transformers(name: str, checkpointing: CheckpointPolicy) -> None:
    wanted, found = (model_of(CONFIGS[name], torch.float32) for _ in range(2))
    fuse_for_a_card(found)
    apply(found, checkpointing, name)
    (logits, slopes), (own, own_slopes) = gradients(wanted), gradients(found)
    for one, other in zip((own, *own_slopes), (logits, *slopes), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_widths_that_are_no_power_of_two() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(3, 5, 173, requires_grad=True) for _ in range(2))
    wanted = torch.autograd.grad((gate * gate.sigmoid() * up).sin().sum(), (gate, up))
    found = torch.autograd.grad(silu_mul(gate.clone(), up.clone()).sin().sum(), (gate, up))
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    q, k, angles = torch.randn(2, 3, 7, 80), torch.randn(2, 1, 7, 80), torch.randn(2, 7, 40)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    turned = [x * cos[:, None] + torch.cat([-x[..., 40:], x[..., :40]], -1) * sin[:, None] for x in (q, k)]
    for one, other in zip(rotate(q, k, cos, sin), turned, strict=True):
        assert (one - other).abs().max() <= 1e-5
