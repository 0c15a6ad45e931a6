"""Micro-batches: every trained token once, in its place, within the budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch import micro_batches, read
from tests.learner.rollouts import make_group, make_groups, uniform


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 200))
def test_every_trained_token_once_and_within_budget(seed: int, budget: int) -> None:
    groups = make_groups([[0, 1, 0], [1, 0, 1, 1]], lambda p, c: [-0.5 - i for i in range(len(c))], seed=seed)
    rows = read(groups)
    trained = np.array([True, False, True, True, True, True, False])
    advantages, coefficients = np.arange(7, dtype=np.float64), np.arange(7, dtype=np.float64) / 8
    found: dict[int, tuple[list[int], list[int]]] = {}
    for batch in micro_batches(rows, advantages, coefficients, trained, budget):
        assert batch.ids.numel() <= budget or len(batch.ids) == 1
        flat = batch.ids.flatten()
        for row in sorted({int(a) for a in batch.advantages}):
            mine = batch.advantages == row
            place = batch.index[mine]
            begin = int(place[0]) // batch.ids.shape[1] * batch.ids.shape[1]
            found[row] = (flat[begin : int(place[0]) + 1].tolist(), batch.targets[mine].tolist())
            assert flat[place[1:]].tolist() == batch.targets[mine][:-1].tolist()  # each state reads the token before
            assert batch.coefficients[mine].tolist() == [row / 8] * int(mine.sum())
            assert batch.behavior[mine].tolist() == [-0.5 - i for i in range(int(mine.sum()))]
    assert sorted(found) == [0, 2, 3, 4, 5]
    for row, (prompt, completion) in found.items():
        assert prompt == rows.prompts[row].tolist()
        assert completion == rows.completions[row].tolist()


def test_longest_first_and_a_long_row_alone() -> None:
    group = make_group([1, 2], [[3], [3] * 9, [3] * 4], [0, 1, 2], uniform)
    batches = micro_batches(read([group]), np.zeros(3), np.zeros(3), np.ones(3, dtype=bool), 7)
    assert [tuple(batch.ids.shape) for batch in batches] == [(1, 10), (1, 5), (1, 2)]


def test_token_arrays_are_views_of_the_tables() -> None:
    (group,) = make_groups([[0, 1]], uniform)
    buffers = group.column("completion_ids").chunks[0].values.buffers()
    start, size = buffers[1].address, buffers[1].size
    assert all(start <= row.ctypes.data < start + size for row in read([group]).completions)


def test_an_empty_completion_is_not_trained() -> None:
    group = make_group([1, 2], [[], [3, 4]], [0, 1], uniform)
    (batch,) = micro_batches(read([group]), np.ones(2), np.ones(2), np.ones(2, dtype=bool), 100)
    assert batch.ids.tolist() == [[1, 2, 3]]
    assert batch.index.tolist() == [1, 2]
    assert batch.targets.tolist() == [3, 4]
    assert batch.targets.dtype == torch.int64


def test_malformed_rows_are_named() -> None:
    with pytest.raises(ValueError, match="prompt_ids: must hold at least one token, row 0 is empty"):
        read([make_group([], [[1]], [0], uniform)])
    with pytest.raises(ValueError, match=r"one length per row, row 0 has 2, 1, 2"):
        read([make_group([5], [[1, 2]], [0], lambda p, c: [-1.0])])
    with pytest.raises(ValueError, match="behavior_logprobs: must be finite, row 1"):
        read([make_group([5], [[1], [2]], [0, 1], lambda p, c: [-1.0 if c == [1] else float("nan")])])
