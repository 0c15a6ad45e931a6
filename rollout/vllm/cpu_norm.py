"""RMSNorm in float32 on a CPU by the kernel that vLLM has for it and takes on cards only.

vLLM's other way is six operations of torch, for a small model a tenth of an engine step. In 16 bits that way stays: it
rounds where transformers does, and so where the learner does, and the kernel does not. vLLM 0.33 says that it takes
this way of choosing kernels out in 0.34.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "gleaner_cpu"
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
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and x.dtype == weight.dtype == torch.float32 and _in_rows(x)


def _fits_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, epsilon, variance_size) and x_residual.dtype == torch.float32 and _in_rows(x_residual)


def _in_rows(x: Tensor) -> bool:
    """The kernel takes its rows to lie one behind the other, and to be of whole vectors (16 numbers with AVX-512)."""
    return x.is_contiguous() and x.shape[-1] % 16 == 0
