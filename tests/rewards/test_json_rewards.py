"""JSON as an answer: its schema and its content, read strictly."""

from __future__ import annotations

import pytest

from rewards.json_match import json_match
from rewards.json_schema import json_schema

SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ('{"n": 1}', 1),
        (' \n{"n": 1, "more": [null]}\n', 1),
        ('```json\n{"n": 1}\n```', 1),
        ('{"n": "1"}', 0),
        ('{"n": 1.5}', 0),
        ('{"n": 1} {"n": 2}', 0),
        ('Sure: {"n": 1}', 0),
        ('{"n": 1, "n": 2}', 0),  # of which readers take one or the other
        ('{"n": 1, "x": NaN}', 0),
        ("[" * 100_000, 0),
        (f'{{"n": {"9" * 10_000}}}', 0),  # Python refuses to read it
        ("", 0),
    ],
)
def test_a_schema_is_kept_by_json_and_nothing_else(text: str, keeps: int) -> None:
    assert json_schema([text], schema=[SCHEMA]) == [keeps]
    assert json_schema([f"so <j>{text}</j>."], tag="j", schema=[SCHEMA]) == [keeps]


def test_a_schema_that_is_none_is_no_score() -> None:
    unresolved = '{"properties": {"n": {"$ref": "%s"}}}'  # which no completion has led to yet
    for schema in ("{", "1", '{"type": "nothing"}', unresolved % "#/$defs/n", unresolved % "http://h/n"):
        with pytest.raises(ValueError, match="is no JSON schema"):
            json_schema(["{}"], schema=[schema])


def test_references_within_a_schema_are_followed() -> None:
    tree = '{"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}'
    assert json_schema(["[[[]], []]", "[[1]]"], schema=[tree] * 2) == [1, 0]


def test_a_number_that_cannot_be_divided_costs_its_own_completion_only() -> None:
    texts = [f'{{"n": 1{"0" * 400}}}', '{"n": 1e999}', '{"n": 3}']
    assert json_schema(texts, schema=['{"properties": {"n": {"multipleOf": 0.5}}}'] * 3) == [0, 0, 1]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ('{"b": [1, {"c": "x"}], "a": 1.0}', 1),  # order of keys, and 1.0 is 1
        ('{"a": 1, "b": [1]}', 2 / 3),
        ('{"a": 1, "b": [{"c": "x"}, 1]}', 1 / 5),  # another place is another value
        ('{"a": true, "b": [1, {"c": "x"}]}', 2 / 3),
        ('{"a": 1, "b": [1, {"c": "x", "d": 2}]}', 3 / 4),
        ("7", 0),
        ("no", 0),
    ],
)
def test_content_is_compared_value_by_value(text: str, share: float) -> None:
    gold = {"a": 1, "b": [1, {"c": "x"}]}
    assert json_match([text], answer=[gold]) == [pytest.approx(share)]


def test_rows_of_a_table_which_have_the_keys_of_all_rows_are_as_those_of_a_list() -> None:
    rows = [{"a": 1, "b": None, "c": {"d": None}}, {"a": None, "b": [None, 1], "c": None}]
    assert json_match(['{"a": 1, "c": {}}', '{"b": [null, 1]}'], answer=rows) == [1, 1]
    schema = {"type": "object", "properties": {"n": {"enum": [1, {"a": None}]}, "m": None}, "items": None}
    assert json_schema(['{"n": 1, "m": 2}', '{"n": {"a": null}}', '{"n": {}}'], schema=[schema] * 3) == [1, 1, 0]
    with pytest.raises(ValueError, match="must be JSON, and is null"):
        json_match(["null"], answer=[None])


def test_an_empty_list_or_mapping_is_a_value() -> None:
    texts = ["{}", "[]", '{"a": []}', '{"a": {}}']
    gold: list[dict[str, list[int]]] = [{}, {}, {"a": []}, {"a": []}]
    assert json_match(texts, answer=gold) == [1, 0, 1, 0]


def test_gold_may_be_a_part_of_a_nested_column() -> None:
    talk = [[{"value": "?"}, {"value": '{"a": 1}'}]]
    assert json_match(['{"a": 1}'], column="talk[1][value]", talk=talk) == [1.0]
    for column, said in {
        "talk[1][text]": "no 'text'",
        "talk[2]": "no '2'",
        "talk[": "no column",
        "x[1]": "no column",
    }.items():
        with pytest.raises(ValueError, match=said):
            json_match(["{}"], column=column, talk=talk)
