"""Makes the micro-batches of an optimizer batch: reads its groups, packs completions under a token budget, and divides
the micro-batches among ranks. It also makes micro-batches of whole sequences, which reward models score.

A packed micro-batch is one row without padding, in which the completions of a group share one prompt (see
learner.model.attention). A padded micro-batch has one row per completion, for models that cannot attend to a packed
row. A completion includes what an environment said between its turns; such tokens count in M, but are not predicted.

Letters: P prompt tokens; T tokens after the prompt; R completions of the optimizer batch, M their tokens; K
trajectories (a trajectory is one completion, except with env.history "template", where it may be several rows, see
rollout.schema); B rows of a micro-batch, L their length; C completions of a micro-batch, N the tokens in it that the
policy sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int
from torch import Tensor

from learner.batch.layout import Layout, Segment
from rollout.schema import Teaching, check, experts_of, lasts, masks_of, ragged, rewards_of, teaching_of, whole


@dataclass(frozen=True)
class Rows:
    """The completions of one optimizer batch, group after group: the columns that the learner needs.

    An [M] array holds a number for each token, completion after completion.
    """

    rewards: list[npt.NDArray[np.float64]]  # one [G] per group, together [K]; nan where a reward function failed
    prompts: list[npt.NDArray[np.int32]]  # [R] views into the Arrow tables
    completions: npt.NDArray[np.int32]  # [M] token ids
    behavior: npt.NDArray[np.float32]  # [M] the sampler's logprobs, nats
    versions: npt.NDArray[np.int32]  # [M] policy version that sampled the token
    lengths: npt.NDArray[np.int64]  # [R] T of each completion
    truncated: npt.NDArray[np.bool_]  # [R] whether the completion was cut at rollout.max_completion_length
    sampled: npt.NDArray[np.bool_] | None = None  # [M] whether the policy sampled the token; None: all tokens are
    # [M] the reward of the turn that ends with the token, else 0; None: no turn has a reward
    turn_rewards: npt.NDArray[np.float64] | None = None
    owners: npt.NDArray[np.int64] | None = None  # [R] index of the row's trajectory in [K]; None: row i is trajectory i
    # [R] rollout.schema.experts_of: [P + T - 1, layers * k] for each row; None: no row has them
    experts: list[npt.NDArray[np.int16] | None] | None = None
    # [R] the prompts that a teacher is given (data.teacher), views as `prompts`; None: it is given `prompts`
    teacher_prompts: list[npt.NDArray[np.int32]] | None = None
    teaching: Teaching | None = None  # logprobs under model.teacher; None: there is none

    @property
    def of_teacher(self) -> "Rows":
        """These completions behind the teacher's prompts, for whose tokens no experts are known."""
        assert self.teacher_prompts is not None
        return replace(self, prompts=self.teacher_prompts, experts=None)

    def of_rows(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[K] a value of each trajectory -> [R] the value of each row's trajectory."""
        return values if self.owners is None else values[self.owners]

    def of_trajectories(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[R] a count of each row -> [K] the sum over each trajectory's rows."""
        if self.owners is None:
            return counts
        return np.bincount(self.owners, counts, minlength=sum(map(len, self.rewards))).astype(np.int64)

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """[R] the number of tokens of each completion that the policy sampled."""
        if self.sampled is None:
            return self.lengths
        total = np.concatenate([[0], np.cumsum(self.sampled)])
        return np.asarray(total[self.starts + self.lengths] - total[self.starts])

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[R] the index in [M] at which each completion begins."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def highest_id(self) -> int:
        """The highest token id of prompts, completions and a teacher's tokens; 0 if there are none."""
        others = [*(self.teacher_prompts or []), *([] if self.teaching is None else [self.teaching.top_ids.ravel()])]
        return int(np.concatenate([[0], *self.prompts, *others, self.completions]).max())

    def places(self, chosen: Sequence[int]) -> npt.NDArray[np.int64]:
        """[N] the indices in [M] of the sampled tokens of the chosen completions, completion after completion."""
        every = ranges(self.starts[chosen], self.lengths[chosen])
        return every if self.sampled is None else every[self.sampled[every]]

    def inputs(self, chosen: Sequence[int]) -> npt.NDArray[np.int32]:
        """All tokens of the chosen completions except the last of each, which predicts nothing."""
        return self.completions[ranges(self.starts[chosen], self.lengths[chosen] - 1)]


def read(groups: Sequence[pa.Table], top: int | None = None) -> Rows:
    """Reads the columns that the learner needs out of the groups' Arrow tables.

    top: in a run with model.teacher how many of its likeliest tokens count (learner.loss.teacher_top); None: there is
    no such teacher, and logprobs that rollouts of another run may have of one are not read.

    Raises:
        ValueError: a table is not of rollout.schema, a prompt is empty, the lists of one completion differ in length,
            a logprob is not finite (the objective would mask its ratio, so nobody would see the fault), or logprobs
            of the teacher are missing.
    """
    tables = [check(group) for group in groups]
    kinds = {"completion_ids": np.int32, "behavior_logprobs": np.float32, "token_versions": np.int32}
    sizes = [
        _joined([pc.list_value_length(table.column(name)).to_numpy() for table in tables], np.int64) for name in kinds
    ]
    prompts = [prompt for table in tables for prompt in ragged(table, "prompt_ids")]
    empty = np.flatnonzero([len(prompt) == 0 for prompt in prompts])
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
        for name, dtype in kinds.items()
    )
    broken = np.flatnonzero(~np.isfinite(behavior))
    if len(broken):
        row = np.searchsorted(np.cumsum(sizes[0]), broken[0], side="right")
        raise ValueError(
            f"behavior_logprobs: must be finite, row {row} has {behavior[broken[0]]}; the generator is broken"
        )
    rewards, sampled = [rewards_of(whole(table)) for table in tables], _sampled(tables, sizes[0])
    last = _joined([lasts(table) for table in tables], np.bool_)
    cut = _joined([pc.equal(table.column("finish_reason"), "length").to_numpy() for table in tables], np.bool_)
    of_turns = _turn_rewards(tables, sizes[0], sampled)
    owners = None if last.all() else np.cumsum(last) - last
    experts = [one for table in tables for one in experts_of(table)]
    known = experts if any(one is not None for one in experts) else None
    said = None if top is None else teaching_of(tables, top)
    return Rows(
        rewards, prompts, completions, behavior, versions, sizes[0], cut, sampled, of_turns, owners, known,
        _teacher_prompts(tables), said,
    )  # fmt: skip


def _teacher_prompts(tables: Sequence[pa.Table]) -> list[npt.NDArray[np.int32]] | None:
    """[R] the teacher's prompts; None where no row has one."""
    name = "teacher_prompt_ids"
    missing = sum(table.column(name).null_count for table in tables)
    if missing == sum(map(len, tables)):
        return None
    prompts = [prompt for table in tables for prompt in ragged(table, name)]
    if missing or not all(map(len, prompts)):
        raise ValueError(f"{name}: all rows of a step must have one that is not empty, or none may; re-record these")
    return prompts


def _sampled(tables: Sequence[pa.Table], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
    """[M] the loss_mask of all rows; None where no row has a loss_mask."""
    if all(table.column("loss_mask").null_count == len(table) for table in tables):
        return None
    masks = [mask for table in tables for mask in masks_of(table)]
    odd = [row for row, (mask, length) in enumerate(zip(masks, lengths, strict=True)) if len(mask) != length]
    if odd:
        raise ValueError(
            f"loss_mask: must have one value per token, row {odd[0]} has {len(masks[odd[0]])} for {lengths[odd[0]]}; "
            "re-record these rollouts"
        )
    return np.concatenate(masks)


def _turn_rewards(
    tables: Sequence[pa.Table], lengths: npt.NDArray[np.int64], sampled: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.float64] | None:
    """[M] each turn's reward at the turn's last token, else 0; None where no turn has a reward."""
    if all(pc.sum(pc.list_value_length(table.column("turns"))).as_py() == 0 for table in tables):
        return None
    starts, rewards = np.cumsum(lengths) - lengths, np.zeros(int(lengths.sum()))
    rows = (row for table in tables for row in table.column("turns").to_pylist())
    found = [(at, turn) for at, turns in enumerate(rows) for turn in turns if turn["reward"] is not None]
    for at, turn in found:
        last = starts[at] + turn["stop"] - 1
        if not turn["start"] < turn["stop"] <= lengths[at] or (sampled is not None and not sampled[last]):
            raise ValueError(
                f"turns: must end with a token that the policy sampled, one of row {at} is [{turn['start']}, "
                f"{turn['stop']}) of {lengths[at]} tokens; re-record these rollouts"
            )
        rewards[last] += turn["reward"]
    return rewards if found else None


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])


def ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[sum of lengths] the integers start, start + 1, … of each range, range after range."""
    stops = np.cumsum(lengths)
    return np.asarray(np.arange(lengths.sum()) + np.repeat(starts - (stops - lengths), lengths))


MOST, FEWEST = 64, 4  # most and fewest micro-batches into which `fine_budget` divides a batch
REPEATED = 0.05  # largest share of the batch's tokens that prompts repeated in several micro-batches may add


def fine_budget(families: Sequence[tuple[int, int]], budget: int, least: int) -> int:
    """Returns the token budget for a batch that is divided among several ranks; it is at most `budget`.

    The batch is divided into 64, 32, … or 4 pieces: the most pieces for which repeated prompts add no more than 5 % to
    the tokens. If they add more even with 4, the budget stays. The division depends on the batch's tokens and never on
    the number of ranks, since no bit of the result may depend on the number of ranks.

    Args:
        families: for each prompt (its tokens, the tokens of the completions that share it), without tokens that predict
            nothing.
        least: least tokens of a micro-batch; a smaller one costs more time than the division saves.
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
    """Returns the number of micro-batches of `tokens` tokens over which a prompt and its completions are spread."""
    return max(1, math.ceil(own / max(tokens - prompt, 1)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass needs. An [N] tensor has a number for each sampled token, row after row.

    The last token of a completion predicts nothing and is left out of `ids`.
    """

    ids: Int[Tensor, "B L"]  # int64; B = 1 if packed, else right-padded with 0
    index: Int[Tensor, " N"]  # int64, index in the flattened [B * L] of the hidden state that predicts the token
    targets: Int[Tensor, " N"]  # int64 token ids
    behavior: Float[Tensor, " N"]  # float32, the sampler's logprobs, nats
    versions: Int[Tensor, " N"]  # int32, policy version that sampled the token
    advantages: Float[Tensor, " N"]  # float32
    coefficients: Float[Tensor, " N"]  # float32, weight of the token in the loss of the whole optimizer batch
    lengths: Int[Tensor, " C"]  # int64, sampled tokens of each completion; a completion is never divided
    places: Int[Tensor, " N"]  # int64, index of the token in the [M] arrays of Rows
    positions: Int[Tensor, "1 L"] | None = None  # int64, place of each token in its own sequence; None: padded
    layout: Layout | None = None  # the segments of the packed row; None: padded
    taught: Float[Tensor, " N"] | None = None  # float32, logprobs under model.teacher; None: there is none
    # int64 and float32, the teacher's likeliest tokens and their logprobs; None: it was asked for none
    top_ids: Int[Tensor, "N k"] | None = None
    top_logprobs: Float[Tensor, "N k"] | None = None
    # int16 [B * L, layers * k], the experts that the sampler's routers chose, -1 where that is not known; None: nowhere
    experts: Int[Tensor, "BL W"] | None = None
    idle: bool = False  # whether its gradients are set to zero (see idle_copy)

    def to(self, device: torch.device) -> "MicroBatch":
        """Returns a copy on `device`. It has a new Layout, so that the masks and tiles which attention caches in the
        layout are freed with the copy."""
        values = {name: getattr(self, name) for name in self.__slots__}
        tensors: dict[str, Any] = {
            name: x.to(device, non_blocking=True) for name, x in values.items() if isinstance(x, Tensor)
        }
        return replace(self, **tensors, layout=self.layout and Layout(self.layout.segments))

    def idle_copy(self) -> "MicroBatch":
        """Returns a copy from which nothing is learned. A rank without a further micro-batch computes it, since the
        other ranks need its shards of the base in their pass; the gradients of the copy are zeros."""
        return replace(self, idle=True)


class _Part(NamedTuple):
    """Completions that share their prompt within one packed row."""

    rows: list[int]  # indices in Rows
    tokens: int  # with the prompt


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
    """Returns the micro-batches of the trained completions, the largest first so that a budget too large fails at once.

    In packed micro-batches a group stays whole where the budget allows. A larger group is split, with its prompt in
    every part.

    Args:
        advantages: [M] the advantage of each token.
        coefficients: [R] the weight of each token of a completion in the loss.
        trained: [R] whether the completion is trained on.
        token_budget: most tokens B * L of a micro-batch, padding included; a completion longer than that gets its own.
        fine: least tokens of a micro-batch where the batch is divided for several ranks (fine_budget); None: it is not.
    """
    chosen = np.flatnonzero(trained & (rows.counts > 0))
    if fine is not None:
        token_budget = fine_budget(_sizes(rows, chosen, packed=packed), token_budget, fine)
    if packed:
        bins = _bins(_parts_of_rows(rows, chosen, token_budget), token_budget)
        return [
            _batch(
                rows,
                [row for part in parts for row in part.rows],
                advantages,
                coefficients,
                *_pack(rows, parts),
                experts=_packed_experts(rows, parts),
            )
            for parts in bins
        ]
    lengths = np.array([len(prompt) for prompt in rows.prompts]) + rows.lengths - 1
    chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]
    result: list[MicroBatch] = []
    while len(chosen):
        count = max(1, token_budget // int(lengths[chosen[0]]))
        some = chosen[:count].tolist()
        padded = _padded_experts(rows, some)
        result.append(_batch(rows, some, advantages, coefficients, *_pad(rows, some), experts=padded))
        chosen = chosen[count:]
    return result


def _sizes(rows: Rows, chosen: npt.NDArray[np.int64], *, packed: bool) -> list[tuple[int, int]]:
    """Returns the families for `fine_budget`. In padded micro-batches no completions share a prompt."""
    lengths = [len(rows.prompts[row]) for row in chosen]
    own = rows.lengths[chosen] - 1
    if not packed:
        return [(0, length + int(count)) for length, count in zip(lengths, own, strict=True)]
    families: dict[bytes, tuple[int, int]] = {}
    for row, length, count in zip(chosen, lengths, own, strict=True):
        key = rows.prompts[row].tobytes()
        families[key] = length, families.get(key, (0, 0))[1] + int(count)
    return list(families.values())


def _parts_of_rows(rows: Rows, chosen: npt.NDArray[np.int64], budget: int) -> list[_Part]:
    """Groups the completions by prompt, the longest first; those of a prompt stay together if they fit the budget."""
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
    """Packs parts into micro-batches by first-fit decreasing: at most 22 % more than the fewest possible (Johnson
    1974)."""
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
    """Returns (ids [1, L], index [N], positions [1, L], layout) of a packed row."""
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
        index[-1][np.cumsum(lengths) - lengths] = end - 1  # the prompt's last token predicts the first of each
        stop = int(stops[-1])
        # A single completion shares its prompt with no other, so both are one segment of plain causal attention.
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
    """Returns (ids [B, L], index [N]) of right-padded rows."""
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
    experts: npt.NDArray[np.int16] | None = None,
) -> MicroBatch:
    counts, places = rows.counts[chosen], rows.places(chosen)
    taught, top_ids, top_logprobs = _of_teacher(rows.teaching, places)
    if rows.sampled is not None:  # the head computes no logprobs of tokens that the policy did not sample
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
        experts=None if experts is None else torch.from_numpy(experts),
        taught=taught,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _of_teacher(
    said: Teaching | None, places: npt.NDArray[np.int64]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The fields taught, top_ids and top_logprobs of a micro-batch of the tokens at these places."""
    if said is None:
        return None, None, None
    taught, ids, logs = (torch.from_numpy(values[places]) for values in said)
    return (taught, ids.long(), logs) if ids.shape[1] else (taught, None, None)


def _packed_experts(rows: Rows, parts: list[_Part]) -> npt.NDArray[np.int16] | None:
    """[L, layers * k] for the packed row of `_pack`; of a shared prompt those that its first completion has."""
    if rows.experts is None:
        return None
    pieces: list[npt.NDArray[np.int16]] = []
    for part in parts:
        prompt = len(rows.prompts[part.rows[0]])
        pieces += [_experts(rows, part.rows[0])[:prompt], *(_experts(rows, row)[prompt:] for row in part.rows)]
    return np.concatenate(pieces)


def _padded_experts(rows: Rows, chosen: list[int]) -> npt.NDArray[np.int16] | None:
    """[B * L, layers * k] for the padded rows of `_pad`."""
    if rows.experts is None:
        return None
    own = [_experts(rows, row) for row in chosen]
    longest = max(map(len, own))
    found = np.full((len(own) * longest, own[0].shape[1]), -1, np.int16)
    for place, one in enumerate(own):
        found[place * longest :][: len(one)] = one
    return found


def _experts(rows: Rows, row: int) -> npt.NDArray[np.int16]:
    """[P + T - 1, layers * k] of a row."""
    assert rows.experts is not None
    own = rows.experts[row]
    width = next(one.shape[1] for one in rows.experts if one is not None)
    return np.full((len(rows.prompts[row]) + int(rows.lengths[row]) - 1, width), -1, np.int16) if own is None else own


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns for each rank the ascending indices of its micro-batches. Every rank computes this function by itself.

    The micro-batches are given out largest first, each to the rank that has the fewest tokens so far, and among equals
    to the lowest rank. The fullest rank has at most 4/3 of the smallest possible maximum (Graham 1969), and at most one
    micro-batch more than the emptiest. With fewer micro-batches than ranks some ranks have none.

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


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """A micro-batch that holds the last token of each completion, too, to score whole sequences with a reward model.

    It has the interface learner.trainer.memory_limit.Pass.
    """

    batch: MicroBatch  # only its fields ids, positions and layout mean something
    rows: npt.NDArray[np.int64]  # [C] index of each completion in Rows
    ends: Int[Tensor, " C"]  # int64, index in the flattened ids of the token whose score is that of the sequence

    @property
    def ids(self) -> Int[Tensor, "B L"]:
        return self.batch.ids

    def idle_copy(self) -> "WholeBatch":
        """Returns the micro-batch itself, since nothing is ever learned from it."""
        return self


def whole_batches(
    rows: Rows, token_budget: int, *, packed: bool, pad: int | None, fine: int | None = None
) -> list[WholeBatch]:
    """Returns micro-batches of all completions of the batch, the largest first.

    Args:
        token_budget, packed, fine: see `micro_batches`.
        pad: the model's padding token, or None. A sequence ends with its last token that is not the padding token, as
            in transformers' sequence classification, or with its first token where all are padding.
    """
    longer = _with_room(rows)
    every = np.ones(len(rows.lengths))
    batches = micro_batches(
        longer, np.zeros(len(longer.completions)), every, every > 0, token_budget, packed=packed, fine=fine
    )
    after = np.array([_after_last(rows, row, pad) for row in range(len(rows.lengths))])
    found = []
    for batch in batches:
        first = (batch.lengths.cumsum(0) - batch.lengths).numpy()  # index in [N] of each completion's first token
        own = np.searchsorted(longer.starts, batch.places.numpy()[first], side="right") - 1
        # `index` of token t is the place of token t - 1, and of token 0 that of the prompt's last token. The prompt is
        # contiguous, so an end within the prompt is found by counting back from its last token.
        ends = batch.index.numpy()[first + np.maximum(after[own], 0)] + np.minimum(after[own], 0)
        found.append(WholeBatch(batch, own, torch.from_numpy(ends)))
    return found


def _after_last(rows: Rows, row: int, pad: int | None) -> int:
    """Returns the index in the completion of the token after the sequence's last; it is below 0 within the prompt."""
    prompt, start = rows.prompts[row], int(rows.starts[row])
    ids = np.concatenate([prompt, rows.completions[start : start + int(rows.lengths[row])]])
    real = np.flatnonzero(ids != pad) if pad is not None else np.array([len(ids) - 1])
    return (int(real[-1]) if len(real) else 0) + 1 - len(prompt)


def _with_room(rows: Rows) -> Rows:
    """Returns the completions with one more token each; micro-batches leave that one out instead of the real last."""
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
