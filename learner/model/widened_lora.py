"""LoRA layers in 16 bits on a CPU that has no instructions for products of 16 bits: multiplied in float32.

There torch emulates them, at a fifth of the speed of float32 (Intel Ice Lake, one core: 31 and 157 GFLOP/s). The
mathematics are those of learner.model.fused_lora, and what is given has 16 bits as there. h is not kept but computed
again. Rows are widened a tile at a time, and weights a layer at a time, so that little lies in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.model.fused_lora import Adapted, applied, layers_of

TILE = 1024  # rows
# Of x86, by torch.cpu.get_capabilities(). Other processors are left to torch.
INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


def slow_in(dtype: torch.dtype) -> bool:
    """Whether this processor has no instructions for products of that type."""
    there, wanted = torch.cpu.get_capabilities(), INSTRUCTIONS.get(dtype, ())
    return there["architecture"] == "x86_64" and bool(wanted) and not any(there.get(name, False) for name in wanted)


def widened_linear(x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """[..., out] of each layer, from x [..., in], in x's type; differentiable once, in x and in every a and b."""
    return applied(_Linear, x, layers)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rest: list[tuple[float, Any]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *tensors)
        ctx.rest = rest
        return tuple(_output(x, layer) for layer in layers_of(tensors, rest))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        sums = torch.float32 if len(grads) > 1 else x.dtype
        to_x = torch.zeros(x.shape, dtype=sums, device=x.device) if ctx.needs_input_grad[0] else None
        found: list[Tensor | None] = []
        for layer, grad in zip(layers_of(tensors, ctx.rest), grads, strict=True):
            found += [None, None, *_slopes(x, layer, grad, to_x)]
        return None if to_x is None else to_x.to(x.dtype), None, *found


def _output(x: Tensor, layer: Adapted) -> Tensor:
    weight, bias, a, b, scale, _ = _wide(layer)
    y = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype, device=x.device)
    for rows, into in zip(_tiles(x), _tiles(y), strict=True):
        wide = rows.float()
        into.copy_(F.linear(wide, weight, bias).addmm_(wide @ a.t(), b.t(), alpha=scale))
    return y


def _slopes(x: Tensor, layer: Adapted, grad: Tensor, to_x: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of a and b; that of x is added to `to_x`."""
    weight, _, a, b, scale, _ = _wide(layer)
    to_a, to_b = torch.zeros_like(a), torch.zeros_like(b)
    inputs = [None] * len(_tiles(x)) if to_x is None else _tiles(to_x)
    for rows, slopes, into in zip(_tiles(x), _tiles(grad), inputs, strict=True):
        wide, slope = rows.float(), slopes.float()
        thin = scale * (slope @ b)
        to_a.addmm_(thin.t(), wide)
        to_b.addmm_(slope.t(), wide @ a.t(), alpha=scale)
        if into is not None and into.dtype == torch.float32:
            into.addmm_(slope, weight).addmm_(thin, a)
        elif into is not None:  # of the one layer that reads x
            into.copy_((slope @ weight).addmm_(thin, a))
    return to_a.to(x.dtype), to_b.to(x.dtype)


def _wide(layer: Adapted) -> Adapted:
    """In float32."""
    bias = None if layer.bias is None else layer.bias.float()
    return Adapted(layer.whole().float(), bias, layer.a.float(), layer.b.float(), layer.scale)


def _tiles(x: Tensor) -> tuple[Tensor, ...]:
    """[..., width] -> rows of it, at most TILE at once; views, if it is contiguous."""
    return torch.split(x.reshape(-1, x.shape[-1]), TILE)
