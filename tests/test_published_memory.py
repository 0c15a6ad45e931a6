"""The plan beside published measurements: near them where settings are the same, nowhere above the GRPO table."""

import pytest

from benchmarks.learner.memory_tables import PUBLISHED, by_generations, grpo_cells, published, published_report
from cluster.memory.shape import GB


def test_every_row_of_the_same_thing_is_within_a_tenth() -> None:
    same = [row for row in published() if not row.apart]
    assert len(same) == 12
    assert {row.what: row.difference for row in same if abs(row.difference) > 0.1} == {}


def test_no_cell_of_the_published_table_is_exceeded() -> None:
    cells = [(size, own) for row in grpo_cells().values() for size, own in row]
    assert len(cells) == 20
    assert all(own <= size * GB for size, own in cells if size is not None)


def test_a_step_follows_the_budget_and_not_the_number_of_completions() -> None:
    kept, whole, *_ = by_generations().values()
    assert max(kept) == pytest.approx(min(kept), rel=0.01)
    assert whole[-1] > 8 * whole[0]


def test_the_document_has_the_table_as_it_is_made() -> None:
    assert PUBLISHED.text() == published_report(published())
