"""RMSNorm on a CPU by the kernel that vLLM has for it and takes on cards only.

vLLM's other way is up to eleven operations of torch, for a small model a tenth of an engine step. In 16 bits that way
rounds where transformers does, before the weight, and so where the learner does. The kernel does not: there it computes
in float32 and without a weight, and what rounds stands here. vLLM 0.33 says that it takes this way of choosing kernels
out in 0.34.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PROVIDER = "gleaner_cpu"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
PRIORITY = dict.fromkeys(("rms_norm", "fused_add_rms_norm"), PROVIDER)  # of vllm.EngineArgs, ir_op_priority


def install_cpu_norm() -> None:
    """Makes the kernel known to vLLM in this process, for engines that are started with PRIORITY."""
    from vllm.ir.op import IrOp
    from vllm.platforms import current_platform

    norm, norm_of_sum = IrOp.registry["rms_norm"], IrOp.registry["fused_add_rms_norm"]
    if PROVIDER in norm.impls:
        return
    current_platform.import_kernels()
    norm.register_impl(PROVIDER, supports_args=_fits)(_rms_norm)
    norm_of_sum.register_impl(PROVIDER, supports_args=_fits_sum, inplace=True)(_fused_add_rms_norm)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    if x.dtype == torch.float32:
        normed = torch.empty_like(x)
        torch.ops._C.rms_norm(normed, x, weight, epsilon)
        return normed
    assert weight is not None, "see _fits"
    wide = x.float()
    torch.ops._C.rms_norm(wide, wide, _ones(x.shape[-1]), epsilon)
    return wide.to(x.dtype).mul_(weight)


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float32:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual
    assert weight is not None, "see _fits"
    wide, total = x.float(), x_residual.float()
    torch.ops._C.fused_add_rms_norm(wide, total, _ones(x.shape[-1]), epsilon)
    return wide.to(x.dtype).mul_(weight), total.to(x.dtype)


@cache
def _ones(width: int) -> Tensor:
    return torch.ones(width, dtype=torch.float32)


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype in _TYPES and _in_rows(x)


def _fits_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype and _in_rows(x_residual)


def _in_rows(x: Tensor) -> bool:
    """The kernel takes its rows to lie one behind the other, and to be of whole vectors (16 numbers with AVX-512)."""
    return x.is_contiguous() and x.shape[-1] % 16 == 0
