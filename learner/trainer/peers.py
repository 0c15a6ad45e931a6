"""The ranks among which the micro-batches of a step are divided, as one of them sees the others."""

from typing import Protocol, TypeVar

from torch import Tensor

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
