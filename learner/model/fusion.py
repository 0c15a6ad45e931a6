"""Which parts of a model are computed by operations of ours instead of transformers' and PEFT's: found by trying.

Everywhere LoRA layers (learner.model.lora_groups) and norms (learner.model.fused_norm); on a card also the MLPs and the
rotary embedding (learner.model.card_ops), which are tried here, on small tensors on the CPU.

An MLP is one whose forward pass is down(silu(gate(x)) * up(x)), tried with small layers in the place of its own. The
rotary embedding is a function that an attention's forward pass in transformers calls by its global name; the model gets
a copy of that pass, which finds another function under the name, and other models of the process keep theirs.
"""

import copy
import logging
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.model.card_ops import rotate, silu_mul
from learner.model.fused_norm import fuse_norms
from learner.model.lora_groups import fuse as fuse_lora

log = logging.getLogger("learner")

MLP = ("gate_proj", "up_proj", "down_proj")
ROTARY = "apply_rotary_pos_emb"
Rotary = Callable[..., tuple[Tensor, Tensor]]


def fuse(lm: nn.Module, run: Callable[[], object], *, on_card: bool) -> None:
    """Exchanges what can be; other kinds stay as they are. `run`: one pass through the model."""
    fuse_lora(lm, run, on_card=on_card)
    fuse_frozen(lm, on_card=on_card)


def fuse_frozen(lm: nn.Module, *, on_card: bool) -> None:
    """The same of a model without an adapter, for which no pass is needed."""
    fuse_norms(lm, on_card=on_card)
    if on_card:
        _fuse_mlps(lm)
        _fuse_rotary(lm)


def _fuse_mlps(lm: nn.Module) -> None:
    mlps: list[Any] = [module for module in lm.modules() if all(hasattr(module, name) for name in MLP)]
    fused = [mlp for mlp in mlps if _is_swiglu(mlp)]
    for mlp in fused:
        # On the instance, as learner.model.activation_checkpointing does it: no name changes.
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
    """Also where gates are so large that a limit on them would show."""
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        trial: Any = copy.copy(mlp)
        trial._modules = mlp._modules | {name: nn.Linear(4, 4) for name in MLP}
        x = torch.cat([scale * torch.linspace(-3, 3, 12).view(3, 4) for scale in (1, 1000)])
        wanted = trial.down_proj(F.silu(trial.gate_proj(x)) * trial.up_proj(x))
        try:
            return torch.equal(type(mlp).forward(trial, x), wanted)
        except (TypeError, RuntimeError, AttributeError):  # it wants other arguments, shapes or layers
            return False


def _with_rotate(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The forward pass of an attention with rotate under the name of its rotary embedding, if that is one."""
    forward: Any = kind.forward
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if ROTARY not in names or not _is_rotation(forward.__globals__[ROTARY]):
        return None
    own = forward.__globals__ | {ROTARY: partial(_rotary, forward.__globals__[ROTARY])}
    copied = FunctionType(forward.__code__, own, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _rotary(plain: Rotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    if options or cos.shape[-1] != q.shape[-1]:
        return plain(q, k, cos, sin, **options)
    return rotate(q, k, cos, sin)


def _is_rotation(plain: Rotary) -> bool:
    """Whether it is x cos + (-x_2, x_1) sin, where the halves of cos, and of sin, are alike."""
    with torch.device("cpu"), torch.no_grad():
        random = torch.Generator().manual_seed(0)
        q, k, angles = (torch.randn(1, *shape, generator=random) for shape in ((4, 3, 8), (2, 3, 8), (3, 4)))
        cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
        wanted = [x * cos[:, None] + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin[:, None] for x in (q, k)]
        try:
            found = plain(q, k, cos, sin)
            return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
        except (TypeError, RuntimeError, ValueError):  # it wants other arguments or shapes
            return False
