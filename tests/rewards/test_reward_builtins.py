"""Built-in reward functions against cases worked out by hand."""

import json
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.base import opening_at_end, tagged, text_of
from rewards.built_in.format import format_
from rewards.built_in.length import length
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
