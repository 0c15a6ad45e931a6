"""Built-in reward functions against cases worked out by hand. JSON as an answer: its schema and its content, read
strictly. The reward that math-verify grades, against cases worked out by hand.
"""

from __future__ import annotations

import importlib
import json
import re
import time
from datetime import date, datetime
from decimal import Decimal
from math import isnan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.base import opening_at_end, tagged, text_of
from rewards.built_in.format import format_
from rewards.built_in.json_match import json_match
from rewards.built_in.json_schema import json_schema
from rewards.built_in.length import length
from rewards.built_in.math import math, written
from rewards.built_in.number import last_number, number, parse_number
from rewards.built_in.regex import regex


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


GOOD = "<reasoning>2+2\nis 4</reasoning>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (GOOD, 1.0),
        (f"\n {GOOD} \n", 1.0),
        ("<reasoning></reasoning><answer></answer>", 1.0),
        (f"Sure: {GOOD}", 0.0),
        (f"{GOOD} done", 0.0),
        ("<answer>4</answer><reasoning>r</reasoning>", 0.0),  # order
        (GOOD + GOOD, 0.0),  # twice
        ("<reasoning>a<answer>b</reasoning><answer>4</answer>", 0.0),  # a tag inside
        ("<reasoning>r</reasoning><answer>4", 0.0),  # cut off
        ("", 0.0),
    ],
)
def test_format_wants_the_layout_and_nothing_around_it(text: str, score: float) -> None:
    assert format_([text, said(text)]) == [score, score]


def test_format_takes_other_tags_and_refuses_brackets() -> None:
    assert format_(["<think>a</think><answer>b</answer>", GOOD], tags=["think", "answer"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"args: a tag must be a plain name .* got '<think>'"):
        format_([""], tags=["<think>"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", "72"),
        (" 72. ", "72"),
        ("1,234.50", "1234.5"),
        ("$1,000", "1000"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\u22123", "-3"),
        ("50%", "50"),
        (".5", "0.5"),
        ("007", "7"),
        ("12,34", None),  # a list, not thousands
        ("1,2345", None),
        ("3 4", None),
        ("42 apples", None),
        ("--5", None),
        ("1e3", None),
        ("1/2", None),
        ("\u0664", None),  # four, in Arabic-Indic digits
        ("", None),
    ],
)
def test_parse_number(text: str, value: str | None) -> None:
    assert parse_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("I have 3 apples and 12.", "12"),
        ("so 10-3=7", "7"),
        ("it is 10-3", "3"),  # a minus between numbers subtracts
        ("x = -3.", "-3"),
        ("costs $1,250.75 today", "1250.75"),
        ("cost: -$5", "-5"),
        ("step2", None),
        ("none", None),
        ("\u7b54\u6848\u662f72\u3002", "72"),  # Chinese, which has no blanks between words
        ("\u7b54\u6848\u662f-72\u3002", "-72"),
        ("\u05d1-72", "72"),  # Hebrew: in 72
        ("x\u00b2-3", "3"),
        ("it is __72__", "72"),
        ("_-72_", "-72"),
        ("x_2", None),
        ("it is 1e3.", "1000"),
        ("= 1.5e-3", "0.0015"),
        ("room 3e5f", "3"),
        ("1e99999", "1"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1,\!234}", "1234"),
        (r"-\$5", "-5"),
        ("x = - 3", "-3"),
        ("x = \u2212 3", "-3"),
        ("10 - 3", "3"),
        ("- 3 apples", "3"),  # an item of a list
        ("so:\n- 3 apples", "3"),
        ("it is \u20135", "-5"),
        ("x=\u20135", "-5"),
        ("\u20135", "-5"),
        ("3\u20135", "5"),  # a range
        ("3 \u20135", "5"),
        ("3 apples \u20135", "5"),
        ("the items are: - 3 apples", "3"),
    ],
)
def test_last_number(text: str, value: str | None) -> None:
    assert last_number(text) == (None if value is None else Decimal(value))


@given(st.text(alphabet=st.sampled_from("0123456789.,$%+-\u2212# \nab<>/\u0664"), max_size=60) | st.text(max_size=40))
def test_reading_numbers_never_raises(text: str) -> None:
    for value in (parse_number(text), last_number(text)):
        assert value is None or value.is_finite()


@given(st.integers(-(10**30), 10**30), st.integers(0, 10**6))
def test_a_written_number_is_read_back_exactly(whole: int, decimals: int) -> None:
    text = f"{whole:,}.{decimals:06d}"
    assert parse_number(f"${text}%" if whole >= 0 else text) == Decimal(f"{whole}.{decimals:06d}")
    assert last_number(f"so the result is {text}.") == Decimal(f"{whole}.{decimals:06d}")


def test_number_reads_tag_gold_and_conversation() -> None:
    gold = "He has 48/2 = 24, so 48+24 = 72.\n#### 72"
    texts = [
        "<answer>72</answer>",
        "<answer>7</answer> no: <answer> $72.00 </answer>",
        "it is 72.",
        "<answer>72 or 73</answer>",
    ]
    assert number(texts, answer=[gold] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert number([said("<a>0.30</a>")], column="gold", tag="a", gold=[0.3]) == [1.0]
    assert number(["9007199254740993"], answer=["9007199254740992"]) == [0.0]  # equal as floats
    assert number(["0.00005", "10000000000000000"], answer=[5e-05, 1e16]) == [1.0, 1.0]
    assert number(["0", "0.0000001", "100"], answer=[Decimal("0E-10"), Decimal("1E-7"), Decimal("1E2")]) == [1.0] * 3


def test_number_refuses_bad_gold_and_a_missing_column() -> None:
    with pytest.raises(ValueError, match="column 'answer': the gold answer must be a number, got 'blue'"):
        number(["1"], answer=["blue"])
    with pytest.raises(ValueError, match=r"no column 'answer'; it has \['gold'\]"):
        number(["1"], gold=["1"])


# As the published GRPO recipe has it: re.match of this, without flags.
STRICT = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
PIECES = ["<reasoning>", "</reasoning>", "<answer>", "</answer>", "\n", "4", " "]


@pytest.mark.parametrize(
    ("text", "strict", "free"),
    [
        ("<reasoning>\n2 + 2\n</reasoning>\n<answer>\n4\n</answer>\n", 1.0, 1.0),
        ("<reasoning>\n2 + 2\n</reasoning>\n<answer>\n4\n</answer>", 0.0, 1.0),  # no line break at the end
        ("<reasoning>\n2\n+ 2\n</reasoning>\n<answer>\n4\n</answer>\n", 0.0, 1.0),  # two lines in a tag
        ("<reasoning>2 + 2</reasoning><answer>4</answer>", 0.0, 1.0),
        ("so <reasoning>\n2\n</reasoning>\n<answer>\n4\n</answer>\n", 0.0, 0.0),
    ],
)
def test_the_strict_pattern_of_the_published_recipe_and_ours(text: str, strict: float, free: float) -> None:
    assert regex([text], pattern=STRICT) == [strict]
    assert format_([text]) == [free]


@given(st.lists(st.sampled_from(PIECES), max_size=3), st.integers(0, 60), st.integers(0, 60))
def test_the_strict_pattern_as_regex_is_what_the_recipe_computes(extra: list[str], start: int, stop: int) -> None:
    whole = "<reasoning>\n4\n</reasoning>\n<answer>\n4\n</answer>\n"
    text = whole[:start] + "".join(extra) + whole[max(start, stop) :]
    assert regex([text], pattern=STRICT) == [1.0 if re.match(STRICT, text) else 0.0]


def test_length_penalises_the_excess_only() -> None:
    ids = [[0] * 10, [0] * 15, [0] * 20, [0] * 99]
    assert length([""] * 4, ids, target=10) == [0.0, -0.5, -1.0, -1.0]
    assert length([""] * 4, ids, target=10, kind="step") == [0.0, -1.0, -1.0, -1.0]
    assert length(["abcd", said("abcdef")], [[], []], target=4, unit="characters") == [0.0, -0.5]
    with pytest.raises(ValueError, match=r"args.target: must be a whole number of tokens >= 1, got 0"):
        length([""], [[]], target=0)


def test_regex_finds_or_matches_all() -> None:
    assert regex(["say 12", said("12"), "x"], pattern=r"\d+") == [1.0, 1.0, 0.0]
    assert regex(["say 12", said("12")], pattern=r"\d+", full=True) == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"args.pattern: '\(' is not a regular expression"):
        regex([""], pattern="(")


def test_reasoning_gym_scores_by_the_task() -> None:
    gym = pytest.importorskip("reasoning_gym")
    from rewards.built_in.reasoning_gym import reasoning_gym

    entry = gym.create_dataset("spell_backward", size=1, seed=1)[0]
    right = f"<answer>{entry['answer']}</answer>"
    near = f"<answer>{entry['answer'][:-1]}</answer>"
    columns: dict[str, Any] = {"answer": [entry["answer"]] * 3, "metadata": [entry["metadata"]] * 3}
    assert reasoning_gym([said(right), near, entry["answer"]], **columns) == [1.0, 0.0, 0.0]
    partial = reasoning_gym([right, near, ""], **columns, strict=False)
    assert partial[0] == 1.0
    assert 0.0 < partial[1] < 1.0
    assert partial[2] == 0.0
    text = json.dumps(entry["metadata"])
    assert reasoning_gym([right], answer=[entry["answer"]], metadata=[text]) == [1.0]
    with pytest.raises(ValueError, match="column 'metadata': needs the key source_dataset"):
        reasoning_gym([right], answer=["x"], metadata=["{}"])


def test_text_helpers() -> None:
    talk: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": None},
    ]
    assert text_of(talk) == "a\n"
    assert text_of([{"role": "assistant", "content": [{"type": "text", "text": "b"}]}]) == "b"
    assert tagged("<answer>1</answer><answer>2", "answer") == "1"
    assert tagged("</answer>", "answer") is None
    assert tagged("<answer>72</answer></answer>", "answer") == "72"
    assert tagged("<answer>1</answer> <answer>2</answer> or </answer> <answer>3", "answer") == "2"


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("Q: 1 + 1\n<reasoning>", "<reasoning>"),
        ("<think>\n\n</think>\n\n", ""),
        ("<|assistant|>", ""),
        ("Answer in <answer> tags.", ""),
        ("a <b and c>", ""),
        ("<my-tag.2>  \n\n", "<my-tag.2>  \n\n"),
        ("", ""),
    ],
)
def test_the_opening_tag_at_the_end_of_a_prompt(prompt: str, opening: str) -> None:
    assert opening_at_end(prompt) == opening
    assert not opening or prompt.endswith(opening)


# JSON as an answer: its schema and its content, read strictly.

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


# The reward that math-verify grades, against cases worked out by hand.


def test_math_compares_by_meaning() -> None:
    cases = [
        (r"<answer>\frac{1}{2}</answer>", "0.5", 1.0),
        ("<answer>0.5</answer>", r"\frac{1}{2}", 1.0),
        (r"Hence $\boxed{x^2+2x+1}$", "$(x+1)^2$", 1.0),
        ("<answer>3</answer>", "#### 4", 0.0),
        (r"<answer>\$32,348</answer>", "32348", 1.0),  # a dollar sign in a text of LaTeX, which delimits nothing
        ("<answer>36</answer>", r"\$36", 1.0),
        (r"<answer>\[\frac{1}{2}\]</answer>", "0.5", 1.0),
        (r"<answer>\left[0,1\right]</answer>", r"\left[0,1\right]", 1.0),
        ("<answer>0.00005</answer>", 5e-05, 1.0),  # a column of numbers, which Python writes with e
        ("<answer></answer>", "4", 0.0),
        ("I do not know", "4", 0.0),
    ]
    texts, golds, scores = map(list, zip(*cases, strict=True))
    assert math([[{"role": "assistant", "content": text}] for text in texts], answer=golds) == scores


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        (r"So \boxed{1}. Wait, no. So \boxed{2}", "2", 1.0),
        (r"So \boxed{1}. Wait, no. So \boxed{2}", "1", 0.0),
        (r"So \boxed{1}. Wait, no. So \boxed{\frac{1}{2}}, not \boxed{}", "0.5", 1.0),
        (r"So \boxed{1}. No: \boxed{2} and \boxed{3}", r"\{2, 3\}", 1.0),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1, 2", 1.0),
        (r"\(\boxed{1}\) and \(\boxed{2}\)", "1, 2", 1.0),
        (r"$x_1=\boxed{1},\quad x_2=\boxed{2}$", "1, 2", 1.0),
        (r"$\boxed{1} \text{ or } \boxed{2}$", "1, 2", 1.0),
        (r"\boxed{1}; \boxed{2}", "1, 2", 1.0),
        (r"So \boxed{3}. No: $(\boxed{1}, \boxed{2})$", "(1, 2)", 1.0),
        (r"<answer>2</answer>", r"Not \boxed{1} but \boxed{2}", 1.0),
        ("<answer>**7**</answer>", "7", 1.0),
        ("<answer>`7`</answer>", "7", 1.0),
        (r"<answer>**$\frac{1}{2}$**</answer>", "0.5", 1.0),
        ("<answer>`7` or `8`</answer>", "8", 0.0),
        ("<answer>pi/2</answer>", r"\frac{\pi}{2}", 1.0),
        ("<answer>√2</answer>", r"\sqrt{2}", 1.0),
        ("<answer>1½</answer>", "1.5", 1.0),
        ("<answer>x**12</answer>", "x^{12}", 1.0),
        ("It is $x**2$.", "x**2", 1.0),
        ("It is $pi$.", "pi", 1.0),  # whatever it is, it is what gold is
        ("<answer>48 24</answer>", "72", 0.0),
        ("<answer>71 72 73</answer>", "216", 0.0),
        (r"<answer>$48\ 24$</answer>", "72", 0.0),
        (r"\boxed{48 24}", "72", 0.0),
        ("<answer>48 24/1</answer>", "72", 0.0),
        (r"<answer>\frac 1 2</answer>", "0.5", 1.0),
        ("<answer>1, 2, 3</answer>", "1,2,3", 1.0),
        ("<answer>7/4</answer>", "1 3/4", 1.0),
        ("<answer>1</answer>", "1 3/4", 0.0),
        ("<answer>-1 3/4</answer>", "-1.75", 1.0),
        ("<answer>10 000</answer>", "10000", 1.0),
        ("<answer>10000.5</answer>", "10 000.5", 1.0),
        (r"\boxed{10\,000}", "10000", 1.0),
        (r"<answer>\ne 5</answer>", "5", 0.0),
        (r"<answer>$\geq 5$</answer>", "5", 0.0),
        (r"\boxed{> 5}", "5", 0.0),
        ("<answer>= 5</answer>", "5", 1.0),
        (r"<answer>\left(1, 2\right)</answer>", "(1, 2)", 1.0),
        ("<answer>x > 5</answer>", "x>5", 1.0),
        (r"<answer>\ge 5</answer>", r"\geq 5", 1.0),
    ],
)
def test_math_reads_what_is_written(text: str, gold: str, score: float) -> None:
    assert math([text], answer=[gold]) == [score]


def test_math_gives_no_score_where_it_runs_out_of_time_and_refuses_to_where_nothing_is_right() -> None:
    with pytest.raises(ValueError, match="cannot read the gold answer None"):
        math(["<answer>4</answer>"], answer=[None])
    with pytest.raises(ValueError, match="cannot read the gold answer '48 24'"):
        math(["<answer>72</answer>"], answer=["48 24"])
    (score,) = math(["<answer>9^{9^{9^{9}}}</answer>"], answer=["4"], seconds=1)
    assert isnan(score) or score == 0.0  # a failure with a name; None would say that it does not score it


def test_late_completions_cost_a_group_no_more_than_its_deadline_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    verify: Any = importlib.import_module("math_verify")
    parse = verify.parse

    def slow(text: str, **args: Any) -> Any:
        if "slow" in text:
            while True:  # it computes: that is what counts
                pass
        return parse(text, **args)

    monkeypatch.setattr(verify, "parse", slow)
    begin = time.process_time()
    scores = math([*["<answer>slow</answer>"] * 8, "<answer>4</answer>"], answer=["4"] * 9, seconds=1)
    assert [isnan(score) for score in scores] == [True] * 8 + [False]
    assert scores[-1] == 1.0
    assert time.process_time() - begin < 5  # 2 x 1 s and 6 x 1/8 s


def test_a_busy_machine_makes_no_completion_late(monkeypatch: pytest.MonkeyPatch) -> None:
    verify: Any = importlib.import_module("math_verify")
    parse = verify.parse

    def waits(text: str, **args: Any) -> Any:
        time.sleep(0.3)  # as a process does that others keep from the processors
        return parse(text, **args)

    monkeypatch.setattr(verify, "parse", waits)
    assert math(["<answer>4</answer>"], answer=["4"], seconds=0.2) == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        "1 2" + " " * 9000 + "!",
        "$" + " " * 9000 + "x",
        "1 2 " + "abc " * 3000 + "!",
        r"\boxed{" * 3000,
        r"\boxed{1}," * 5000,
        r"\boxed{1}" + r"\\" * 20000 + r"x\boxed{2}",
        "1 1/" + "9" * 6000,
    ],
)
def test_a_text_that_goes_on_and_on_is_prepared_at_once(text: str) -> None:
    begin = time.perf_counter()
    written(text, prose=False)
    assert time.perf_counter() - begin < 1
