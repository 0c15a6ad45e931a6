"""Groups of rollouts -> padded micro-batches under a token budget.

Letters: P prompt tokens, T completion tokens, B rows (completions) of a micro-batch, L its padded length,
N completion tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from rollout.schema import check, ragged, rewards_of


@dataclass(frozen=True, slots=True)
class Rows:
    """The completions of one optimizer batch, group after group; token arrays are views into the Arrow tables."""

    rewards: list[npt.NDArray[np.float64]]  # one [G] per group, nan where a judge failed
    prompts: list[npt.NDArray[np.int32]]
    completions: list[npt.NDArray[np.int32]]
    behavior: list[npt.NDArray[np.float32]]  # logprobs of the sampler, nats
    versions: list[npt.NDArray[np.int32]]  # policy version of each completion token
    lengths: npt.NDArray[np.int64]  # T of each completion


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass needs. Every [N] tensor speaks of completion tokens, row after row."""

    ids: Tensor  # [B, L] int64, right-padded with 0; the last token of a row predicts nothing and is left out
    index: Tensor  # [N] int64, position in the flattened [B * L] of the state that predicts the token
    targets: Tensor  # [N] int64 token ids
    behavior: Tensor  # [N] float32, logprobs of the sampler
    versions: Tensor  # [N] int32
    advantages: Tensor  # [N] float32
    coefficients: Tensor  # [N] float32, weight of the token in the loss of the whole optimizer batch

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        return MicroBatch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def read(groups: Sequence[pa.Table]) -> Rows:
    """The columns that the learner needs.

    Raises:
        ValueError: a table is not of rollout.schema, a prompt is empty, the lists of one completion differ in length,
            or a logprob is not finite (masked as a ratio, it would go unseen).
    """
    columns: dict[str, list[npt.NDArray[Any]]] = {
        name: [row for group in groups for row in ragged(check(group), name)]
        for name in ("prompt_ids", "completion_ids", "behavior_logprobs", "token_versions")
    }
    prompts, completions, behavior, versions = columns.values()
    for row, (prompt, tokens, logprobs, version) in enumerate(zip(*columns.values(), strict=True)):
        if len(prompt) == 0:
            raise ValueError(f"prompt_ids: must hold at least one token, row {row} is empty; check data.prompt")
        if not len(tokens) == len(logprobs) == len(version):
            raise ValueError(
                f"completion_ids, behavior_logprobs, token_versions: must have one length per row, row {row} has "
                f"{len(tokens)}, {len(logprobs)}, {len(version)}; re-record these rollouts"
            )
        if not np.isfinite(logprobs).all():
            raise ValueError(f"behavior_logprobs: must be finite, row {row} has {logprobs}; the generator is broken")
    lengths = np.array([len(tokens) for tokens in completions], dtype=np.int64)
    return Rows([rewards_of(group) for group in groups], prompts, completions, behavior, versions, lengths)


def micro_batches(
    rows: Rows,
    advantages: npt.NDArray[np.float64],
    coefficients: npt.NDArray[np.float64],
    trained: npt.NDArray[np.bool_],
    token_budget: int,
) -> list[MicroBatch]:
    """Padded micro-batches of the trained completions, longest first so that a budget too large fails at once.

    Args:
        advantages, coefficients, trained: [completions of the batch], the last a mask.
        token_budget: most padded tokens B * L of a micro-batch; a longer completion goes alone.
    """
    lengths = np.array([len(prompt) for prompt in rows.prompts]) + rows.lengths - 1
    chosen = np.flatnonzero(trained & (rows.lengths > 0))
    chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]
    result: list[MicroBatch] = []
    while len(chosen):
        count = max(1, token_budget // int(lengths[chosen[0]]))
        result.append(_pad(rows, chosen[:count], lengths, advantages, coefficients))
        chosen = chosen[count:]
    return result


def _pad(
    rows: Rows,
    chosen: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    advantages: npt.NDArray[np.float64],
    coefficients: npt.NDArray[np.float64],
) -> MicroBatch:
    width = int(lengths[chosen].max())
    ids = np.zeros((len(chosen), width), dtype=np.int64)
    index: list[npt.NDArray[np.int64]] = []
    for i, row in enumerate(chosen):
        start, stop = len(rows.prompts[row]), int(lengths[row])
        ids[i, :start] = rows.prompts[row]
        ids[i, start:stop] = rows.completions[row][:-1]
        index.append(np.arange(i * width + start - 1, i * width + stop))
    repeats = rows.lengths[chosen]

    def joined(columns: Sequence[npt.NDArray[Any]], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([columns[row] for row in chosen]).astype(dtype))

    return MicroBatch(
        ids=torch.from_numpy(ids),
        index=torch.from_numpy(np.concatenate(index)),
        targets=joined(rows.completions, np.int64),
        behavior=joined(rows.behavior, np.float32),
        versions=joined(rows.versions, np.int32),
        advantages=torch.from_numpy(np.repeat(advantages[chosen], repeats).astype(np.float32)),
        coefficients=torch.from_numpy(np.repeat(coefficients[chosen], repeats).astype(np.float32)),
    )
