"""Groups of rollouts -> micro-batches under a token budget.

Packed, a micro-batch is one row without padding, in which the completions of a group share one prompt (see
learner.attention). Padded, it is a row per completion: for models that cannot attend to a packed row.
Letters: P prompt tokens, T completion tokens, B rows of a micro-batch, L its length, N completion tokens in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from learner.attention import Layout, Segment
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
    """What one forward and backward pass needs. Every [N] tensor speaks of completion tokens, row after row.

    The last token of a completion predicts nothing and is left out of `ids`.
    """

    ids: Tensor  # [B, L] int64; B = 1 if packed, else right-padded with 0
    index: Tensor  # [N] int64, position in the flattened [B * L] of the state that predicts the token
    targets: Tensor  # [N] int64 token ids
    behavior: Tensor  # [N] float32, logprobs of the sampler
    versions: Tensor  # [N] int32
    advantages: Tensor  # [N] float32
    coefficients: Tensor  # [N] float32, weight of the token in the loss of the whole optimizer batch
    positions: Tensor | None = None  # [1, L] int64 if packed: place of each token in its own sequence
    layout: Layout | None = None  # of the packed row

    def to(self, device: torch.device) -> "MicroBatch":
        """A copy on `device`; with a layout of its own, so that what attention makes of it goes with the copy."""
        values = {name: getattr(self, name) for name in self.__slots__}
        tensors = {name: x.to(device, non_blocking=True) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **tensors, layout=self.layout and Layout(self.layout.segments))


class _Part(NamedTuple):
    """Completions that share their prompt within one packed row."""

    rows: list[int]
    tokens: int


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
    *,
    packed: bool,
) -> list[MicroBatch]:
    """Micro-batches of the trained completions, the largest first so that a budget too large fails at once.

    Packed, groups stay whole where the budget allows; one that is larger is split, with its prompt in every part.

    Args:
        advantages, coefficients, trained: [completions of the batch], the last a mask.
        token_budget: most tokens B * L of a micro-batch, padding included; a longer completion goes alone.
    """
    chosen = np.flatnonzero(trained & (rows.lengths > 0))
    if packed:
        bins = _bins(_parts(rows, chosen, token_budget), token_budget)
        return [
            _batch(rows, [row for part in parts for row in part.rows], advantages, coefficients, *_pack(rows, parts))
            for parts in bins
        ]
    lengths = np.array([len(prompt) for prompt in rows.prompts]) + rows.lengths - 1
    chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]
    result: list[MicroBatch] = []
    while len(chosen):
        count = max(1, token_budget // int(lengths[chosen[0]]))
        some = chosen[:count].tolist()
        result.append(_batch(rows, some, advantages, coefficients, *_pad(rows, some)))
        chosen = chosen[count:]
    return result


def _parts(rows: Rows, chosen: npt.NDArray[np.int64], budget: int) -> list[_Part]:
    """Completions by prompt, the longest first, each family whole if it fits the budget."""
    families: dict[bytes, list[int]] = {}
    for row in chosen[np.argsort(-rows.lengths[chosen], kind="stable")].tolist():
        families.setdefault(rows.prompts[row].tobytes(), []).append(row)
    parts: list[_Part] = []
    for family in families.values():
        prompt = len(rows.prompts[family[0]])
        own: list[int] = []
        tokens = prompt
        for row in family:
            cost = int(rows.lengths[row]) - 1
            if own and tokens + cost > budget:
                parts.append(_Part(own, tokens))
                own, tokens = [], prompt
            own.append(row)
            tokens += cost
        parts.append(_Part(own, tokens))
    return parts


def _bins(parts: list[_Part], budget: int) -> list[list[_Part]]:
    """First fit, largest first: at most 22 % more micro-batches than the fewest possible (Johnson 1974)."""
    bins: list[list[_Part]] = []
    filled: list[int] = []
    for part in sorted(parts, key=lambda part: -part.tokens):
        place = next((i for i, tokens in enumerate(filled) if tokens + part.tokens <= budget), len(bins))
        if place == len(bins):
            bins.append([])
            filled.append(0)
        bins[place].append(part)
        filled[place] += part.tokens
    return [bins[i] for i in sorted(range(len(bins)), key=lambda i: -filled[i])]


def _pack(rows: Rows, parts: list[_Part]) -> tuple[Tensor, Tensor, Tensor, Layout]:
    """(ids [1, L], index [N], positions [1, L], layout) of one packed row."""
    ids: list[npt.NDArray[Any]] = []
    positions: list[npt.NDArray[Any]] = []
    index: list[npt.NDArray[Any]] = []
    segments: list[Segment] = []
    start = 0
    for part in parts:
        prompt = rows.prompts[part.rows[0]]
        begin, end = start, start + len(prompt)
        ids.append(prompt)
        positions.append(np.arange(len(prompt)))
        own = [Segment(begin, end)]
        start = end
        for row in part.rows:
            inputs = rows.completions[row][:-1]
            stop = start + len(inputs)
            ids.append(inputs)
            positions.append(np.arange(len(prompt), len(prompt) + len(inputs)))
            index += [np.array([end - 1]), np.arange(start, stop)]
            if len(inputs):
                own.append(Segment(start, stop, begin, end))
            start = stop
        # With nobody to share the prompt with, it is plain causal attention from the first token.
        segments += own if len(part.rows) > 1 else [Segment(begin, start)]
    row_ids, predicting, places = (
        torch.from_numpy(np.concatenate(values).astype(np.int64)) for values in (ids, index, positions)
    )
    return row_ids[None], predicting, places[None], Layout(segments)


def _pad(rows: Rows, chosen: list[int]) -> tuple[Tensor, Tensor]:
    """(ids [B, L], index [N]) of right-padded rows."""
    starts = [len(rows.prompts[row]) for row in chosen]
    stops = [start + int(rows.lengths[row]) - 1 for start, row in zip(starts, chosen, strict=True)]
    width = max(stops)
    ids = np.zeros((len(chosen), width), dtype=np.int64)
    index: list[npt.NDArray[np.int64]] = []
    for i, (row, start, stop) in enumerate(zip(chosen, starts, stops, strict=True)):
        ids[i, :start] = rows.prompts[row]
        ids[i, start:stop] = rows.completions[row][:-1]
        index.append(np.arange(i * width + start - 1, i * width + stop))
    return torch.from_numpy(ids), torch.from_numpy(np.concatenate(index))


def _batch(
    rows: Rows,
    chosen: list[int],
    advantages: npt.NDArray[np.float64],
    coefficients: npt.NDArray[np.float64],
    ids: Tensor,
    index: Tensor,
    positions: Tensor | None = None,
    layout: Layout | None = None,
) -> MicroBatch:
    repeats = rows.lengths[chosen]

    def joined(columns: Sequence[npt.NDArray[Any]], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([columns[row] for row in chosen]).astype(dtype))

    return MicroBatch(
        ids=ids,
        index=index,
        targets=joined(rows.completions, np.int64),
        behavior=joined(rows.behavior, np.float32),
        versions=joined(rows.versions, np.int32),
        advantages=torch.from_numpy(np.repeat(advantages[chosen], repeats).astype(np.float32)),
        coefficients=torch.from_numpy(np.repeat(coefficients[chosen], repeats).astype(np.float32)),
        positions=positions,
        layout=layout,
    )
