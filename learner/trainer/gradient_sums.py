"""The gradient of a step as the sum of those of its micro-batches, on whichever ranks they were computed.

Float32 sums depend on their order, hence on the number of ranks and on who had which micro-batch. The exact sums here
do not: every number is cut into two parts on fixed grids, and each part is summed without any rounding.

Of a float32 number x, |x| < 2^24, the high part h is x rounded to a multiple of 2^-14, and the low part l is x - h
rounded to a multiple of 2^-53. In float64, with its 53 bits, all of it is exact:

- h: adding 1.5 * 2^38 gives a number between 2^38 and 2^39, whose neighbours are 2^-14 apart, so the addition rounds to
  that grid, and the subtraction that follows is of two multiples of 2^-14 and loses nothing.
- x - h: 0 if x is on the grid, x if it is below 2^-15; else at most 2^-15, and a multiple of x's last bit, 2^-38 at
  the least.
- l: likewise by 0.75: what comes out lies between 1/2 and 1, whose neighbours are 2^-53 apart.
- A sum of up to 2^15 high parts is a multiple of 2^-14 up to 2^39, one of low parts a multiple of 2^-53 up to 1: 53
  bits each. So are all sums of some of them, whatever the order: no addition rounds, on any device or by any
  all-reduce.

What is lost: x beyond 2^-53, 1e-16, which no number from 2e-9 on has, and which AdamW's epsilon of 1e-8 buries. The sum
of both parts is rounded to float32 once. A number that is not finite, or not below 2^24, makes the whole sum nan, on
every rank.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from learner.config.settings import LearnerConfig

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
