"""What the learner reads out of a batch's tables: every column, row by row; what is wrong with one, by its row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from learner.batch.micro_batch import ranges, read
from rollout.schema import SCHEMA, ragged
from tests.learner.rollouts import make_group, make_groups, uniform


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
