"""Every attempt at a call is either read or answered with what was wrong. A parser is chosen because it reads back
what the template writes; an attempt at a call is never plain text.
"""

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.env.protocol import ToolCall, ToolSpec
from rollout.env.tools.parser import (
    MAX_SENTENCES,
    ONE,
    OTHER,
    PROBE,
    Attempts,
    Written,
    choose,
    hermes,
    parse_hermes,
    reads,
    written_by,
)
from tests.rollout.data.test_observation import CHATML_TOOLS, RETURNS, chat_of

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


# A parser is chosen because it reads back what the template writes; an attempt at a call is never plain text.

ONE_CALL = "{{ raise_exception('one') if messages[-1].tool_calls | length > 1 }}" + CHATML_TOOLS
# The template opens a turn with thinking, and writes a past turn with its end.
THINKS = CHATML_TOOLS.replace(
    "{{ m.content }}", "{{ '<think>\n\n</think>\n' if m.role == 'assistant' }}{{ m.content }}"
)
THINKS = THINKS.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
AS_TEXT = CHATML_TOOLS.replace(
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}",
    """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + '}' }}""",
)


@pytest.mark.parametrize("template", [CHATML_TOOLS, ONE_CALL, THINKS, AS_TEXT, RETURNS])
def test_hermes_is_chosen_where_it_reads_back_or_nothing_is_written(template: str) -> None:
    assert choose(chat_of(template))[:2] == ("hermes", hermes)


def test_what_is_written_is_what_would_be_sampled() -> None:
    call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "red fox", "count": 3, "exact": true}}\n</tool_call>'
    other = '<tool_call>\n{"name": "look_up", "arguments": {"word": "hare", "count": 12, "exact": false}}\n</tool_call>'
    assert written_by(chat_of(CHATML_TOOLS))[0] == Written(call, call + other)
    assert written_by(chat_of(ONE_CALL))[0] == Written(call, None)
    assert written_by(chat_of(THINKS))[0] == Written("\n</think>\n" + call, "\n</think>\n" + call + other)
    assert written_by(chat_of(AS_TEXT)) == [Written(call, call + other)]  # joined, an object is no text
    assert written_by(chat_of(RETURNS)) == []


@pytest.mark.parametrize(
    ("one", "mark"),
    [
        ("<think></think>\n<|call|>look_up(", "<|call|>"),
        ('[TOOL_CALLS][{"name": "look_up"', "[TOOL_CALLS]"),
        ('{"name": "look_up"', '{"name":'),
        ("look_up(", ""),
    ],
)
def test_the_mark_of_a_call(one: str, mark: str) -> None:
    assert Written(one, None).mark == mark


def shouted(text: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
    """CALL LOOK_UP red fox 3: as a parser of vLLM, silent about what it cannot read, and in one case not."""
    if "crash" in text:
        raise KeyError("crash")
    return [ONE if count == "3" else OTHER for count in re.findall(r"<c>look_up [a-z ]+ (\d+)", text)]


EACH = Written("<c>look_up red fox 3", "<c>look_up red fox 3<c>look_up hare 12")
SHARED = Written("<c>look_up red fox 3", "<c>look_up red fox 3 look_up hare 12")


@pytest.mark.parametrize(
    ("form", "text", "calls", "malformed"),
    [
        (EACH, "<c>look_up red fox 3<|im_end|>", (ONE,), ""),
        (EACH, "nothing", (), ""),
        (EACH, "<c>look_up red fox", (), "A tool call was begun with <c> and could not be read."),
        (EACH, "<c>look_up red fox 3<c>", (ONE,), "A tool call was begun with <c> and could not be read."),
        (EACH, "<c>crash", (), "A tool call was begun with <c> and could not be read: 'crash'."),
        (EACH, "<think><c>look_up</think>nothing", (), ""),
        (SHARED, "<c>look_up red fox 3<c>", (ONE,), ""),
        (SHARED, "<c>", (), "A tool call was begun with <c> and could not be read."),
    ],
)
def test_an_attempt_is_seen(form: Written, text: str, calls: tuple[ToolCall, ...], malformed: str) -> None:
    parser = Attempts(shouted, form, ["<|im_end|>"])
    assert parser(text, [PROBE]) == (calls, (malformed,) if malformed else ())


def test_a_parser_that_reads_one_call_of_two_is_not_chosen() -> None:
    assert reads(Attempts(shouted, EACH, []), EACH)
    assert not reads(Attempts(shouted, SHARED, []), SHARED)


def test_a_parser_that_finds_a_call_in_any_text_is_not_chosen() -> None:
    assert not reads(lambda text, tools: ((ONE,), ()), Written("<c>look_up red fox 3", None))
