"""Micro-batches: every trained token once, in its place, within the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch.micro_batch import MicroBatch, Rows, fine_budget, micro_batches, ranges, read, shares, whole_batches
from rollout.schema import SCHEMA, ragged
from tests.learner.rollouts import make_group, make_groups, said, taught, uniform

# What the learner reads out of a batch's tables: every column, row by row; what is wrong with one, by its row.


def with_versions(group: pa.Table, versions: list[list[int]]) -> pa.Table:
    place, field = SCHEMA.get_field_index("token_versions"), SCHEMA.field("token_versions")
    return group.set_column(place, field, pa.array(versions, field.type))


def test_every_column_of_every_group_in_order() -> None:
    def behavior(prompt: list[int], completion: list[int]) -> list[float]:
        return [-float(i) for i in completion]

    one = with_versions(make_group([1, 2], [[3, 4], [5], []], [0.5, None, 1], behavior, cut=[1]), [[6, 7], [8], []])
    two = with_versions(make_group([9], [[10, 11, 12]], [2], behavior, cut=[0]), [[7, 7, 9]])
    rows = read([one, two])
    assert [reward.tolist() for reward in rows.rewards] == [pytest.approx([0.5, np.nan, 1], nan_ok=True), [2]]
    assert [prompt.tolist() for prompt in rows.prompts] == [[1, 2], [1, 2], [1, 2], [9]]
    assert rows.completions.tolist() == [3, 4, 5, 10, 11, 12]
    assert rows.behavior.tolist() == [-3, -4, -5, -10, -11, -12]
    assert rows.versions.tolist() == [6, 7, 8, 7, 7, 9]
    assert rows.lengths.tolist() == [2, 1, 0, 3]
    assert rows.truncated.tolist() == [False, True, False, True]
    assert rows.starts.tolist() == [0, 2, 3, 3]
    assert rows.places([3, 0]).tolist() == [3, 4, 5, 0, 1]
    assert rows.inputs([3, 0]).tolist() == [10, 11, 3]
    kinds = [array.dtype for array in (rows.completions, rows.behavior, rows.versions, rows.lengths, rows.truncated)]
    assert kinds == [np.int32, np.float32, np.int32, np.int64, np.bool_]


def with_experts(group: pa.Table, rows: list[list[list[int]] | None]) -> pa.Table:
    """rows: for each row, of each token the experts of one layer."""
    place, field = SCHEMA.get_field_index("routed_experts"), SCHEMA.field("routed_experts")
    cells = [None if row is None else np.array(row, np.int16).tobytes() for row in rows]
    return group.set_column(place, field, pa.array(cells, field.type))


def test_experts_lie_where_their_tokens_lie() -> None:
    """Each token has the experts (10 id, 10 id + 1), but those of a prompt differ from row to row: a packed row has
    those of the longest completion."""

    def of(*ids: int) -> list[list[int]]:
        return [[10 * i, 10 * i + 1] for i in ids]

    def even(_: list[int], completion: list[int]) -> list[float]:
        return [-1.0] * len(completion)

    one = with_experts(make_group([1, 2], [[3, 4], [5, 6, 7]], [0.5, 1], even), [of(1, 2, 3), of(7, 8, 5, 6)])
    two = with_experts(make_group([8], [[9, 11], [12]], [2, 1], even), [None, of(8)])
    rows = read([one, two])
    assert [None if one is None else one.tolist() for one in rows.experts or []] == [
        of(1, 2, 3), of(7, 8, 5, 6), None, of(8),
    ]  # fmt: skip
    for packed in (True, False):
        every = np.ones(len(rows.lengths))
        (batch,) = micro_batches(rows, np.zeros(len(rows.completions)), every, every > 0, 99, packed=packed)
        assert batch.experts is not None
        told = list(zip(batch.ids.flatten().tolist(), batch.experts.tolist(), strict=True))
        unknown = [[-1, -1]]
        assert [pair for token, pair in told if token in (1, 2)] == (of(7, 8) if packed else of(7, 8, 1, 2))
        assert [pair for token, pair in told if token == 8] == (unknown if packed else [*unknown, *of(8)])
        assert [pair for token, pair in told if token == 9] == unknown
        for token in (3, 5, 6):
            assert [pair for other, pair in told if other == token] == of(token)
        assert all(pair in unknown for token, pair in told if token == 0)  # padding
    assert read([one.slice(0, 0), make_group([1], [[2]], [0], even)]).experts is None
    longer = read([taught(one, [13, 14, 15]), taught(two, [16])]).of_teacher  # behind it the routers choose themselves
    (batch,) = micro_batches(longer, np.zeros(len(rows.completions)), every, every > 0, 99, packed=True)
    assert batch.experts is None
    assert batch.ids.tolist() == [[13, 14, 15, 5, 6, 3, 16, 9]]


def test_what_a_teacher_said_goes_with_its_tokens() -> None:
    """Of rows of any length, none too; only of tokens that the policy sampled, and as many of the likeliest as are
    asked for."""

    def logs(prompt: list[int], completion: list[int]) -> np.ndarray:
        known = np.full((len(completion), 20), -30.0)
        for place, token in enumerate(completion):  # token 7 at place 1: 7 is at -7.25, then 8, 9 and 10 follow
            known[place, token : token + 4] = -token - 0.25 * place - np.arange(4)
        return known

    masks = [None, [True, False, True], None]
    one = said(make_group([1, 2], [[3, 4], [5, 6, 7], []], [0, 1, 1], uniform, masks=masks), logs, 3)
    two = said(make_group([8], [[9]], [1], uniform), logs, 3)
    rows = read([one, two], 2)
    for packed in (True, False):
        every = np.ones(len(rows.lengths))
        (batch,) = micro_batches(rows, np.zeros(len(rows.completions)), every, every > 0, 99, packed=packed)
        assert batch.taught is not None
        assert batch.top_ids is not None
        assert batch.top_logprobs is not None
        found = zip(
            batch.targets.tolist(),
            batch.taught.tolist(),
            batch.top_ids.tolist(),
            batch.top_logprobs.tolist(),
            strict=True,
        )
        wanted = {3: 0, 4: 1, 5: 0, 7: 2, 9: 0}
        assert sorted(found) == [
            (token, -token - 0.25 * place, [token, token + 1], [-token - 0.25 * place, -token - 0.25 * place - 1])
            for token, place in wanted.items()
        ]
    assert rows.highest_id == 10
    (batch,) = micro_batches(read([one, two], 0), np.zeros(6), every, every > 0, 99, packed=True)
    assert batch.taught is not None
    assert batch.top_ids is None
    assert read([one, two]).teaching is None
    assert read([], 2).teaching is not None


def test_no_group_is_no_row() -> None:
    rows = read([])
    assert (rows.rewards, rows.prompts, rows.completions.tolist(), rows.lengths.tolist()) == ([], [], [], [])
    kinds = [array.dtype for array in (rows.completions, rows.behavior, rows.versions, rows.lengths, rows.truncated)]
    assert kinds == [np.int32, np.float32, np.int32, np.int64, np.bool_]


def test_rows_of_tables_that_are_slices_and_chunks_of_others() -> None:
    """A slice's lists lie in its parent's values; rows are told apart by their lengths."""
    groups = make_groups([[0, 1, 2], [3, 4]], lambda p, c: [-1.0 - i for i in c])
    both = pa.concat_tables(groups)
    found, wanted = read([both.slice(1, 3)]), read(groups)
    ids = [row for group in groups for row in ragged(group, "completion_ids")][1:4]
    assert found.completions.tolist() == [i for row in ids for i in row.tolist()]
    assert found.behavior.tolist() == [-1.0 - i for i in found.completions]
    assert found.lengths.tolist() == [len(row) for row in ids] == wanted.lengths.tolist()[1:4]
    assert [p.tolist() for p in found.prompts] == [p.tolist() for p in wanted.prompts[1:4]]


def test_what_was_not_sampled_is_known_by_its_mask_and_no_mask_costs_nothing() -> None:
    plain = make_group([5], [[1, 2], [3]], [0, 1], uniform)
    mixed = make_group([5], [[4, 5, 6], [7]], [0, 1], uniform, masks=[[True, False, True], None])
    assert read([plain]).sampled is None
    rows = read([plain, mixed])
    assert rows.sampled is not None
    assert rows.sampled.tolist() == [True] * 3 + [True, False, True] + [True]
    assert (rows.lengths.tolist(), rows.counts.tolist()) == ([2, 1, 3, 1], [2, 1, 2, 1])
    assert rows.places([2, 1]).tolist() == [3, 5, 2]
    assert rows.inputs([2, 0]).tolist() == [4, 5, 1]


def broken(value: float) -> Any:
    return lambda prompt, completion: [value if token == 4 else -1.0 for token in completion]


GOOD = make_group([5], [[1, 2], []], [0, 1], uniform)
WRONG = {
    "empty prompt": (make_group([], [[1]], [0], uniform), "prompt_ids: must hold at least one token, row 2 is empty"),
    "logprobs": (
        make_group([5], [[1, 2]], [0], lambda p, c: [-1.0]),
        "must have one length per row, row 2 has 2, 1, 2",
    ),
    "versions": (
        with_versions(make_group([5], [[1], [2, 3]], [0, 1], uniform), [[0], [0]]),
        "must have one length per row, row 3 has 2, 2, 1",
    ),
    "mask": (
        make_group([5], [[1], [2, 3, 4]], [0, 1], uniform, masks=[None, [True, False]]),
        "loss_mask: must have one value per token, row 3 has 2 for 3",
    ),
    "nan": (make_group([5], [[1], [2, 4]], [0, 1], broken(float("nan"))), "must be finite, row 3 has nan"),
    "inf": (make_group([5], [[4], [4]], [0, 1], broken(float("-inf"))), "must be finite, row 2 has -inf"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_malformed_rows_are_named_by_their_number_in_the_batch(wrong: str) -> None:
    table, sentence = WRONG[wrong]
    with pytest.raises(ValueError, match=sentence):
        read([GOOD, table])


def test_a_table_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema version must be"):
        read([GOOD.replace_schema_metadata({})])


def test_ranges() -> None:
    assert ranges(np.array([5, 0, 7]), np.array([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]
    assert ranges(np.array([], np.int64), np.array([], np.int64)).tolist() == []


def sequence(batch: MicroBatch, place: int) -> list[int]:
    """The tokens that the state at `place` of the flattened ids has read, by the segments or the padded row."""
    flat = batch.ids.flatten().tolist()
    if batch.layout is None:
        return flat[place // batch.ids.shape[1] * batch.ids.shape[1] : place + 1]
    (own,) = (s for s in batch.layout.segments if s.start <= place < s.stop)
    assert batch.positions is not None
    read = [*range(own.prefix_start, own.prefix_stop), *range(own.start, place + 1)]
    assert batch.positions[0, read].tolist() == list(range(len(read)))
    return [flat[i] for i in read]


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 200), packed=st.booleans(), observed=st.booleans())
def test_every_trained_token_once_in_its_place_and_within_budget(
    seed: int, budget: int, packed: bool, observed: bool
) -> None:
    groups = make_groups([[0, 1, 0], [1, 0, 1, 1]], lambda p, c: [-0.5 - i for i in range(len(c))], seed=seed)
    rows = read(groups)
    if observed:  # about a third of the tokens were not sampled
        rows = replace(rows, sampled=np.random.default_rng(seed).random(len(rows.completions)) > 1 / 3)
    trained = np.array([True, False, True, True, True, True, False])
    coefficients = np.arange(7, dtype=np.float64) / 8
    advantages = np.repeat(np.arange(7, dtype=np.float64), rows.lengths)
    found: list[int] = []
    batches = micro_batches(rows, advantages, coefficients, trained, budget, packed=packed)
    sizes = [batch.ids.numel() for batch in batches]
    assert not packed or sizes == sorted(sizes, reverse=True)
    for batch in batches:
        numbers = batch.advantages.int().tolist()
        assert batch.ids.numel() <= budget or len(set(numbers)) == 1
        assert torch.equal(batch.lengths, torch.unique_consecutive(batch.advantages, return_counts=True)[1])
        for row in sorted(set(numbers)):
            mine = batch.advantages == row
            own = slice(rows.starts[row], rows.starts[row] + rows.lengths[row])
            prompt, completion = rows.prompts[row].tolist(), rows.completions[own].tolist()
            kept = np.flatnonzero(np.ones(len(completion)) if rows.sampled is None else rows.sampled[own]).tolist()
            assert batch.targets[mine].tolist() == [completion[i] for i in kept]
            for i, place in zip(kept, batch.index[mine].tolist(), strict=True):
                assert sequence(batch, place) == prompt + completion[:i]
            assert batch.coefficients[mine].tolist() == [row / 8] * len(kept)
            assert batch.places[mine].tolist() == [int(rows.starts[row]) + i for i in kept]
            assert batch.behavior[mine].tolist() == [-0.5 - i for i in kept]
            found.append(row)
    assert sorted(found) == [row for row in (0, 2, 3, 4, 5) if rows.counts[row]]


def everything(rows: Rows, budget: int, *, packed: bool) -> list[MicroBatch]:
    n = len(rows.lengths)
    return micro_batches(
        rows,
        np.repeat(np.arange(n, dtype=np.float64), rows.lengths),
        np.ones(n),
        np.ones(n, dtype=bool),
        budget,
        packed=packed,
    )


def test_padded_longest_first_and_a_long_row_alone() -> None:
    group = make_group([1, 2], [[3], [3] * 9, [3] * 4], [0, 1, 2], uniform)
    assert [tuple(b.ids.shape) for b in everything(read([group]), 7, packed=False)] == [(1, 10), (1, 5), (1, 2)]


def test_groups_stay_whole_if_they_fit_else_share_the_prompt_within_each_part() -> None:
    small = make_group([1, 2], [[3] * 4, [3] * 2], [0, 1], uniform)  # 2 + 3 + 1 tokens
    large = make_group([5] * 4, [[6] * 4] * 5, [0, 1, 2, 3, 4], uniform, position=1)  # 4 + 5 * 3
    batches = everything(read([small, large]), 13, packed=True)
    # the large one in parts of 3 and 2 completions; of the whole 2 + 6 tokens fit beside neither
    assert [b.ids.tolist()[0] for b in batches] == [[5] * 4 + [6] * 9, [5] * 4 + [6] * 6, [1, 2, 3, 3, 3, 3]]
    (whole,) = everything(read([small, large]), 25, packed=True)
    assert whole.layout is not None
    assert whole.layout.segments[0] == (0, 4, 0, 0)
    assert whole.layout.segments[1] == (4, 7, 0, 4)
    assert whole.layout.segments[-2:] == [(21, 24, 19, 21), (24, 25, 19, 21)]


def test_packed_no_row_is_over_the_budget_and_the_fullest_is_first() -> None:
    # prompts of 5, 4 and 4 tokens, each with a completion of 2; then 3 alike, of which 2 fit
    groups = [make_group([i] * size, [[9, 9]], [i], uniform, position=i) for i, size in enumerate([5, 4, 4])]
    assert [tuple(b.ids.shape) for b in everything(read(groups), 10, packed=True)] == [(1, 10), (1, 6)]
    groups = [make_group([i] * 4, [[9, 9]], [i], uniform, position=i) for i in range(3)]
    assert [tuple(b.ids.shape) for b in everything(read(groups), 11, packed=True)] == [(1, 10), (1, 5)]


def test_a_completion_that_shares_with_nobody_is_one_plain_segment() -> None:
    (batch,) = everything(read([make_group([1, 2], [[3] * 9], [0], uniform)]), 4, packed=True)
    assert batch.layout is not None
    assert batch.layout.segments == [(0, 10, 0, 0)]


@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_completion_is_not_trained(packed: bool) -> None:
    group = make_group([1, 2], [[], [3, 4]], [0, 1], uniform)
    (batch,) = everything(read([group]), 100, packed=packed)
    assert batch.ids.tolist() == [[1, 2, 3]]
    assert batch.index.tolist() == [1, 2]
    assert batch.targets.tolist() == [3, 4]
    assert batch.targets.dtype == torch.int64


@pytest.mark.parametrize("packed", [False, True])
def test_every_tensor_is_of_its_type_and_every_token_has_its_version(packed: bool) -> None:
    groups = [make_group([i], [[3] * 4, [5]], [0, 1], uniform, position=i, version=i) for i in range(2)]
    (batch,) = everything(read(groups), 100, packed=packed)
    assert batch.versions.tolist() == [int(row) // 2 for row in batch.advantages]
    for kind, names in {
        torch.int64: ("ids", "index", "targets", "lengths", "places"),
        torch.float32: ("behavior", "advantages", "coefficients"),
        torch.int32: ("versions",),
    }.items():
        assert {getattr(batch, name).dtype for name in names} == {kind}


@pytest.mark.parametrize(("budget", "shapes"), [(10, [(2, 5), (1, 5)]), (9, [(1, 5)] * 3)])
def test_padded_as_many_rows_as_fit_to_the_token(budget: int, shapes: list[tuple[int, int]]) -> None:
    group = make_group([1, 2], [[3] * 4] * 3, [0, 1, 2], uniform)
    assert [tuple(b.ids.shape) for b in everything(read([group]), budget, packed=False)] == shapes


@pytest.mark.parametrize("packed", [False, True])
def test_completions_of_one_length_stay_in_their_order(packed: bool) -> None:
    """On every machine: numpy's other sorts depend on the processor."""
    group = make_group([1, 2], [[3, 4, 5], [3, 4]] * 150, [0] * 300, uniform)
    batches = everything(read([group]), 1000, packed=packed)
    found = [row for batch in batches for row in torch.unique_consecutive(batch.advantages).tolist()]
    assert found == [*range(0, 300, 2), *range(1, 300, 2)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_copy_on_a_device_is_whole_and_has_a_layout_of_its_own(packed: bool) -> None:
    (batch,) = everything(read([make_group([1, 2], [[3] * 4, [5]], [0, 1], uniform)]), 100, packed=packed)
    moved = batch.to(torch.device("meta"))
    for name in MicroBatch.__slots__:
        here, there = getattr(batch, name), getattr(moved, name)
        if isinstance(here, torch.Tensor):
            assert (here.device.type, there.device.type) == ("cpu", "meta")
            assert (here.shape, here.dtype) == (there.shape, there.dtype)
    assert (moved.layout is None, moved.positions is None) == (not packed, not packed)
    if batch.layout is not None and moved.layout is not None:
        assert moved.layout is not batch.layout
        assert moved.layout.segments == batch.layout.segments


# How micro-batches are made for several ranks, and who takes which.


def test_largest_first_to_the_emptiest() -> None:
    assert shares([7, 5, 4, 3, 3, 2], 2) == [[0, 3, 5], [1, 2, 4]]
    assert shares([2, 3, 7, 3, 5, 4], 2) == [[0, 1, 2], [3, 4, 5]]
    assert shares([9, 9], 4) == [[0], [1], [], []]
    assert shares([], 2) == [[], []]


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(1, 9))
def test_every_micro_batch_has_one_rank_and_none_is_far_ahead(sizes: list[int], ranks: int) -> None:
    own = shares(sizes, ranks)
    assert sorted(place for places in own for place in places) == list(range(len(sizes)))
    loads = [sum(sizes[place] for place in places) for places in own]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_finest_pieces_in_which_little_is_repeated() -> None:
    short = [(50, 2000)] * 8  # 16,400 tokens; a family in three parts repeats 100
    assert fine_budget(short, 8192, 256) == 1025
    assert fine_budget(short, 8192, 4096) == 4096
    assert fine_budget(short, 600, 256) == 600
    long = [(1500, 1500)] * 8  # two halves of a family would repeat half of it
    assert fine_budget(long, 8192, 256) == 3000
    assert fine_budget([(1500, 1500)] * 2, 8192, 256) == 8192
    assert fine_budget([(0, 100)] * 64, 8192, 1) == 100


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ragged_completions_are_divided_evenly(packed: bool, ranks: int) -> None:
    rows = read(make_groups([[0.0, 1.0] * 8] * 24, uniform, max_completion=400, prompt_length=30))
    batches = planned(rows, packed=packed)
    loads = [sum(batches[place].ids.numel() for place in own) for own in shares(sizes_of(batches), ranks)]
    assert max(loads) / np.mean(loads) < 1.05
    alone = micro_batches(*parts(rows), 8192, packed=packed)
    assert sum(sizes_of(batches)) < 1.05 * sum(sizes_of(alone))


def parts(rows: Rows) -> tuple[Rows, np.ndarray, np.ndarray, np.ndarray]:
    each = np.ones(len(rows.lengths))
    return rows, np.zeros(len(rows.completions)), each, each > 0


def planned(rows: Rows, *, packed: bool) -> list[MicroBatch]:
    return micro_batches(*parts(rows), 8192, packed=packed, fine=256)


def sizes_of(batches: list[MicroBatch]) -> list[int]:
    return [batch.ids.numel() for batch in batches]


# Whole sequences in micro-batches: every completion once, read up to its last token that is not padding.

TOKEN = st.integers(0, 3)  # 0 is the padding
GROUP = st.tuples(
    st.lists(TOKEN, min_size=1, max_size=4), st.lists(st.lists(TOKEN, max_size=5), min_size=1, max_size=4)
)


@settings(max_examples=80)
@given(
    groups=st.lists(GROUP, min_size=1, max_size=3),
    budget=st.integers(1, 40),
    packed=st.booleans(),
    pad=st.sampled_from([0, None]),
)
def test_every_sequence_once_and_up_to_its_last_real_token(
    groups: list[tuple[list[int], list[list[int]]]], budget: int, packed: bool, pad: int | None
) -> None:
    tables = [make_group(prompt, own, [0.0] * len(own), uniform, position=i) for i, (prompt, own) in enumerate(groups)]
    wanted = []
    for whole in (prompt + completion for prompt, own in groups for completion in own):
        real = [i for i, token in enumerate(whole) if token != pad]
        wanted.append(whole[: real[-1] + 1 if real else 1])
    batches = whole_batches(read(tables), budget, packed=packed, pad=pad)
    found = {
        row: sequence(each.batch, end)
        for each in batches
        for row, end in zip(each.rows.tolist(), each.ends.tolist(), strict=True)
    }
    assert [found[row] for row in range(len(wanted))] == wanted
    assert sum(len(each.rows) for each in batches) == len(wanted)
    assert all(each.ids.numel() <= budget or len(each.rows) == 1 for each in batches)
    assert np.all(np.concatenate([each.batch.lengths for each in batches]) > 0)


def test_a_copy_that_a_rank_computes_only_so_that_others_need_not_wait_is_marked() -> None:
    rows = read(make_groups([[0.0, 1.0]], uniform))
    batch, *_ = micro_batches(*parts(rows), 8192, packed=True)
    copy = batch.idle_copy()
    assert (batch.idle, copy.idle) == (False, True)
    assert copy.ids is batch.ids
