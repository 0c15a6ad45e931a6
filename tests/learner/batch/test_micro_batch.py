"""Micro-batches: every trained token once, in its place, within the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch.micro_batch import MicroBatch, Rows, micro_batches, read
from tests.learner.rollouts import make_group, make_groups, uniform


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
