"""The norm of a gradient of which each rank has some rows (learner.model.sharded_base)."""

from collections.abc import Iterable

from torch import Tensor
from torch.nn.utils import get_total_norm

from learner.trainer.peers import Peers


class DividedNorm:
    """whole: weights that every rank has, with the same gradient. rows: this rank's of the others. Each rank that calls
    it waits for the others, and gets the same number."""

    def __init__(self, whole: Iterable[Tensor], rows: Iterable[Tensor], peers: Peers) -> None:
        self._whole, self._rows, self._peers = list(whole), list(rows), peers

    def __call__(self) -> Tensor:
        square = _norm(self._rows).square().to(self._rows[0].device)
        self._peers.sum(square)
        return (square + _norm(self._whole).square()).sqrt()


def _norm(weights: Iterable[Tensor]) -> Tensor:
    return get_total_norm([weight.grad for weight in weights if weight.grad is not None])
