"""The border between processes: everything arrives, nothing is copied, and what is not whole is refused."""

from __future__ import annotations

import json
import math
import pickle
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import ledger
from rollout.fakes import make_columns, make_group
from rollout.schema import (
    SCHEMA,
    Problem,
    asked_of,
    build_group,
    check,
    check_rows,
    experts_of,
    group_position,
    lasts,
    oldest_versions,
    parts_of,
    ragged,
    rewards_of,
    said_of,
    sampled_lengths,
    whole,
    with_part,
)
from rollout.types import Completion

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    tokens=st.lists(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), FLOATS), min_size=1, max_size=5), min_size=1, max_size=4
    ),
    data=st.data(),
)
@settings(max_examples=30)
def test_what_goes_in_comes_out_also_from_slices(tokens: list[list[tuple[int, float]]], data: st.DataObject) -> None:
    completions = [
        Completion(
            token_ids=np.array([t for t, _ in row], np.int32),
            logprobs=np.array([p for _, p in row], np.float32),
            finish_reason="length",
            versions=np.arange(len(row), dtype=np.int32),
        )
        for row in tokens
    ]
    rewards = data.draw(st.lists(st.none() | FLOATS, min_size=len(tokens), max_size=len(tokens)))
    table = make_group(5, attempt=2, completions=completions, rewards=rewards)
    start = data.draw(st.integers(0, len(tokens) - 1))
    part = check(pa.concat_tables([table, table]).slice(start, len(tokens)))  # crosses from one chunk into the next
    turn = [*range(start, len(tokens)), *range(start)]
    for name, values in (("completion_ids", 0), ("behavior_logprobs", 1)):
        assert [row.tolist() for row in ragged(part, name)] == [[t[values] for t in tokens[i]] for i in turn]
    assert [v.tolist() for v in ragged(part, "token_versions")] == [list(range(len(tokens[i]))) for i in turn]
    np.testing.assert_array_equal(rewards_of(part), [np.nan if rewards[i] is None else rewards[i] for i in turn])
    assert parts_of(part) == [{"vowels": rewards[i]} for i in turn]
    assert group_position(part) == (5, 2)
    assert part.column("group_id")[0].as_py() == "0-5-2"


def test_a_group_travels_without_its_schema_and_uncopied() -> None:
    table = make_group(rewards=(1.0, 0.0, 0.5))
    apart: list[pickle.PickleBuffer] = []
    head = pickle.dumps(table.slice(1), protocol=5, buffer_callback=apart.append)
    (sent,) = (pa.py_buffer(one) for one in apart)
    assert len(head) < 200
    assert sent.size < table.get_total_buffer_size() + 3300
    arrived = pickle.loads(head, buffers=apart)
    assert check(arrived).equals(table.slice(1))
    values = arrived.column("completion_ids").chunks[0].values.buffers()[1]
    assert sent.address <= values.address < sent.address + sent.size
    of_another = pa.table({"column": [1, 2]})
    assert pickle.loads(pickle.dumps(of_another)).equals(of_another)
    assert pickle.loads(pickle.dumps(table.slice(3))).equals(table.slice(3))  # no rows


def test_ragged_views_are_the_memory_of_the_table() -> None:
    table = make_group(rewards=(1.0, 0.0, 0.5))
    _, _, values = table.column("completion_ids").chunks[0].values.buffers()[-1:] * 3
    start = values.address
    views = ragged(table.slice(1), "completion_ids")
    assert [view.tolist() for view in views] == [[0, 1], [0, 1, 2]]
    assert [view.__array_interface__["data"][0] - start for view in views] == [4 * 1, 4 * 3]  # int32 offsets 1 and 3
    assert not any(view.flags.writeable for view in views)


def test_the_ledger_keeps_every_row(tmp_path: Path) -> None:
    groups = [make_group(0), make_group(1, rewards=(None, 0.25))]
    path = ledger.write(tmp_path / "rollouts", 12, groups)
    ledger.write(tmp_path / "rollouts", 3, groups)
    assert ledger.read(path).equals(pa.concat_tables(groups))
    assert [p.name for p in ledger.steps(tmp_path / "rollouts")] == ["step-000003.parquet", "step-000012.parquet"]


def test_groups_that_were_joined_travel_whole() -> None:
    joined = pa.concat_tables([make_group(1), make_group(2, rewards=(0.5,))])
    assert joined.column("reward").num_chunks == 2
    assert pickle.loads(pickle.dumps(joined)).equals(joined)


def test_a_column_that_json_has_no_word_for_is_kept_as_text() -> None:
    problem = Problem("train-0", "When?", {"day": date(2020, 1, 2)}, (1,), 0, 0)
    assert json.loads(problem.to_json()) == {"messages": "When?", "columns": {"day": "2020-01-02"}}


def test_another_version_is_refused() -> None:
    for metadata, found in (({"gleaner.schema": "1"}, "1"), (None, "none")):
        with pytest.raises(ValueError, match=f"must be 7, got {found}"):
            check(make_group().replace_schema_metadata(metadata))


def test_of_a_trajectory_with_several_rows_the_last_speaks_for_it() -> None:
    one, other = make_group(3, rewards=(1.0, 1.0, 0.0), sample=[0, 0, 1]), make_group(4, rewards=(1.0,))
    table = pa.concat_tables([one, other, make_group(5, rewards=(0.5,))])  # the last two have sample 0 in groups of one
    assert lasts(table).tolist() == [False, True, True, True, True]
    assert whole(table).equals(table.filter(pa.array([False, True, True, True, True])))
    assert whole(other) is other


def test_tokens_and_versions_of_a_trajectory_are_those_of_all_its_rows() -> None:
    table = make_group(3, rewards=(1.0, 1.0, 0.0, 0.5, 0.5), sample=[0, 0, 1, 2, 2])
    columns = {
        "completion_ids": [[1] * length for length in (3, 4, 5, 2, 6)],
        "loss_mask": [None, [True, False, False, True], None, [False, True], None],
        "policy_version_min": [7, 5, 6, 3, 4],
    }
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type))
    assert sampled_lengths(table).tolist() == [3 + 2, 5, 1 + 6]
    assert oldest_versions(table).tolist() == [5, 6, 3]


def test_experts_are_so_many_for_each_token() -> None:
    table = make_group(3, rewards=(1.0, 0.0, 0.0))
    tokens = [
        len(prompt) + len(own) - 1
        for prompt, own in zip(*(ragged(table, name) for name in ("prompt_ids", "completion_ids")), strict=True)
    ]
    wanted = [np.arange(12 * tokens[0], dtype=np.int16).reshape(-1, 12), None, np.zeros((tokens[2], 6), np.int16)]
    place, field = table.schema.get_field_index("routed_experts"), SCHEMA.field("routed_experts")

    def told(cells: list[Any]) -> pa.Table:
        return table.set_column(place, field, pa.array(cells, field.type))

    found = experts_of(told([None if one is None else one.tobytes() for one in wanted]))
    for own, other in zip(found, wanted, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert np.array_equal(own, other)
    for cell in (b"", b"123", bytes(2 * tokens[0] + 2)):
        with pytest.raises(
            ValueError, match=f"int16 numbers for each of {tokens[0]} tokens, row 0 has {len(cell)} bytes"
        ):
            check_rows(told([cell, None, None]))


def test_what_a_teacher_says_is_so_much_for_each_token() -> None:
    """Of the last row all, of the others nothing; then one thing of the last row is wrong."""
    table = make_group(3, rewards=(1.0, 0.0, 0.0))
    tokens = len(ragged(table, "completion_ids")[2])

    def told(one: int | None, ids: int | None, logs: int | None) -> pa.Table:
        found = table
        for name, count in (("logprobs", one), ("top_ids", ids), ("top_logprobs", logs)):
            place, field = found.schema.get_field_index(f"teacher_{name}"), SCHEMA.field(f"teacher_{name}")
            first = None if count is None else [0] * count
            found = found.set_column(place, field, pa.array([None, None, first], field.type))
        return found

    for right in ((tokens, None, None), (tokens, 4 * tokens, 4 * tokens)):
        assert check_rows(told(*right)).num_rows == 3
    for one, ids, logs, said in (
        (tokens + 1, None, None, "teacher_logprobs must hold a value for each"),
        (tokens, 4 * tokens, 3 * tokens, "must be of one length, row 2"),
        (tokens, 4 * tokens, None, "must be of one length, row 2"),
        (tokens, 4 * tokens + 1, 4 * tokens + 1, f"as many for each of {tokens} tokens, row 2 has {4 * tokens + 1}"),
        (None, tokens, tokens, "must come with teacher_logprobs, row 2"),
    ):
        with pytest.raises(ValueError, match=said):
            check_rows(told(one, ids, logs))


def test_missing_and_unknown_columns_are_named() -> None:
    columns = make_columns()
    columns["advantage"] = columns.pop("reward")  # a target where a fact should be
    with pytest.raises(ValueError, match=r"missing \['reward'\], unknown \['advantage'\]"):
        build_group(columns)
    with pytest.raises(ValueError, match="fields differ"):
        check(make_group().drop_columns(["seed"]))


@pytest.mark.parametrize("name", ["finish_reason", "completion_ids", "policy_version_min"])
def test_a_null_where_a_fact_must_be_is_refused(name: str) -> None:
    assert not SCHEMA.field(name).nullable
    changed: dict[str, Any] = {name: [None, make_columns()[name][1]]}
    with pytest.raises(ValueError, match=f"{name} must not hold nulls, got 1"):
        make_group(**changed)


def test_columns_of_another_length_or_type_are_refused() -> None:
    with pytest.raises((ValueError, pa.ArrowInvalid)):
        make_group(seed=[1, 2, 3])
    with pytest.raises((TypeError, pa.ArrowInvalid)):
        make_group(completion_ids=[["a"], ["b"]])


@pytest.mark.parametrize("name", ["reward_parts", "env_metrics", "logged"])
def test_a_number_without_a_name_is_refused_in_a_table_from_a_file(name: str) -> None:
    group = make_group()
    assert check_rows(group) is group
    place, item = group.column_names.index(name), SCHEMA.field(name).type
    nameless = pa.array([[{"name": None}], []], item)
    with pytest.raises(ValueError, match=f"^column {name} must hold no nulls in its lists"):
        check_rows(group.set_column(place, name, nameless))


# What a reward model says, beside what a worker's functions said.


def test_a_score_counts_as_a_function_s_would() -> None:
    status = ["ok", "none", "error", "ok", "ok"]
    late = "reward 'vowels': 0: stopped after 4 s"
    group = make_group(
        rewards=[1.0, None, None, 0.5, 0.5], reward_status=status, reward_error=[late, None, None, None, None]
    )
    scored = check(with_part(group, "helpful", 2.0, [0.25, -1.5, 3.0, math.inf, 1e31]))
    assert scored.column("reward").to_pylist() == [1.5, -3.0, None, None, None]
    assert scored.column("reward_status").to_pylist() == ["ok", "ok", "error", "nan", "nan"]
    errors = scored.column("reward_error").to_pylist()
    assert errors[:3] == [late, None, None]
    assert errors[3] == "reward 'helpful': nan: the reward model gave inf, which is no finite number."
    with pytest.raises(ValueError, match="the environment gives helpful as well; set rewards.<i>.name"):
        with_part(scored, "helpful", 1.0, [0.0] * 5)
    with pytest.raises(ValueError, match="longer|shorter"):
        with_part(group, "helpful", 1.0, [0.0] * 6)
    said = [parts["helpful"] for parts in parts_of(scored)]
    assert said == pytest.approx([0.25, -1.5, 3.0, math.nan, math.nan], nan_ok=True)
    assert [parts["vowels"] for parts in parts_of(scored)] == [1.0, None, None, 0.5, 0.5]
    kept = [name for name in group.column_names if not name.startswith("reward")]
    assert scored.select(kept).equals(group.select(kept))
    watched = check(with_part(group, "helpful", None, [0.25, -1.5, 3.0, math.inf, 1e31]))
    assert [parts["helpful"] for parts in parts_of(watched)] == pytest.approx(said, nan_ok=True)
    kept = [name for name in group.column_names if name != "reward_parts"]
    assert watched.select(kept).equals(group.select(kept))


# What a row says of its problem and of its messages, read from files that anyone may have written.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "column messages must be JSON: "),
        ('{"role": "user"}', "column messages must hold a list of mappings"),
        ('["user"]', "column messages must hold a list of mappings"),
    ],
)
def test_messages_that_are_none_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        said_of(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "column problem must be JSON: "),
        ("[]", "column problem must hold a mapping, got list"),
        ('{"columns": {}}', "column problem must have messages: a text, or a list of mappings"),
        ('{"columns": {}, "messages": [1]}', "column problem must have messages: a text, or a list of mappings"),
        ('{"messages": "?"}', "column problem must have columns, a mapping, and may have prefilled, a text"),
        ('{"messages": "?", "columns": []}', "column problem must have columns, a mapping, and may have"),
        ('{"messages": "?", "columns": {}, "prefilled": 1}', "column problem must have columns, a mapping, and may"),
    ],
)
def test_a_problem_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        asked_of(text)


def test_what_a_row_says_of_its_problem_and_messages() -> None:
    chat = [{"role": "user", "content": "?"}]
    assert asked_of(json.dumps({"messages": chat, "columns": {"a": 1}})) == (chat, {"a": 1}, "")
    assert asked_of('{"messages": "?", "columns": {}, "prefilled": "<"}') == ("?", {}, "<")
    assert said_of(json.dumps(chat)) == chat
    assert said_of(None) is None
