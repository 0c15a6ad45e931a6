"""The mismatch of each token that a batch was trained on: learner's logprob minus sampler's. For people who look at a
run: nothing is computed from it, and nothing of the step waits for it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

PER_ROW = pa.list_(pa.float16())


class TokenMismatch:
    """Of one batch at a time. Letters: R rows of the batch, M their tokens, N the trained tokens of a micro-batch."""

    def __init__(self) -> None:
        self._lengths: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._parts: list[tuple[Tensor, Tensor]] = []

    def begin(self, lengths: npt.NDArray[np.int64]) -> None:
        """Forgets the batch before. lengths: [R] tokens of each row."""
        self._lengths, self._parts = lengths, []

    def note(self, places: Tensor, began_with: Tensor, behavior: Tensor) -> None:
        """A micro-batch. places: [N] where in [M] each token stands. began_with, behavior: [N] logprobs in nats, of the
        policy that the batch began with and of the sampler. It stays where it is until it is asked for."""
        self._parts.append((places, (began_with.detach() - behavior).half()))

    def rows(self) -> pa.Array:
        """[R] lists of float16 nats, nan where the policy did not sample the token; null: the row was not trained on. A
        micro-batch that was taken again counts as it was taken last."""
        known = np.full(int(self._lengths.sum()), math.nan, np.float16)
        for places, values in self._parts:
            known[places.cpu().numpy()] = values.cpu().numpy()
        offsets = np.concatenate([[0], np.cumsum(self._lengths)])
        trained = [not np.isnan(known[a:b]).all() for a, b in pairwise(offsets)]
        return _lists(known, offsets, trained)


def _lists(values: npt.NDArray[np.float16], offsets: npt.NDArray[np.int64], known: Sequence[bool]) -> pa.Array:
    """Rows that are not known take no room."""
    rows = [values[a:b] if there else None for (a, b), there in zip(pairwise(offsets), known, strict=True)]
    return pa.array(rows, PER_ROW)
