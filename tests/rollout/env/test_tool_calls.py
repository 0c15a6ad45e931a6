"""Every attempt at a call is either read or answered with what was wrong."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.env.protocol import ToolCall
from rollout.env.tools.parser import MAX_SENTENCES, parse_hermes

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.sampled_from(["<tool_call>", "</tool_call>", '"}}']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(ToolCall, st.text(min_size=1), st.dictionaries(st.text(), VALUES, max_size=3))
PLAIN = st.text().filter(lambda text: "<t" not in text and "think" not in text)


def written(call: ToolCall, ascii_only: bool = True) -> str:
    content = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=ascii_only)
    return f"<tool_call>\n{content}\n</tool_call>"


@given(calls=st.lists(CALLS, max_size=3), between=PLAIN, ascii_only=st.booleans())
def test_what_is_written_is_read(calls: list[ToolCall], between: str, ascii_only: bool) -> None:
    text = "".join(between + written(call, ascii_only) for call in calls) + between + "<|im_end|>"
    # A thought may try a call, and a mark within a string is none.
    thinking = "<think>" + written(ToolCall("no", {})) + "<tool_call>{</think>"
    held = any("</think>" in written(call, ascii_only) for call in calls)
    assert parse_hermes(text if held else thinking + text) == (tuple(calls), ())


def test_the_end_of_thinking_is_no_end_within_an_argument() -> None:
    call = ToolCall("note", {"text": "a</think>b"})
    assert parse_hermes("First. " + written(ToolCall("add", {})) + written(call)) == ((ToolCall("add", {}), call), ())
    assert parse_hermes("so</think>" + written(call)) == ((call,), ())
    assert parse_hermes(f"<think>{written(ToolCall('no', {}))}</think>{written(call)}") == ((call,), ())
    assert parse_hermes(written(ToolCall("no", {})) + "</think>42") == ((), ())  # the prompt may have opened it


@given(call=CALLS, cut=st.integers(min_value=1, max_value=10_000))
def test_a_call_that_is_cut_off_is_one_sentence(call: ToolCall, cut: int) -> None:
    text = written(call)
    text = text[: max(len("<tool_call>"), len(text) - cut)]
    calls, malformed = parse_hermes("Let me see. " + text)
    assert calls == ()
    assert len(malformed) >= 1  # a string in what is left may hold further marks


@given(text=st.text(alphabet='<tool_cal>/{}[]":,name argumentsthink\\e1', max_size=80))
def test_no_text_raises(text: str) -> None:
    calls, malformed = parse_hermes(text)
    assert len(calls) + len(malformed) <= text.count("<tool_call>")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"name": "add", "arguments": {"a": 1,}}</tool_call>', "it must be JSON, and is not: .* at character 3[78]"),
        ('{"name": "add", "arguments": {"a": NaN}}</tool_call>', "it must be JSON, and is not: NaN is no JSON number"),
        ("[" * 100_000 + "</tool_call>", "it must be JSON, and is not: "),
        ("1" * 5_000 + "</tool_call>", "it must be JSON, and is not: "),
        # What the tokenizer, the socket to the environment and the ledger would not take.
        ('{"name": "\\ud800", "arguments": 3}</tool_call>', "it must be text that UTF-8 can hold"),
        ('{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', "it must be text that UTF-8 can hold"),
        (
            f'{{"name": "add", "arguments": {{"a": {"[" * 500 + "]" * 500}}}}}</tool_call>',
            "it must be nested at most 100 deep",
        ),
        ('["add"]</tool_call>', "it must be a JSON object with name and arguments, got an array"),
        ('{"arguments": {}}</tool_call>', '"name" must be the name of a tool, got none'),
        ('{"name": 3, "arguments": {}}</tool_call>', '"name" must be the name of a tool, got a number'),
        ('{"name": "add"}</tool_call>', '"arguments" of add must be a JSON object, got none'),
        ('{"name": "add", "arguments": "{}"}</tool_call>', '"arguments" of add must be a JSON object, got a string'),
        ('{"name": "add", "arguments": {}}', "its JSON must be followed by </tool_call>"),
        ('{"name": "add", "arguments": {}} and</tool_call>', "its JSON must be followed by </tool_call>"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, sentence: str) -> None:
    good = ToolCall("add", {"a": 1})
    calls, malformed = parse_hermes(written(good) + "<tool_call>" + text + written(good))
    assert calls == (good, good)
    assert len(malformed) == 1
    assert re.match(f"Tool call 2 could not be read: {sentence}", malformed[0])


def test_sentences_are_bounded() -> None:
    """Nothing behind the last is read: each sentence takes as long as the turn is."""
    calls, few = parse_hermes("<tool_call>" * MAX_SENTENCES)
    assert (calls, len(few)) == ((), MAX_SENTENCES)
    many = (*few[:-1], few[-1] + " What follows it was not read.")
    assert parse_hermes("<tool_call>" * 32_000 + written(ToolCall("add", {}))) == ((), many)


@pytest.mark.parametrize("text", ["", "42", "</tool_call>", "<think>" + written(ToolCall("add", {}))])
def test_a_turn_without_calls(text: str) -> None:
    assert parse_hermes(text) == ((), ())
