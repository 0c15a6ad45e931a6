"""Micro-batches in which whole sequences are read, the last token of each completion included: for what is said of a
sequence, where the learner's own leave out the token that predicts nothing. Letters: those of learner.batch.rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from learner.batch.micro_batch import MicroBatch, micro_batches
from learner.batch.rows import Rows, ranges


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """A micro-batch, and of each of its completions which it is and where its sequence ends."""

    batch: MicroBatch  # of its fields only ids, positions and layout mean something
    rows: npt.NDArray[np.int64]  # [C] index in Rows
    ends: Int[Tensor, " C"]  # int64, position in the flattened ids of the token that speaks for the sequence

    @property
    def ids(self) -> Int[Tensor, "B L"]:
        """Of the micro-batch."""
        return self.batch.ids

    def idle_copy(self) -> "WholeBatch":
        """Itself: it is read, and never learned from."""
        return self


def whole_batches(
    rows: Rows, token_budget: int, *, packed: bool, pad: int | None, fine: int | None = None
) -> list[WholeBatch]:
    """All completions of the batch, the largest micro-batch first.

    Args:
        token_budget, fine: as in learner.batch.micro_batch.micro_batches.
        pad: the model's padding token, or None. The sequence ends with its last token that is not this one, as in
            transformers' sequence classification; the first, where all are.
    """
    longer = _with_room(rows)
    every = np.ones(len(rows.lengths))
    batches = micro_batches(
        longer, np.zeros(len(longer.completions)), every, every > 0, token_budget, packed=packed, fine=fine
    )
    after = np.array([_after_last(rows, row, pad) for row in range(len(rows.lengths))])
    found = []
    for batch in batches:
        first = (batch.lengths.cumsum(0) - batch.lengths).numpy()  # of each completion, among the tokens of the batch
        own = np.searchsorted(longer.starts, batch.places.numpy()[first], side="right") - 1
        # Token 0 is predicted at the prompt's last token, token t at token t - 1; the prompt lies before in one piece.
        ends = batch.index.numpy()[first + np.maximum(after[own], 0)] + np.minimum(after[own], 0)
        found.append(WholeBatch(batch, own, torch.from_numpy(ends)))
    return found


def _after_last(rows: Rows, row: int, pad: int | None) -> int:
    """Where in the completion the token after the sequence's last would stand; below 0 in the prompt."""
    prompt, start = rows.prompts[row], int(rows.starts[row])
    ids = np.concatenate([prompt, rows.completions[start : start + int(rows.lengths[row])]])
    real = np.flatnonzero(ids != pad) if pad is not None else np.array([len(ids) - 1])
    return (int(real[-1]) if len(real) else 0) + 1 - len(prompt)


def _with_room(rows: Rows) -> Rows:
    """The same completions with one token more each, which the micro-batches leave out in place of the last."""
    tokens = np.zeros(len(rows.completions) + len(rows.lengths), rows.completions.dtype)
    tokens[ranges(rows.starts + np.arange(len(rows.lengths)), rows.lengths)] = rows.completions
    return Rows(
        rewards=rows.rewards,
        prompts=rows.prompts,
        completions=tokens,
        behavior=tokens.astype(np.float32),
        versions=tokens,
        lengths=rows.lengths + 1,
        truncated=rows.truncated,
    )
