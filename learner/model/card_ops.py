"""SwiGLU and the rotary embedding on a card: Liger's Triton kernels (2410.10989) as operators with gradients.

    silu_mul  gate * sigmoid(gate) * up, from [..., f] each; keeps both, and their gradients take their place
    rotate    x cos + (-x_2, x_1) sin of queries and keys, whose tensors it overwrites, and so does its gradient

Operators, because tensors without content must pass them, too (learner.tools.meta_run), each as the one kernel it is.
Both are the formulas of transformers' Llama; learner.model.fusion finds the models that follow them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """[..., f]; differentiable once. The backward pass overwrites `gate` and `up`."""
    found: Tensor = _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated queries and keys, [B, heads, L, D] each, in the memory of those that are given if they are views of
    [B, L, heads, D]; cos and sin [B, L, D], both halves of D alike. Differentiable once, in queries and keys."""
    found: tuple[Tensor, Tensor] = _Rotate.apply(query, key, cos, sin)  # type: ignore[no-untyped-call]
    return found


# Imported when they are called first, as Triton is: where there is no card, there is no Triton.
@torch.library.custom_op("gleaner::silu_mul", mutates_args=())
def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import swiglu_forward

    product: Tensor = swiglu_forward(gate, up)[2]
    return product


@_silu_mul.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("gleaner::silu_mul_backward_", mutates_args=("gate", "up"))
def _silu_mul_backward(gate: Tensor, up: Tensor, grad: Tensor) -> None:
    from liger_kernel.ops.swiglu import swiglu_backward

    swiglu_backward(gate, up, grad)


@torch.library.custom_op("gleaner::rotate_", mutates_args=("query", "key"))
def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """query and key: [B, heads, L, D], views of contiguous [B, L, heads, D]."""
    from liger_kernel.ops.rope import rope_backward, rope_forward

    if back:
        rope_backward(query, key, cos, sin)
    else:
        rope_forward(query, key, cos, sin)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        product: Tensor = _silu_mul(gate, up)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        _silu_mul_backward(gate, up, grad.contiguous())
        return gate, up


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, key, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_query: Tensor, to_key: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotated(to_query, to_key, *ctx.saved_tensors, back=True), None, None


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    _rotate(q, k, cos, sin, back)
    return q, k
