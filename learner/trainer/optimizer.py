"""The update: AdamW or its 8-bit forms, the learning rate of each step, and float16's loss scale."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cluster.memory.shape import STATE_BYTES
from learner.config.settings import LearnerConfig, OptimizerConfig

# The gradient of a step as the sum of those of its micro-batches, on whichever ranks they were computed.
#
# Float32 sums depend on their order, hence on the number of ranks and on who had which micro-batch. The exact sums here
# do not: every number is cut into two parts on fixed grids, and each part is summed without any rounding.
#
# Of a float32 number x, |x| < 2^24, the high part h is x rounded to a multiple of 2^-14, and the low part l is x - h
# rounded to a multiple of 2^-53. In float64, with its 53 bits, all of it is exact:
#
# - h: adding 1.5 * 2^38 gives a number between 2^38 and 2^39, whose neighbours are 2^-14 apart, so the addition rounds
# to
#   that grid, and the subtraction that follows is of two multiples of 2^-14 and loses nothing.
# - x - h: 0 if x is on the grid, x if it is below 2^-15; else at most 2^-15, and a multiple of x's last bit, 2^-38 at
#   the least.
# - l: likewise by 0.75: what comes out lies between 1/2 and 1, whose neighbours are 2^-53 apart.
# - A sum of up to 2^15 high parts is a multiple of 2^-14 up to 2^39, one of low parts a multiple of 2^-53 up to 1: 53
#   bits each. So are all sums of some of them, whatever the order: no addition rounds, on any device or by any
#   all-reduce.
#
# What is lost: x beyond 2^-53, 1e-16, which no number from 2e-9 on has, and which AdamW's epsilon of 1e-8 buries. The
# sum of both parts is rounded to float32 once. A number that is not finite, or not below 2^24, makes the whole sum nan,
# on every rank.

# The ranks among which the micro-batches of a step are divided, as one of them sees the others.

T = TypeVar("T")


class Peers(Protocol):
    """All ranks call the same methods in the same order; each call waits for the others.

    Attributes:
        rank: this one, from 0. count: of all. sharded: whether the base is divided among them, so that every pass of
            one is one of all.
    """

    rank: int
    count: int
    sharded: bool

    def sum(self, values: Tensor) -> None:
        """In place: the sum of what all ranks give, in an order that nobody knows."""

    def gather(self, own: T) -> list[T]:
        """What each rank gives, by rank: plain values and tensors only. From several ranks come lists for tuples, and
        tensors in main memory."""


class Alone(Peers):
    """A learner of one process."""

    rank = 0
    count = 1
    sharded = False

    def sum(self, values: Tensor) -> None:
        """They are the sum."""

    def gather(self, own: T) -> list[T]:
        return [own]


HIGH, LOW = 1.5 * 2.0**38, 0.75  # added and taken off again, they round to their grids
LIMIT = 2.0**24
ON_CPU, ON_CARD = 2**17, 2**22  # numbers at a time: what a core's cache holds; what keeps a card busy

LEAST_ON_CPU, LEAST_ON_CARD = 512, 4096  # tokens of a micro-batch that keep it busy


class GradientSums(Protocol):
    """clear, then add after each micro-batch, whose gradient the weights hold; then finish, on all ranks together."""

    def clear(self) -> None:
        """Forgets what was added."""

    def add(self) -> None:
        """Takes the gradient of a micro-batch from the weights."""

    def finish(self) -> None:
        """Gives the weights the sum over all ranks."""


class FloatSums(GradientSums):
    """In float32, where the weights themselves keep them, in the order of the micro-batches and then of the ranks."""

    def __init__(self, weights: Iterable[Tensor], peers: Peers) -> None:
        self._weights, self._peers = list(weights), peers

    def clear(self) -> None:
        """Whoever takes the micro-batches clears the weights."""

    def add(self) -> None:
        """The next gradient is added to it."""

    def finish(self) -> None:
        if self._peers.count == 1 or not self._weights:
            return
        parts = [_gradient(weight).flatten() for weight in self._weights]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]  # a tied embedding is large
        self._peers.sum(flat)
        _give(self._weights, flat)


class _Block(NamedTuple):
    """Weights whose gradients are added at once, as [start, stop) of all."""

    weights: Sequence[Tensor]
    start: int
    stop: int


class ExactSums(GradientSums):
    """In two float64 parts, of 8 bytes a weight each; any order and division gives the same bits."""

    def __init__(self, weights: Iterable[Tensor], peers: Peers) -> None:
        self._weights, self._peers = list(weights), peers
        device = self._weights[0].device
        self._blocks = _blocks(self._weights, ON_CARD if device.type == "cuda" else ON_CPU)
        self._size = self._blocks[-1].stop
        widest = max(block.stop - block.start for block in self._blocks)
        self._scratch = torch.empty(2, widest, dtype=torch.float64, device=device)
        # High parts, low parts, and how many blocks had a number that is none of them.
        self._sums = torch.zeros(2 * self._size + 1, dtype=torch.float64, device=device)

    def clear(self) -> None:
        self._sums.zero_()

    @torch.no_grad()
    def add(self) -> None:
        for weights, start, stop in self._blocks:
            rest, part = self._scratch[:, : stop - start]
            torch.cat([_gradient(weight).flatten() for weight in weights], out=rest)
            torch.add(rest, HIGH, out=part).sub_(HIGH)
            least, most = part.aminmax()
            self._sums[-1] += ~((least > -LIMIT) & (most < LIMIT))  # a nan is neither
            self._sums[start:stop] += part
            rest.sub_(part).add_(LOW).sub_(LOW)
            self._sums[self._size + start : self._size + stop] += rest
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        self._peers.sum(self._sums)
        high, low = self._sums[:-1].view(2, -1)
        flat = torch.empty(self._size, device=high.device)
        for _, start, stop in self._blocks:
            flat[start:stop] = rounded_sum(high[start:stop], low[start:stop])
        flat.masked_fill_(self._sums[-1] > 0, torch.nan)
        _give(self._weights, flat)


def rounded_sum(a: Tensor, b: Tensor) -> Tensor:
    """float32 nearest to a + b of float64 numbers, ties to even.

    Rounded to float64 first, a sum may come to lie in the middle of two float32 numbers and fall to the wrong side. So
    it is rounded to odd (Boldo and Melquiond 2008): of the two neighbours of a sum that is none, the one whose last bit
    is 1, which is never such a middle. Knuth's two-sum tells on which side the sum lies.
    """
    total = a + b
    other = total - a
    error = (a - (total - other)) + (b - other)
    bits = total.view(torch.int64)
    outwards = torch.where((error > 0) == (total > 0), 1, -1)  # bits count away from 0
    odd = torch.where((error != 0) & (bits & 1 == 0), bits + outwards, bits)
    return odd.view(torch.float64).float()


def gradient_sums(weights: Iterable[Tensor], config: LearnerConfig, peers: Peers) -> GradientSums:
    """By learner.reduce; `auto` has been settled for a run (Settings.settled_learner), and is else that of one rank."""
    return ExactSums(weights, peers) if config.reduce == "exact" else FloatSums(weights, peers)


def least_tokens(config: LearnerConfig, peers: Peers, device: torch.device) -> int | None:
    """Of a micro-batch where they are made for several ranks; None where not. With exact sums those of one rank are, so
    that it computes what several do."""
    if config.reduce != "exact" and peers.count == 1:
        return None
    return LEAST_ON_CARD if device.type == "cuda" else LEAST_ON_CPU


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _give(weights: Sequence[Tensor], flat: Tensor) -> None:
    for weight, part in zip(weights, torch.split(flat, [weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)


def _blocks(weights: Sequence[Tensor], most: int) -> list[_Block]:
    """Neighbours of together at most so many numbers, or one weight that has more."""
    blocks: list[_Block] = []
    for weight in weights:
        last = blocks[-1] if blocks else _Block([], 0, 0)
        stop = last.stop + weight.numel()
        if blocks and stop - last.start <= most:
            blocks[-1] = _Block([*last.weights, weight], last.start, stop)
        else:
            blocks.append(_Block([weight], last.stop, stop))
    return blocks


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
