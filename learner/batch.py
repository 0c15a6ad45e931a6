"""Groups of rollouts -> micro-batches under a token budget.

Packed, a micro-batch is one row without padding, in which the completions of a group share one prompt (see
learner.attention). Padded, it is a row per completion: for models that cannot attend to a packed row.
Letters: P prompt tokens, T completion tokens, R completions and M their tokens in the optimizer batch, B rows of a
micro-batch, L its length, C completions and N their tokens in it.

A completion that was sampled in parts (rollout.partial) may begin with tokens that are too old to train on. To all of
the learner they are prompt: read, and not predicted. So T and M count only what is trained on, and so do the loss's
denominators and every policy/ metric, while the reward is of the whole completion (Kimi k1.5, 2501.12599, leaves the
earlier parts out of the loss, too).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from learner.attention import Layout, Segment
from rollout.schema import check, ragged, rewards_of


@dataclass(frozen=True)
class Rows:
    """The completions of one optimizer batch, group after group; [M] arrays hold their tokens one after the other."""

    rewards: list[npt.NDArray[np.float64]]  # one [G] per group, nan where a judge failed
    prompts: list[npt.NDArray[np.int32]]  # [R] views into the Arrow tables, but for those that a too old part lengthens
    completions: npt.NDArray[np.int32]  # [M] token ids
    behavior: npt.NDArray[np.float32]  # [M] logprobs of the sampler, nats
    versions: npt.NDArray[np.int32]  # [M] policy version of each token
    lengths: npt.NDArray[np.int64]  # [R] T of each completion; 0 if all of it is too old

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[R] where in [M] each completion begins."""
        return np.cumsum(self.lengths) - self.lengths

    def places(self, chosen: Sequence[int]) -> npt.NDArray[np.int64]:
        """[N] where in [M] the tokens of the chosen completions stand, completion after completion."""
        return _ranges(self.starts[chosen], self.lengths[chosen])

    def inputs(self, chosen: Sequence[int]) -> npt.NDArray[np.int32]:
        """[N - C] their tokens but the last of each, which predicts nothing."""
        return self.completions[_ranges(self.starts[chosen], self.lengths[chosen] - 1)]


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
    lengths: Tensor  # [C] int64, T of each completion: they are whole
    places: Tensor  # [N] int64, where the token stands in Rows
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


def read(groups: Sequence[pa.Table], oldest_version: int = 0) -> Rows:
    """The columns that the learner needs. A completion up to its last token of a policy version below `oldest_version`
    counts as prompt.

    Raises:
        ValueError: a table is not of rollout.schema, a prompt is empty, the lists of one completion differ in length,
            or a logprob is not finite (masked as a ratio, it would go unseen).
    """
    tables = [check(group) for group in groups]
    names = ("completion_ids", "behavior_logprobs", "token_versions")
    sizes = [_joined([_sizes(table, name) for table in tables], np.int64) for name in names]
    prompts = [prompt for table in tables for prompt in ragged(table, "prompt_ids")]
    empty = np.flatnonzero(_joined([_sizes(table, "prompt_ids") for table in tables], np.int64) == 0)
    if len(empty):
        raise ValueError(f"prompt_ids: must hold at least one token, row {empty[0]} is empty; check data.prompt")
    odd = np.flatnonzero((sizes[0] != sizes[1]) | (sizes[0] != sizes[2]))
    if len(odd):
        raise ValueError(
            f"completion_ids, behavior_logprobs, token_versions: must have one length per row, row {odd[0]} has "
            f"{', '.join(str(size[odd[0]]) for size in sizes)}; re-record these rollouts"
        )
    completions, behavior, versions = (
        _joined([chunk.flatten().to_numpy() for table in tables for chunk in table.column(name).chunks], dtype)
        for name, dtype in zip(names, (np.int32, np.float32, np.int32), strict=True)
    )
    broken = np.flatnonzero(~np.isfinite(behavior))
    if len(broken):
        row = np.searchsorted(np.cumsum(sizes[0]), broken[0], side="right")
        raise ValueError(
            f"behavior_logprobs: must be finite, row {row} has {behavior[broken[0]]}; the generator is broken"
        )
    rows = Rows([rewards_of(table) for table in tables], prompts, completions, behavior, versions, sizes[0])
    return _behind(rows, oldest_version)


def _behind(rows: Rows, oldest_version: int) -> Rows:
    """What comes behind the last token that is too old, with what comes before as prompt."""
    old = np.flatnonzero(rows.versions < oldest_version)
    if len(old) == 0:
        return rows
    owners = np.searchsorted(np.cumsum(rows.lengths), old, side="right")
    cut = np.zeros_like(rows.lengths)
    np.maximum.at(cut, owners, old + 1 - rows.starts[owners])
    prompts = list(rows.prompts)
    for row in np.unique(owners).tolist():
        start = rows.starts[row]
        prompts[row] = np.concatenate([prompts[row], rows.completions[start : start + cut[row]]])
    kept = _ranges(rows.starts + cut, rows.lengths - cut)
    return Rows(
        rows.rewards, prompts, rows.completions[kept], rows.behavior[kept], rows.versions[kept], rows.lengths - cut
    )


def _sizes(table: pa.Table, name: str) -> npt.NDArray[Any]:
    return np.asarray(pc.list_value_length(table.column(name)).to_numpy(), dtype=np.int64)


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.asarray(np.concatenate([np.empty(0, dtype), *arrays]), dtype=dtype)


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[sum of lengths] start, start + 1, … of each range, range after range."""
    stops = np.cumsum(lengths)
    return np.asarray(np.arange(lengths.sum()) + np.repeat(starts - (stops - lengths), lengths))


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
    begin = 0
    for part in parts:
        prompt, lengths = rows.prompts[part.rows[0]], rows.lengths[part.rows]
        end = begin + len(prompt)
        inputs = lengths - 1
        stops = end + np.cumsum(inputs)
        starts = stops - inputs
        ids += [prompt, rows.inputs(part.rows)]
        positions += [np.arange(len(prompt)), _ranges(np.full_like(inputs, len(prompt)), inputs)]
        index.append(_ranges(starts - 1, lengths))
        index[-1][np.cumsum(lengths) - lengths] = end - 1  # the first token of each is predicted by the prompt's last
        stop = int(stops[-1])
        # With nobody to share the prompt with, it is plain causal attention from the first token.
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
    index = _ranges(np.arange(len(chosen)) * ids.shape[1] + starts - 1, lengths)
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
    lengths, places = rows.lengths[chosen], rows.places(chosen)
    return MicroBatch(
        ids=ids,
        index=index,
        targets=torch.from_numpy(rows.completions[places].astype(np.int64)),
        behavior=torch.from_numpy(rows.behavior[places]),
        versions=torch.from_numpy(rows.versions[places]),
        advantages=torch.from_numpy(np.repeat(advantages[chosen], lengths).astype(np.float32)),
        coefficients=torch.from_numpy(np.repeat(coefficients[chosen], lengths).astype(np.float32)),
        lengths=torch.from_numpy(lengths),
        places=torch.from_numpy(places),
        positions=positions,
        layout=layout,
    )
