"""JSON as an answer: its schema and its content, read strictly."""

from __future__ import annotations

import time
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest

from rewards.built_in.json_match import json_match
from rewards.built_in.json_schema import json_schema

np = pytest.importorskip("numpy")
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


SLOW = {  # schema, a text that it takes for ever with, one that it allows
    "a pattern": ({"pattern": "^(a+)+$"}, f'"{"a" * 40}!"', '"aaa"'),
    "a pattern of names": (
        {"patternProperties": {"^(x|x)*y$": {}}, "additionalProperties": False}, f'{{"{"x" * 40}": 1}}', '{"xxy": 1}'),
    "a pattern of items": ({"items": {"pattern": "^(.*,){20}$"}}, f'["{"," * 60}!"]', "[]"),
}  # fmt: skip


@pytest.mark.parametrize("case", SLOW)
def test_a_completion_that_a_schema_takes_for_ever_with_loses_its_own_score(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewards.built_in.json_schema._SECONDS", 0.4)
    schema, slow, right = SLOW[case]
    begin = time.process_time()
    found: Any = json_schema([right, *[slow] * 6, right], schema=[schema] * 8)
    assert time.process_time() - begin < 2  # the first two have all of it, the others an eighth
    assert found == [1.0, *[0.0] * 6, 1.0]
    assert set(found.why) == {*range(1, 7)}
    assert "not held against its schema within 0.4 s" in found.why[1]


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
    with pytest.raises(ValueError, match="NaN is no number of JSON"):
        json_match(["null"], answer=['{"a": NaN}'])


def test_what_json_does_not_have_is_told_and_numpys_numbers_are_numbers() -> None:
    gold = {"a": np.int64(1), "b": (np.float32(0.5), np.bool_(True)), "c": np.array([1, 2])}
    assert json_match(['{"a": 1, "b": [0.5, true], "c": [1, 2]}'], answer=[gold]) == [1]
    assert json_schema(["3", "2"], schema=[{"minimum": np.int64(3)}] * 2) == [1, 0]
    odd: dict[str, Any] = {
        "date at 'a'": {"a": date(2020, 1, 1)}, "datetime at 'a[1].b'": {"a": [1, {"b": datetime(2020, 1, 1)}]},
        "datetime64 at 'a'": {"a": np.datetime64("2020-01-01", "ns")}, "nan at 'a'": {"a": float("nan")},
        "the key 1 under 'a' is of type int": {"a": {1: 2}}, "Decimal is nothing": Decimal("1"),
    }  # fmt: skip
    for words, value in odd.items():
        with pytest.raises(ValueError, match="args.column: the gold answer must be JSON, got ") as match:
            json_match(["{}"], answer=[value])
        with pytest.raises(ValueError, match=r"args.column: .* is no JSON schema") as schema:
            json_schema(["{}"], schema=[value])
        assert words in str(match.value)
        assert words in str(schema.value)


@pytest.mark.parametrize(
    "draft", ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
)
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("date", "2020-02-29", "2021-02-29"),
        ("email", "a@b", "ab"),
        ("ipv4", "10.0.0.1", "10.0.0.256"),
        ("ipv6", "::1", ":1"),
        ("regex", "a+", "(a"),
        ("uuid", "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8aa08"),
    ],
)
def test_a_format_is_checked(name: str, right: str, wrong: str, draft: str) -> None:
    schema = {"$schema": draft, "properties": {"d": {"format": name}}}
    texts = [f'{{"d": "{right}"}}', f'{{"d": "{wrong}"}}', '{"d": 1}']  # a format says nothing of numbers
    assert json_schema(texts, schema=[schema] * 3) == [1, 0, 1]


def test_a_format_that_wants_another_package_is_checked_nowhere() -> None:
    assert json_schema(['"x"'] * 2, schema=[{"format": "date-time"}, {"format": "color"}]) == [1, 1]


@pytest.mark.parametrize("names", ["properties", "patternProperties", "$defs", "definitions"])
@pytest.mark.parametrize("name", ["default", "enum", "const", "examples", "properties"])
def test_a_property_may_be_called_as_a_word_of_json_schema(names: str, name: str) -> None:
    schema = {names: {name: {"type": "integer", "pattern": None, "enum": [1, None]}, "other": None}}
    want = [1, 0, 1] if "roperties" in names else [1, 1, 1]
    texts = [f'{{"{name}": {value}}}' for value in ("1", "2", '1, "other": 3')]
    assert json_schema(texts, schema=[schema] * 3) == want


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
