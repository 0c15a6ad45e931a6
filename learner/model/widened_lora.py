"""LoRA layers in 16 bits on a CPU that has no instructions for products of 16 bits: multiplied in float32.

There torch emulates them, at a fifth of the speed of float32 (Intel Ice Lake, one core: 31 and 157 GFLOP/s). The
mathematics and what is kept are those of learner.model.fused_lora: sums are float32 there too, and rounded once. Rows
are widened a tile at a time, so that beside one layer's weights little lies in float32.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.model.fused_lora import Adapted

TILE = 1024  # rows
INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


def slow_in(dtype: torch.dtype) -> bool:
    """Whether this processor has no instructions for products of that type."""
    there, wanted = torch.cpu.get_capabilities(), INSTRUCTIONS.get(dtype, ())
    return bool(wanted) and not any(there.get(name, False) for name in wanted)


def widened_linear(x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """[..., out] of each layer, from x [..., in], in x's type; differentiable once, in x and in every a and b."""
    tensors = [tensor for layer in layers for tensor in layer[:4]]
    outputs: tuple[Tensor, ...] = _Linear.apply(x, [layer.scale for layer in layers], *tensors)  # type: ignore[no-untyped-call]
    return outputs


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: list[float], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *tensors)
        ctx.scales = scales
        outputs = []
        for weight, bias, a, b, scale in _layers(tensors, scales):
            y = x.new_empty(*x.shape[:-1], len(weight))
            for rows, into in zip(_tiles(x), _tiles(y), strict=True):
                wide = rows.float()
                into.copy_(F.linear(wide, weight, bias).addmm_(wide @ a.t(), b.t(), alpha=scale))
            outputs.append(y)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        to_x = torch.zeros_like(x)
        found: list[Tensor | None] = []
        for (weight, _, a, b, scale), grad in zip(_layers(tensors, ctx.scales), grads, strict=True):
            to_a, to_b = torch.zeros_like(a), torch.zeros_like(b)
            for rows, g, into in zip(_tiles(x), _tiles(grad), _tiles(to_x), strict=True):
                wide, slope = rows.float(), g.float()
                thin = scale * (slope @ b)
                to_a.addmm_(thin.t(), wide)
                to_b.addmm_(slope.t(), wide @ a.t(), alpha=scale)
                if ctx.needs_input_grad[0]:
                    into.add_((slope @ weight).addmm_(thin, a))
            found += [None, None, to_a.to(x.dtype), to_b.to(x.dtype)]
        return to_x if ctx.needs_input_grad[0] else None, None, *found


def _layers(tensors: Sequence[Tensor], scales: list[float]) -> Iterator[Adapted]:
    """In float32, one layer's weights at a time."""
    for weight, bias, a, b, scale in zip(*(tensors[i::4] for i in range(4)), scales, strict=True):
        yield Adapted(weight.float(), None if bias is None else bias.float(), a.float(), b.float(), scale)


def _tiles(x: Tensor) -> tuple[Tensor, ...]:
    """[..., width] -> rows of it, at most TILE at once."""
    return torch.split(x.reshape(-1, x.shape[-1]), TILE)
