"""RMSNorm as one operation with a gradient of its own (Zhang and Sennrich 2019, 1910.07467).

    y = w x r,   r = (mean(x^2) + eps)^(-1/2),   dx = r (a - n mean(a n)),   a = w dy,   n = r x

transformers writes it as seven operations, each of which goes through [N, h] and of which autograd keeps two tensors in
float32. Here x is kept as it is and r, one number a row; everything in between is float32, as there, and rounded once.
"""

import copy
from collections.abc import Iterator
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, on_card: bool) -> Tensor:
    """[..., h] from x [..., h] and weight [h] of one type; differentiable once, in both."""
    found: Tensor = _RmsNorm.apply(x, weight, eps, on_card)  # type: ignore[no-untyped-call]
    return found


def fuse_norms(lm: nn.Module, *, on_card: bool) -> None:
    """Makes those modules of `lm` that compute an RMSNorm, and nothing else, compute it by rms_norm."""
    answers: dict[Any, bool] = {}
    for norm, eps in _candidates(lm):
        kind = (type(norm), eps, norm.weight.shape)
        if kind not in answers:
            answers[kind] = _agrees(norm, eps)
        if answers[kind]:
            # On the instance, as learner.model.activation_checkpointing does it: no name changes.
            norm.forward = partial(_forward, norm, eps, on_card)


@torch.library.custom_op("gleaner::rms_norm", mutates_args=())
def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y, and r in float32, on a card, where torch's operator is one kernel. Tensors without content take it apart
    (learner.tools.meta_run); an operator of our own stays one for them, too."""
    y, r = aten._fused_rms_norm(x, weight.shape, weight, eps)
    return y, r


@_normed.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
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
        if ctx.on_card:  # torch has this operator for cards alone
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
    """Modules with one vector of weights and an epsilon, by any of the names that transformers gives it, which take the
    states alone: a gate beside them would be lost."""
    for module in lm.modules():
        weights = dict(module.named_parameters())
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if list(weights) != ["weight"] or weights["weight"].ndim != 1 or not isinstance(eps, float):
            continue
        if len(signature(module.forward).parameters) == 1:
            yield module, eps


def _agrees(norm: nn.Module, eps: float) -> bool:
    """Whether it is an RMSNorm, by trying: on rows of which one is so small that epsilon matters."""
    with torch.device("cpu"), torch.no_grad():  # the model's own may be without content, or in shards
        random = torch.Generator().manual_seed(0)
        trial: Any = copy.copy(norm)
        shape: torch.Size = trial.weight.shape
        trial._parameters = {"weight": nn.Parameter(torch.empty(shape).normal_(generator=random))}
        x = torch.randn(3, len(trial.weight), generator=random) * torch.tensor([[1.0], [30.0], [eps**0.5]])
        try:
            found = trial(x)
        except (TypeError, ValueError, RuntimeError, AttributeError):  # it wants other shapes
            return False
        return isinstance(found, Tensor) and torch.allclose(found, F.rms_norm(x, x.shape[1:], trial.weight, eps))
