"""How micro-batches are made for several ranks, and who takes which."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.batch.micro_batch import MicroBatch, Rows, fine_budget, micro_batches, read, shares
from tests.learner.rollouts import make_groups, uniform


def test_largest_first_to_the_emptiest() -> None:
    assert shares([7, 5, 4, 3, 3, 2], 2) == [[0, 3, 5], [1, 2, 4]]
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
