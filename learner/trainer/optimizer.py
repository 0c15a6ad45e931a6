"""The optimizer step: sums of gradients over micro-batches and ranks (GradientSums), then AdamW or its 8-bit forms on
float32 masters (Updater) or on bfloat16 weights (RoundedUpdater), with clipping and float16's loss scale.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cluster.memory.shape import STATE_BYTES
from learner.config.settings import LearnerConfig, OptimizerConfig

T = TypeVar("T")


class Peers(Protocol):
    """The ranks among which the micro-batches of a step are divided, from the point of view of one rank.

    The methods are collective: all ranks call them in the same order, and each call waits for the others.

    Attributes:
        rank: number of this rank, from 0.
        count: number of all ranks.
        sharded: whether the base is divided among the ranks, so that all ranks must run every forward pass together.
    """

    rank: int
    count: int
    sharded: bool

    def sum(self, values: Tensor) -> None:
        """Sets `values` to the sum over all ranks; the order of the additions is not defined."""

    def gather(self, own: T) -> list[T]:
        """Returns what each rank gives, by rank: plain values and tensors only. With several ranks tuples come back as
        lists, and tensors in main memory."""


class Alone(Peers):
    """The Peers of a learner of one process."""

    rank = 0
    count = 1
    sharded = False

    def sum(self, values: Tensor) -> None:
        """Does nothing: with one rank the values are their sum."""

    def gather(self, own: T) -> list[T]:
        return [own]


# Exact sums. A float32 sum depends on the order of its terms, so on the number of ranks and on which rank had which
# micro-batch. The sums of ExactSums do not: every number is split into two parts on fixed grids, and each part is
# summed without any rounding.
#
# The high part h of a float32 number x, |x| < 2^24, is x rounded to a multiple of 2^-14; the low part l is x - h
# rounded to a multiple of 2^-53. In float64, with its 53 bits, all operations on them are exact:
#
# - h: adding 1.5 * 2^38 gives a number between 2^38 and 2^39, where float64 numbers are 2^-14 apart, so the addition
#   rounds to that grid. The subtraction that follows has two multiples of 2^-14 and loses nothing.
# - x - h is 0 if x is on the grid, and x if |x| is below 2^-15; else it is at most 2^-15, and a multiple of x's last
#   bit, which is at least 2^-38.
# - l: adding 0.75 gives a number between 1/2 and 1, where float64 numbers are 2^-53 apart; the rest is as for h.
# - A sum of up to 2^15 high parts is a multiple of 2^-14 up to 2^39, and a sum of low parts a multiple of 2^-53 up to
#   1: each fits 53 bits. So do all partial sums, whatever the order: no addition rounds, on any device or in any
#   all-reduce.
#
# Only the bits of x below 2^-53 (1e-16) are lost. Numbers from 2e-9 on have no such bits, and AdamW's epsilon of 1e-8
# outweighs them. The sum of both parts is rounded to float32 once. A number that is not finite, or not below 2^24,
# makes the whole sum nan on every rank.

HIGH, LOW = 1.5 * 2.0**38, 0.75  # adding and subtracting them rounds to the grids of high and low parts
LIMIT = 2.0**24
ON_CPU, ON_CARD = 2**17, 2**22  # numbers summed at a time: as many as a core's cache holds, or as keep a GPU busy

LEAST_ON_CPU, LEAST_ON_CARD = 512, 4096  # least tokens of a micro-batch that keep a CPU or a GPU busy


class GradientSums(Protocol):
    """The sum of the gradients of a step's micro-batches over all ranks.

    Use: `clear`; `add` after the backward pass of each micro-batch; then `finish`, on all ranks together.
    """

    def clear(self) -> None:
        """Sets the sums to zero."""

    def add(self) -> None:
        """Adds the gradient of a micro-batch, which is in `grad` of the weights."""

    def finish(self) -> None:
        """Sets `grad` of the weights to the sum over all ranks."""


class FloatSums(GradientSums):
    """Sums in float32, accumulated in `grad` of the weights: over the micro-batches of a rank, then over the ranks."""

    def __init__(self, weights: Iterable[Tensor], peers: Peers) -> None:
        self._weights, self._peers = list(weights), peers

    def clear(self) -> None:
        """Does nothing: the caller clears the weights' gradients."""

    def add(self) -> None:
        """Does nothing: autograd adds the next gradient to `grad`."""

    def finish(self) -> None:
        if self._peers.count == 1 or not self._weights:
            return
        parts = [_gradient(weight).flatten() for weight in self._weights]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]  # a single weight, perhaps large, is not copied
        self._peers.sum(flat)
        _give(self._weights, flat)


class _Block(NamedTuple):
    """Weights whose gradients are added at once; they are the numbers [start, stop) of all weights."""

    weights: Sequence[Tensor]
    start: int
    stop: int


class ExactSums(GradientSums):
    """Exact sums, in two float64 parts of 8 bytes per weight each. The result has the same bits whatever the order of
    the micro-batches and however they are divided among ranks."""

    def __init__(self, weights: Iterable[Tensor], peers: Peers) -> None:
        self._weights, self._peers = list(weights), peers
        device = self._weights[0].device
        self._blocks = _blocks(self._weights, ON_CARD if device.type == "cuda" else ON_CPU)
        self._size = self._blocks[-1].stop
        widest = max(block.stop - block.start for block in self._blocks)
        self._scratch = torch.empty(2, widest, dtype=torch.float64, device=device)
        # The sums of high parts, those of low parts, and the number of blocks that held a number beyond LIMIT or nan.
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
            self._sums[-1] += ~((least > -LIMIT) & (most < LIMIT))  # written so that nan counts, too
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
    """Returns the float32 number nearest to the exact a + b of float64 numbers, ties to even.

    A sum that is rounded to float64 first may land in the middle between two float32 numbers and then be rounded to the
    wrong side. So it is rounded to odd (Boldo and Melquiond 2008): an inexact sum becomes the neighbouring float64
    number whose last bit is 1, which is never such a middle. Knuth's two-sum gives the error of the float64 sum.
    """
    total = a + b
    other = total - a
    error = (a - (total - other)) + (b - other)
    bits = total.view(torch.int64)
    outwards = torch.where((error > 0) == (total > 0), 1, -1)  # adding 1 to the bits moves a number away from 0
    odd = torch.where((error != 0) & (bits & 1 == 0), bits + outwards, bits)
    return odd.view(torch.float64).float()


def gradient_sums(weights: Iterable[Tensor], config: LearnerConfig, peers: Peers) -> GradientSums:
    """Returns the sums that learner.reduce names. A run replaces `auto` before (Settings.settled_learner); elsewhere
    `auto` means float32 sums."""
    return ExactSums(weights, peers) if config.reduce == "exact" else FloatSums(weights, peers)


def least_tokens(config: LearnerConfig, peers: Peers, device: torch.device) -> int | None:
    """Returns the least tokens of a micro-batch where a batch is divided for several ranks; None where it is not. With
    exact sums one rank divides the batch, too, so that it computes what several ranks do."""
    if config.reduce != "exact" and peers.count == 1:
        return None
    return LEAST_ON_CARD if device.type == "cuda" else LEAST_ON_CPU


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _give(weights: Sequence[Tensor], flat: Tensor) -> None:
    for weight, part in zip(weights, torch.split(flat, [weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)


def _blocks(weights: Sequence[Tensor], most: int) -> list[_Block]:
    """Joins neighbouring weights into blocks of at most `most` numbers; a larger weight is a block by itself."""
    blocks: list[_Block] = []
    for weight in weights:
        last = blocks[-1] if blocks else _Block([], 0, 0)
        stop = last.stop + weight.numel()
        if blocks and stop - last.start <= most:
            blocks[-1] = _Block([*last.weights, weight], last.start, stop)
        else:
            blocks.append(_Block([weight], last.stop, stop))
    return blocks


# FIRST_LOSS_SCALE is half of torch's default, with which the gradient of a small batch overflows.
FIRST_LOSS_SCALE = 2.0**15
STATES = ("state1", "state2")  # names of bitsandbytes' optimizer states of a byte for each weight


class Updater:
    """Optimizer, clipping and loss scale for float32 weights. Their `grad` holds the gradient of the scaled loss.

    norm: returns the norm of all gradients, where these weights are only a rank's shards of them
        (learner.trainer.trainer.DividedNorm); None: the norm is that of these weights' gradients.
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
        # float16 gradients below 6e-8 would be 0, so the loss is scaled up, and the float32 gradients are scaled down.
        self._scaler = torch.amp.GradScaler(device.type, init_scale=FIRST_LOSS_SCALE, enabled=dtype == "float16")

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers: a single one for all weights."""
        return [self._optimizer]

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss, or its gradient, multiplied by the loss scale: what backward must be called with."""
        return self._scaler.scale(loss)

    def step(self, learning_rate: float, *, loss_is_finite: bool) -> tuple[float, bool]:
        """Updates the weights unless loss or gradient norm is not finite. Returns (gradient norm before clipping,
        whether the weights were updated)."""
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
        """Returns the bytes of optimizer states that the first update will allocate on the device; 0 once they
        exist."""
        if self._optimizer.state:
            return 0
        return STATE_BYTES[self._config.optimizer.kind] * sum(weight.numel() for weight in self._weights)

    @property
    def may_overflow(self) -> bool:
        """Whether the loss scale, not the model, may be to blame for a gradient that is not finite."""
        return self._scaler.is_enabled() and self._scaler.get_scale() > 1.0

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values only, which torch.load(weights_only=True) reads."""
        return {"optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._optimizer, state["optimizer"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])


def build_optimizer(weights: Sequence[Tensor], config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """Returns AdamW (1711.05101), or bitsandbytes' AdamW with 8-bit block-wise states (2110.02861); both run on CPU and
    CUDA.

    The paged kind keeps its states in CUDA's unified memory, which moves to the host when the device is full. Weight
    decay applies to matrices, not to norms and biases, which have one dimension. The caller sets the learning rate
    before each step.

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
        # The fused kind has the same result up to float32 rounding, without foreach's temporaries of 4 bytes per
        # weight. It refuses the meta device, which learner.tools.meta_run uses.
        return torch.optim.AdamW(groups, fused=device.type != "meta", **settings)
    if config.kind == "paged_adamw_8bit" and device.type != "cuda":
        raise ValueError(
            f"learner.optimizer.kind: paged_adamw_8bit needs CUDA's unified memory, got device {device}; set adamw_8bit"
        )
    from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit  # imported here: it is slow, and few runs use it

    kind: Any = PagedAdamW8bit if config.kind == "paged_adamw_8bit" else AdamW8bit
    optimizer: torch.optim.Optimizer = kind(groups, **settings)
    return optimizer


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the moments from `state`. Betas and weight decay stay as they are in this optimizer, since a resumed run
    may have changed them.

    Raises:
        ValueError: `state` is of an optimizer with other groups of weights.
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
    """Moves states that were read into main memory to where a first step would allocate them: large ones go into
    unified memory, since the device, for which the run was planned, has no room for them."""
    for weight, states in optimizer.state.items():
        for name, value in states.items():
            if name in STATES:
                states[name] = optimizer.get_state_buffer(weight, dtype=value.dtype)
                states[name].copy_(value)
            elif isinstance(value, Tensor):
                states[name] = value.to(weight.device)


# The update of bfloat16 weights without float32 masters: a whole model at 12 bytes per weight, or at 6.
#
# learner.mode full with adamw_rounded takes 2 bytes for the weight, 2 for its gradient and 8 for AdamW's two float32
# states; with an 8-bit optimizer the states take 2. Float32 masters and their gradients would take another 8. An update
# of 1e-6 would be lost in rounding to the nearest bfloat16 (2^-8 of the weight apart), so the sum is rounded up or down
# at random, with probabilities that make the mean exact (Gupta et al. 2015, 1502.02551; bfloat16 training without
# masters: 2010.06192). Each weight is float32 only during its update, and its gradient is freed right after that; no
# gradient is freed earlier, since clipping needs the norm of all. The cost is noise smaller than the distance of
# neighbouring bfloat16 numbers, and gradients that are summed in bfloat16.


class RoundedUpdater:
    """Does what Updater does for bfloat16 weights without float32 masters, with stochastic rounding and an optimizer
    for each weight. The gradients are in `grad` of the weights."""

    may_overflow = False  # bfloat16 has float32's range, so there is no loss scale

    def __init__(self, weights: Sequence[Tensor], config: LearnerConfig, device: torch.device) -> None:
        self._weights, self._config = list(weights), config
        self._optimizers = [build_optimizer([weight], config.optimizer, device) for weight in self._weights]

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss unchanged: there is no loss scale."""
        return loss

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, one for each weight."""
        return self._optimizers

    @torch.no_grad()
    def step(self, learning_rate: float, *, loss_is_finite: bool) -> tuple[float, bool]:
        """Updates the weights and frees their gradients, unless loss or gradient norm is not finite: then both stay as
        they are. Returns (gradient norm before clipping, whether the weights were updated)."""
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
            weight.grad = None  # freed before the weight becomes float32; torch refuses a gradient of another dtype
            weight.data = weight.data.float()
            weight.grad = gradient
            optimizer.step()
            del gradient
            weight.grad = None
            weight.data = rounded(weight.data)
        return norm, True

    def missing_state_bytes(self) -> int:
        """Returns the bytes of optimizer states that the first update will allocate on the device; 0 once they
        exist."""
        if any(o.state for o in self._optimizers):
            return 0
        return STATE_BYTES[self._config.optimizer.kind] * sum(weight.numel() for weight in self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values only, which torch.load(weights_only=True) reads."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for weight, optimizer, one in zip(self._weights, self._optimizers, state["optimizers"], strict=True):
            own = weight.data
            weight.data = own.float()  # torch gives loaded states the dtype of the weight, and they must be float32
            restore(optimizer, one)
            weight.data = own


def rounded(values: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, up or down at random so that the mean is `values`. The random numbers come from
    torch's default generator of the device.

    A bfloat16 number is the upper half of a float32 number, so 16 random bits are added to the lower half, which is
    then cut off.
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
    """Returns the updater for the weights: RoundedUpdater for bfloat16 weights without masters, else Updater."""
    if any(weight.dtype == torch.bfloat16 for weight in weights):
        return RoundedUpdater(weights, config, device)
    return Updater(weights, config, dtype=dtype, device=device, norm=norm)


def wants_masters(config: LearnerConfig) -> bool:
    """Whether the settings ask for float32 masters of the trained weights. A whole model has them only with the
    optimizer adamw, since masters and their gradients take 8 bytes per weight, or if it is sharded (_policy in
    learner.trainer.trainer)."""
    return config.mode == "lora" or config.optimizer.kind == "adamw"
