"""Rows of an optimizer batch -> micro-batches under a token budget.

Packed, a micro-batch is one row without padding, in which the completions of a group share one prompt (see
learner.model.packed_attention). Padded, it is a row per completion: for models that cannot attend to a packed row.
Letters: those of learner.batch.rows, and B rows of a micro-batch, L its length, C completions and N their tokens in it.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from learner.batch.layout import Layout, Segment
from learner.batch.pieces import fine_budget
from learner.batch.rows import Rows, ranges


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass needs. Every [N] tensor speaks of sampled tokens, row after row.

    The last token of a completion predicts nothing and is left out of `ids`.
    """

    ids: Int[Tensor, "B L"]  # int64; B = 1 if packed, else right-padded with 0
    index: Int[Tensor, " N"]  # int64, position in the flattened [B * L] of the state that predicts the token
    targets: Int[Tensor, " N"]  # int64 token ids
    behavior: Float[Tensor, " N"]  # float32, logprobs of the sampler
    versions: Int[Tensor, " N"]  # int32
    advantages: Float[Tensor, " N"]  # float32
    coefficients: Float[Tensor, " N"]  # float32, weight of the token in the loss of the whole optimizer batch
    lengths: Int[Tensor, " C"]  # int64, sampled tokens of each completion: they are whole
    places: Int[Tensor, " N"]  # int64, where the token stands in Rows
    positions: Int[Tensor, "1 L"] | None = None  # int64 if packed: place of each token in its own sequence
    layout: Layout | None = None  # of the packed row
    idle: bool = False  # nothing is learned from it (see idle_copy)

    def to(self, device: torch.device) -> "MicroBatch":
        """A copy on `device`; with a layout of its own, so that what attention makes of it goes with the copy."""
        values = {name: getattr(self, name) for name in self.__slots__}
        tensors: dict[str, Any] = {
            name: x.to(device, non_blocking=True) for name, x in values.items() if isinstance(x, Tensor)
        }
        return replace(self, **tensors, layout=self.layout and Layout(self.layout.segments))

    def idle_copy(self) -> "MicroBatch":
        """For a rank that has no further micro-batch of its own, and whose shards of the base the others need in a
        pass: the same pass, whose gradients are zeros."""
        return replace(self, idle=True)


class _Part(NamedTuple):
    """Completions that share their prompt within one packed row."""

    rows: list[int]
    tokens: int


def micro_batches(
    rows: Rows,
    advantages: npt.NDArray[np.float64],
    coefficients: npt.NDArray[np.float64],
    trained: npt.NDArray[np.bool_],
    token_budget: int,
    *,
    packed: bool,
    fine: int | None = None,
) -> list[MicroBatch]:
    """Micro-batches of the trained completions, the largest first so that a budget too large fails at once.

    Packed, groups stay whole where the budget allows; one that is larger is split, with its prompt in every part.

    Args:
        advantages: [M] of each token.
        coefficients, trained: [R], the second a mask.
        token_budget: most tokens B * L of a micro-batch, padding included; a longer completion goes alone.
        fine: divided for several ranks, into micro-batches of at least so many tokens (learner.batch.pieces).
    """
    chosen = np.flatnonzero(trained & (rows.counts > 0))
    if fine is not None:
        token_budget = fine_budget(_sizes(rows, chosen, packed=packed), token_budget, fine)
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


def _sizes(rows: Rows, chosen: npt.NDArray[np.int64], *, packed: bool) -> list[tuple[int, int]]:
    """(tokens of the prompt, of the completions that share it in a packed row); padded, none shares it."""
    lengths = [len(rows.prompts[row]) for row in chosen]
    own = rows.lengths[chosen] - 1
    if not packed:
        return [(0, length + int(count)) for length, count in zip(lengths, own, strict=True)]
    families: dict[bytes, tuple[int, int]] = {}
    for row, length, count in zip(chosen, lengths, own, strict=True):
        key = rows.prompts[row].tobytes()
        families[key] = length, families.get(key, (0, 0))[1] + int(count)
    return list(families.values())


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
    begin = 0
    for part in parts:
        prompt, lengths = rows.prompts[part.rows[0]], rows.lengths[part.rows]
        end = begin + len(prompt)
        inputs = lengths - 1
        stops = end + np.cumsum(inputs)
        starts = stops - inputs
        ids += [prompt, rows.inputs(part.rows)]
        positions += [np.arange(len(prompt)), ranges(np.full_like(inputs, len(prompt)), inputs)]
        index.append(ranges(starts - 1, lengths))
        index[-1][np.cumsum(lengths) - lengths] = end - 1  # the first token of each is predicted by the prompt's last
        stop = int(stops[-1])
        # A single completion shares its prompt with no other: plain causal attention from the first token.
        segments.append(Segment(begin, end if len(part.rows) > 1 else stop))
        if len(part.rows) > 1:
            own = zip(starts[inputs > 0].tolist(), stops[inputs > 0].tolist(), strict=True)
            segments += [Segment(first, after, begin, end) for first, after in own]
        begin = stop
    row_ids, predicting, places = (
        torch.from_numpy(np.concatenate(values).astype(np.int64)) for values in (ids, index, positions)
    )
    return row_ids[None], predicting, places[None], Layout(segments)


def _pad(rows: Rows, chosen: list[int]) -> tuple[Tensor, Tensor]:
    """(ids [B, L], index [N]) of right-padded rows."""
    lengths = rows.lengths[chosen]
    starts = np.array([len(rows.prompts[row]) for row in chosen])
    stops = starts + lengths - 1
    ids = np.zeros((len(chosen), stops.max()), dtype=np.int64)
    columns = np.arange(stops.max())
    ids[columns < starts[:, None]] = np.concatenate([rows.prompts[row] for row in chosen])
    ids[(columns >= starts[:, None]) & (columns < stops[:, None])] = rows.inputs(chosen)
    index = ranges(np.arange(len(chosen)) * ids.shape[1] + starts - 1, lengths)
    return torch.from_numpy(ids), torch.from_numpy(index)


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
    counts, places = rows.counts[chosen], rows.places(chosen)
    if rows.sampled is not None:  # the head computes no logprobs of what the policy did not sample
        index = index[torch.from_numpy(rows.sampled[ranges(rows.starts[chosen], rows.lengths[chosen])])]
    return MicroBatch(
        ids=ids,
        index=index,
        targets=torch.from_numpy(rows.completions[places].astype(np.int64)),
        behavior=torch.from_numpy(rows.behavior[places]),
        versions=torch.from_numpy(rows.versions[places]),
        advantages=torch.from_numpy(advantages[places].astype(np.float32)),
        coefficients=torch.from_numpy(np.repeat(coefficients[chosen], counts).astype(np.float32)),
        lengths=torch.from_numpy(counts),
        places=torch.from_numpy(places),
        positions=positions,
        layout=layout,
    )
