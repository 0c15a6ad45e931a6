"""The update of bfloat16 weights that have no float32 masters: a whole model at 12 bytes per weight, or at 6.

learner.mode full with adamw_rounded: 2 bytes for the weight, 2 for its gradient, 8 for AdamW's two float32 states; with
an 8-bit optimizer the states take 2. Float32 masters and their gradients would be another 8. An update of 1e-6 is lost
when it is rounded to the nearest bfloat16 (2^-8 of the weight apart), so it is rounded up or down at random, with the
chances that make the mean exact (Gupta et al. 2015, 1502.02551; bfloat16 training without masters: 2010.06192). One
weight at a time is float32 for the length of its update, and its gradient is given back right after it; none is given
back before the norm of all of them is known, which their clip needs. What this costs: noise below the step from one
bfloat16 to the next, and gradients summed in bfloat16.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cluster.memory.units import STATE_BYTES
from learner.config.learner import LearnerConfig
from learner.trainer.optimizer import Updater, build_optimizer, restore


class RoundedUpdater:
    """Updater's part for bfloat16 weights whose gradients are in `weight.grad`; an optimizer for each."""

    may_overflow = False  # bfloat16 has float32's range: no loss scale

    def __init__(self, weights: Sequence[Tensor], config: LearnerConfig, device: torch.device) -> None:
        self._weights, self._config = list(weights), config
        self._optimizers = [build_optimizer([weight], config.optimizer, device) for weight in self._weights]

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: itself."""
        return loss

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One for each weight."""
        return self._optimizers

    @torch.no_grad()
    def step(self, learning_rate: float, *, loss_is_finite: bool) -> tuple[float, bool]:
        """(gradient norm before clipping, whether the weights were updated): not if loss or norm is not finite.

        The gradients are used up.
        """
        norms = [torch.linalg.vector_norm(w.grad, dtype=torch.float32) for w in self._weights if w.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        if not (loss_is_finite and math.isfinite(norm)):
            return norm, False
        share = min(1.0, self._config.optimizer.max_grad_norm / (norm + 1e-6))
        for weight, optimizer in zip(self._weights, self._optimizers, strict=True):
            if weight.grad is None:
                continue
            optimizer.param_groups[0]["lr"] = learning_rate
            gradient = weight.grad.float().mul_(share)
            weight.grad = None  # given back before the weight grows; and a gradient must be of its weight's type
            weight.data = weight.data.float()
            weight.grad = gradient
            optimizer.step()
            del gradient
            weight.grad = None
            weight.data = rounded(weight.data)
        return norm, True

    def missing_state_bytes(self) -> int:
        """Bytes of the states that the first update will allocate; 0 after it, and for states outside of the device."""
        if any(o.state for o in self._optimizers):
            return 0
        return STATE_BYTES[self._config.optimizer.kind] * sum(weight.numel() for weight in self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that torch.load(weights_only=True) reads it."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for weight, optimizer, one in zip(self._weights, self._optimizers, state["optimizers"], strict=True):
            own = weight.data
            weight.data = own.float()  # as when the states were made: torch gives them the type of their weight
            restore(optimizer, one)
            weight.data = own


def rounded(values: Tensor) -> Tensor:
    """float32 -> bfloat16, up or down at random so that the mean is `values`; by torch's own generator of the device.

    bfloat16 is the upper half of a float32: 16 random bits are added to the lower half, which is then cut off.
    """
    bits = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device)
    bits.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)


AnyUpdater = Updater | RoundedUpdater


def updater_for(
    weights: Sequence[Tensor],
    config: LearnerConfig,
    *,
    dtype: str,
    device: torch.device,
    norm: Callable[[], Tensor] | None = None,
) -> AnyUpdater:
    """The updater of float32 masters (see Updater), or of bfloat16 weights without."""
    if any(weight.dtype == torch.bfloat16 for weight in weights):
        return RoundedUpdater(weights, config, device)
    return Updater(weights, config, dtype=dtype, device=device, norm=norm)


def wants_masters(config: LearnerConfig) -> bool:
    """False where a whole model is to take less: float32 masters and their gradients are 8 bytes per weight."""
    return config.mode == "lora" or config.optimizer.kind == "adamw"
