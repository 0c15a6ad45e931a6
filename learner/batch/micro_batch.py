"""Rows of an optimizer batch -> micro-batches under a token budget.

Packed, a micro-batch is one row without padding, in which the completions of a group share one prompt (see
learner.model.attention). Padded, it is a row per completion: for models that cannot attend to a packed row.
Letters: those of learner.batch.rows, and B rows of a micro-batch, L its length, C completions and N their tokens in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from learner.batch.layout import Layout, Segment
from learner.batch.rows import Rows, ranges

# How finely a batch is divided for several ranks: by its own tokens, never by the number of ranks, on which no bit of
# the result may depend.

MOST, FEWEST = 64, 4  # micro-batches that are wanted
REPEATED = 0.05  # of the batch: most that prompts may add which stand in several micro-batches


def fine_budget(families: Sequence[tuple[int, int]], budget: int, least: int) -> int:
    """The token budget of a batch that is divided finely, at most `budget`.

    The finest of 64, 32, … 4 pieces in which prompts that are repeated add no more than 5 % to the tokens; if none is,
    the batch is divided as for one rank.

    Args:
        families: (tokens of the prompt, of the completions that share it), without those that predict nothing.
        least: tokens of a micro-batch, below which it takes more time than its division saves.
    """
    whole = sum(prompt + own for prompt, own in families)
    pieces = MOST
    while pieces >= FEWEST:
        tokens = max(math.ceil(whole / pieces), least)
        if tokens >= budget:
            return budget
        repeated = sum(prompt * (_parts(prompt, own, tokens) - 1) for prompt, own in families)
        if repeated <= REPEATED * whole:
            return tokens
        pieces //= 2
    return budget


def _parts(prompt: int, own: int, tokens: int) -> int:
    """Of a family, in micro-batches of so many tokens."""
    return max(1, math.ceil(own / max(tokens - prompt, 1)))


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
        fine: divided for several ranks, into micro-batches of at least so many tokens (learner.batch.micro_batch).
    """
    chosen = np.flatnonzero(trained & (rows.counts > 0))
    if fine is not None:
        token_budget = fine_budget(_sizes(rows, chosen, packed=packed), token_budget, fine)
    if packed:
        bins = _bins(_micro_batch_parts(rows, chosen, token_budget), token_budget)
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


def _micro_batch_parts(rows: Rows, chosen: npt.NDArray[np.int64], budget: int) -> list[_Part]:
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


# Which rank takes which micro-batch: a pure function that every rank computes for itself.


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The places of each rank's micro-batches, in order; some ranks have none where there are fewer than ranks.

    The largest first, each to the rank that has least so far, the lowest of equals: the fullest has at most 4/3 of the
    least that is possible (Graham 1969), and no more than the emptiest and one micro-batch together.

    Args:
        sizes: tokens of each micro-batch, padding included.
    """
    own: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        rank = min(range(ranks), key=filled.__getitem__)
        own[rank].append(place)
        filled[rank] += sizes[place]
    return [sorted(places) for places in own]


# Micro-batches in which whole sequences are read, the last token of each completion included: for what is said of a
# sequence, where the learner's own leave out the token that predicts nothing. Letters: those of learner.batch.rows.


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
