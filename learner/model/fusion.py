"""Replaces parts of a model by faster operations with the same result: LoRA layers (learner.model.lora), adapted
experts (learner.model.experts) and RMSNorms everywhere, and on a GPU also SwiGLU MLPs and the rotary embedding. `fuse`
is the entry.

Which modules can be replaced is found by trying them on small tensors on the CPU, not by their names. A SwiGLU MLP is a
module whose forward pass is down(silu(gate(x)) * up(x)); it is tried with small layers. The rotary embedding is a
function that an attention's forward pass in transformers calls by its global name: the model gets a copy of that
forward pass with other globals, and other models of the process keep theirs.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner.model.experts import group
from learner.model.lora import fuse as fuse_lora

# SwiGLU and the rotary embedding on a GPU: Liger's Triton kernels (2410.10989) with gradients.
#
#     silu_mul  gate * sigmoid(gate) * up; keeps gate and up, which the backward pass overwrites with their gradients
#     rotate    x cos + (-x_2, x_1) sin for queries and keys, in place, as is its backward pass
#
# The kernels are torch operators, since tensors on the meta device must pass through them, too, each as a single
# kernel (learner.tools.meta_run). Both formulas are those of transformers' Llama.


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns gate * sigmoid(gate) * up, all [..., f]; differentiable once. The backward pass overwrites `gate` and
    `up`."""
    found: Tensor = _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rotated queries and keys, [B, heads, L, D] each; differentiable once, in queries and keys. They are
    rotated in place if they are views of contiguous [B, L, heads, D].

    cos, sin: [B, L, D], whose two halves of D are equal.
    """
    found: tuple[Tensor, Tensor] = _Rotate.apply(query, key, cos, sin)  # type: ignore[no-untyped-call]
    return found


# Liger is imported when an operator is first called, since it imports Triton, which is there only with a GPU.
@torch.library.custom_op("gleaner::silu_mul", mutates_args=())
def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import swiglu_forward

    product: Tensor = swiglu_forward(gate, up)[2]
    return product


@_silu_mul.register_fake
def _meta_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("gleaner::silu_mul_backward_", mutates_args=("gate", "up"))
def _silu_mul_backward(gate: Tensor, up: Tensor, grad: Tensor) -> None:
    from liger_kernel.ops.swiglu import swiglu_backward

    swiglu_backward(gate, up, grad)


@torch.library.custom_op("gleaner::rotate_", mutates_args=("query", "key"))
def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """Rotates in place; query and key are [B, heads, L, D], views of contiguous [B, L, heads, D]."""
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


# RMSNorm as one autograd function (Zhang and Sennrich 2019, 1910.07467).
#
#     y = w x r,   r = (mean(x^2) + eps)^(-1/2),   dx = r (a - n mean(a n)),   a = w dy,   n = r x
#
# transformers computes it by seven operations, each of which goes through [N, h]; autograd keeps two float32 tensors of
# them. Here only x in its own dtype and r, one number per row, are kept. As in transformers, everything in between is
# float32 and rounded once.

aten = torch.ops.aten


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, on_card: bool) -> Tensor:
    """Returns [..., h] for x [..., h] and weight [h] of the same dtype; differentiable once, in both."""
    found: Tensor = _RmsNorm.apply(x, weight, eps, on_card)  # type: ignore[no-untyped-call]
    return found


def fuse_norms(lm: nn.Module, *, on_card: bool) -> None:
    """Makes the modules of `lm` that compute an RMSNorm, and nothing else, compute it by rms_norm."""
    answers: dict[Any, bool] = {}
    for norm, eps in _candidates(lm):
        kind = (type(norm), eps, norm.weight.shape)
        if kind not in answers:
            answers[kind] = _agrees(norm, eps)
        if answers[kind]:
            # The method is replaced on the instance, so that no name of a module or weight changes.
            norm.forward = partial(_forward, norm, eps, on_card)


@torch.library.custom_op("gleaner::rms_norm", mutates_args=())
def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns y, and r in float32, on a GPU, where torch's operator is a single kernel. On the meta device torch would
    decompose its operator; this operator stays a single one there (learner.tools.meta_run)."""
    y, r = aten._fused_rms_norm(x, weight.shape, weight, eps)
    return y, r


@_normed.register_fake
def _meta_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, on_card: bool) -> Tensor:
        y: Tensor
        y, r = _normed(x, weight, eps) if on_card else aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, r)
        ctx.on_card = on_card
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, r = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        if ctx.on_card:  # torch has this operator only for GPUs
            to_x, to_weight = aten._fused_rms_norm_backward(grad, x, weight.shape, r, weight, wanted)
            return to_x, to_weight, None, None
        n = x * r  # float32, as r is
        to_weight = (grad * n).flatten(0, -2).sum(0).to(weight.dtype) if wanted[1] else None
        if not wanted[0]:
            return None, to_weight, None, None
        a = grad.float() * weight
        mean = (a * n).mean(-1, keepdim=True)
        return a.addcmul_(n, mean, value=-1).mul_(r).to(x.dtype), to_weight, None, None


def _forward(norm: Any, eps: float, on_card: bool, x: Tensor) -> Tensor:
    if x.dtype != norm.weight.dtype:
        plain: Tensor = type(norm).forward(norm, x)
        return plain
    return rms_norm(x, norm.weight, eps, on_card=on_card)


def _candidates(lm: nn.Module) -> Iterator[tuple[Any, float]]:
    """Yields the modules that may be norms, with their epsilon: modules with one weight vector and an epsilon, by any
    of transformers' names for it, whose forward pass takes a single argument (a second one, a gate, would be lost)."""
    for module in lm.modules():
        weights = dict(module.named_parameters())
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if list(weights) != ["weight"] or weights["weight"].ndim != 1 or not isinstance(eps, float):
            continue
        if len(signature(module.forward).parameters) == 1:
            yield module, eps


def _agrees(norm: nn.Module, eps: float) -> bool:
    """Tries whether the module computes an RMSNorm, on rows of which one is so small that epsilon matters."""
    with torch.device("cpu"), torch.no_grad():  # with new weights: the model's may be on the meta device, or sharded
        random = torch.Generator().manual_seed(0)
        trial: Any = copy.copy(norm)
        shape: torch.Size = trial.weight.shape
        trial._parameters = {"weight": nn.Parameter(torch.empty(shape).normal_(generator=random))}
        x = torch.randn(3, len(trial.weight), generator=random) * torch.tensor([[1.0], [30.0], [eps**0.5]])
        try:
            found = trial(x)
        except (TypeError, ValueError, RuntimeError, AttributeError):  # the module needs other shapes
            return False
        return isinstance(found, Tensor) and torch.allclose(found, F.rms_norm(x, x.shape[1:], trial.weight, eps))


log = logging.getLogger("learner")

MLP = ("gate_proj", "up_proj", "down_proj")
ROTARY = "apply_rotary_pos_emb"
Rotary = Callable[..., tuple[Tensor, Tensor]]


def fuse(lm: nn.Module, run: Callable[[], object], *, on_card: bool) -> None:
    """Replaces the parts of `lm` that can be replaced; other parts stay as they are. `run`: runs a forward pass."""
    group(lm)
    fuse_lora(lm, run, on_card=on_card)
    fuse_frozen(lm, on_card=on_card)


def fuse_frozen(lm: nn.Module, *, on_card: bool) -> None:
    """Does what `fuse` does for a model without an adapter, for which no forward pass is needed."""
    fuse_norms(lm, on_card=on_card)
    if on_card:
        _fuse_mlps(lm)
        _fuse_rotary(lm)


def _fuse_mlps(lm: nn.Module) -> None:
    mlps: list[Any] = [module for module in lm.modules() if all(hasattr(module, name) for name in MLP)]
    fused = [mlp for mlp in mlps if _is_swiglu(mlp)]
    for mlp in fused:
        # The method is replaced on the instance, so that no name of a module or weight changes.
        mlp.forward = partial(_mlp, mlp)
    log.info("SwiGLU by Liger's kernel: %d of %d MLPs; the plan counts on all but Gemma's", len(fused), len(mlps))


def _fuse_rotary(lm: nn.Module) -> None:
    forwards = {kind: _with_rotate(kind) for kind in {type(part) for part in lm.modules()}}
    for part in lm.modules():
        if (forward := forwards[type(part)]) is not None:
            part.forward = MethodType(forward, part)


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    output: Tensor = mlp.down_proj(silu_mul(mlp.gate_proj(x), mlp.up_proj(x)))
    return output


def _is_swiglu(mlp: nn.Module) -> bool:
    """Tries whether an MLP is a SwiGLU, also with gates so large that a limit on them would be seen."""
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        trial: Any = copy.copy(mlp)
        trial._modules = mlp._modules | {name: nn.Linear(4, 4) for name in MLP}
        x = torch.cat([scale * torch.linspace(-3, 3, 12).view(3, 4) for scale in (1, 1000)])
        wanted = trial.down_proj(F.silu(trial.gate_proj(x)) * trial.up_proj(x))
        try:
            return torch.equal(type(mlp).forward(trial, x), wanted)
        except (TypeError, RuntimeError, AttributeError):  # the MLP needs other arguments, shapes or layers
            return False


def _with_rotate(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """Returns the forward pass of an attention with `rotate` under the name of its rotary embedding; None if the class
    calls no such function, or the function computes something else."""
    forward: Any = kind.forward
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if ROTARY not in names or not _is_rotation(forward.__globals__[ROTARY]):
        return None
    return with_globals(forward, {ROTARY: partial(_rotary, forward.__globals__[ROTARY])})


def with_globals(function: Any, others: dict[str, Any]) -> Callable[..., Any]:
    """Returns a copy of a function of Python that finds `others` under their global names; the function itself, and its
    module, stay as they are."""
    own = function.__globals__ | others
    copied = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _rotary(plain: Rotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    if options or cos.shape[-1] != q.shape[-1]:
        return plain(q, k, cos, sin, **options)
    return rotate(q, k, cos, sin)


def _is_rotation(plain: Rotary) -> bool:
    """Tries whether a function computes x cos + (-x_2, x_1) sin if the two halves of cos, and of sin, are equal."""
    with torch.device("cpu"), torch.no_grad():
        random = torch.Generator().manual_seed(0)
        q, k, angles = (torch.randn(1, *shape, generator=random) for shape in ((4, 3, 8), (2, 3, 8), (3, 4)))
        cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
        wanted = [x * cos[:, None] + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin[:, None] for x in (q, k)]
        try:
            found = plain(q, k, cos, sin)
            return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
        except (TypeError, RuntimeError, ValueError):  # the function needs other arguments or shapes
            return False
