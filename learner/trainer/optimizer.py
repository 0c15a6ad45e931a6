"""The update: AdamW or its 8-bit forms, the learning rate of each step, and float16's loss scale."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cluster.memory.shape import STATE_BYTES
from learner.config.settings import LearnerConfig, OptimizerConfig

# Half of torch's first guess, which the gradient of a small batch overflows.
FIRST_LOSS_SCALE = 2.0**15
STATES = ("state1", "state2")  # of bitsandbytes, a byte for each weight


class Updater:
    """Optimizer and loss scale over float32 weights whose gradients, of the scaled loss, are in `weight.grad`.

    norm: of all gradients together, where these are not all there is (learner.trainer.trainer).
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        config: LearnerConfig,
        *,
        dtype: str,
        device: torch.device,
        norm: Callable[[], Tensor] | None = None,
    ) -> None:
        self._weights = list(weights)
        self._norm = norm or self._own_norm
        self._config = config
        self._optimizer = build_optimizer(self._weights, config.optimizer, device)
        # float16 gradients below 6e-8 would be 0, so the loss is scaled up and the float32 gradients down again.
        self._scaler = torch.amp.GradScaler(device.type, init_scale=FIRST_LOSS_SCALE, enabled=dtype == "float16")

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The one of all weights."""
        return [self._optimizer]

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return self._scaler.scale(loss)

    def step(self, learning_rate: float, *, loss_is_finite: bool) -> tuple[float, bool]:
        """(gradient norm before clipping, whether the weights were updated): not if loss or norm is not finite."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._scaler.unscale_(self._optimizer)
        total = self._norm()
        clip_grads_with_norm_(self._weights, self._config.optimizer.max_grad_norm, total)
        norm = float(total)
        finite = loss_is_finite and math.isfinite(norm)
        if finite:
            self._scaler.step(self._optimizer)
        self._scaler.update()
        return norm, finite

    def _own_norm(self) -> Tensor:
        return get_total_norm([weight.grad for weight in self._weights if weight.grad is not None])

    def missing_state_bytes(self) -> int:
        """Bytes of the states that the first update will allocate; 0 after it, and for states outside of the device."""
        if self._optimizer.state:
            return 0
        return STATE_BYTES[self._config.optimizer.kind] * sum(weight.numel() for weight in self._weights)

    @property
    def may_overflow(self) -> bool:
        """True while the loss scale, not the model, may be to blame for a gradient that is not finite."""
        return self._scaler.is_enabled() and self._scaler.get_scale() > 1.0

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that torch.load(weights_only=True) reads it."""
        return {"optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._optimizer, state["optimizer"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])


def build_optimizer(weights: Sequence[Tensor], config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (1711.05101), or bitsandbytes' AdamW with 8-bit block-wise states (2110.02861); both run on CPU and CUDA.

    The paged kind keeps its states in CUDA's unified memory, which moves to the host when the device is full.
    Matrices decay; norms and biases, which have one dimension, do not. The learning rate is set before each step.

    Raises:
        ValueError: the paged kind without CUDA.
    """
    settings: dict[str, Any] = {"betas": config.betas}
    groups = [
        {"params": own, "weight_decay": decay}
        for own, decay in (
            ([weight for weight in weights if weight.ndim > 1], config.weight_decay),
            ([weight for weight in weights if weight.ndim < 2], 0.0),
        )
        if own
    ]
    if config.kind in ("adamw", "adamw_rounded"):
        # Fused: the same numbers to float32's rounding, without foreach's temporaries of 4 bytes per weight. It refuses
        # the meta device (learner.tools.meta_run).
        return torch.optim.AdamW(groups, fused=device.type != "meta", **settings)
    if config.kind == "paged_adamw_8bit" and device.type != "cuda":
        raise ValueError(
            f"learner.optimizer.kind: paged_adamw_8bit needs CUDA's unified memory, got device {device}; set adamw_8bit"
        )
    from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit  # here: slow to import, and few runs use it

    kind: Any = PagedAdamW8bit if config.kind == "paged_adamw_8bit" else AdamW8bit
    optimizer: torch.optim.Optimizer = kind(groups, **settings)
    return optimizer


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The moments of `state`; betas and decay stay this optimizer's own, which a resumed run may have changed.

    Raises:
        ValueError: it is of an optimizer with other groups of weights.
    """
    own = [dict(group) for group in optimizer.param_groups]
    paged = {"move_to_device": False} if getattr(optimizer, "is_paged", False) else {}
    try:
        optimizer.load_state_dict(state, **paged)
    except ValueError as error:
        raise ValueError(
            "resume: the checkpoint's optimizer must have this version's groups of weights, matrices and, apart from "
            f"them, norms and biases, which do not decay: {error}. Start afresh from its weights (model.path, or "
            "model.adapter), under another name="
        ) from error
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
    if paged:
        _into_pages(optimizer)


def _into_pages(optimizer: Any) -> None:
    """The states that were read into main memory go where the optimizer makes those of a first step: the large ones
    into unified memory, for which a card that the run was planned for has no other room."""
    for weight, states in optimizer.state.items():
        for name, value in states.items():
            if name in STATES:
                states[name] = optimizer.get_state_buffer(weight, dtype=value.dtype)
                states[name].copy_(value)
            elif isinstance(value, Tensor):
                states[name] = value.to(weight.device)


# The update of bfloat16 weights that have no float32 masters: a whole model at 12 bytes per weight, or at 6.
#
# learner.mode full with adamw_rounded: 2 bytes for the weight, 2 for its gradient, 8 for AdamW's two float32 states;
# with an 8-bit optimizer the states take 2. Float32 masters and their gradients would be another 8. An update of 1e-6
# is lost when it is rounded to the nearest bfloat16 (2^-8 of the weight apart), so it is rounded up or down at random,
# with the chances that make the mean exact (Gupta et al. 2015, 1502.02551; bfloat16 training without masters:
# 2010.06192). One weight at a time is float32 for the length of its update, and its gradient is given back right after
# it; none is given back before the norm of all of them is known, which their clip needs. What this costs: noise below
# the step from one bfloat16 to the next, and gradients summed in bfloat16.


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
