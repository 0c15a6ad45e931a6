"""AdamW: the plain one's numbers, and no memory beside its states."""

from __future__ import annotations

import torch

from learner.learner_config import OptimizerConfig
from learner.optimizer import build_optimizer
from tests.peak import peak_bytes

CPU = torch.device("cpu")


def test_fused_adamw_is_adamw_without_temporaries() -> None:
    torch.manual_seed(0)
    first = [torch.randn(64, 64), torch.randn(300)]
    mine, plain = ([weight.clone().requires_grad_() for weight in first] for _ in range(2))
    config = OptimizerConfig(weight_decay=0.1)
    fused = build_optimizer(mine, config, CPU)
    reference = torch.optim.AdamW(plain, lr=1e-3, betas=config.betas, weight_decay=0.1, foreach=False, fused=False)
    for _ in range(20):
        for one, other in zip(mine, plain, strict=True):
            one.grad = other.grad = torch.randn_like(one) * 1e-3
        fused.step()
        reference.step()
    assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in zip(mine, plain, strict=True))
    assert peak_bytes(fused.step) < 1000
    assert peak_bytes(reference.step) > 16_000  # one weight's, so the measure sees temporaries
