"""A parser is chosen because it reads back what the template writes; an attempt at a call is never plain text."""

import re
from collections.abc import Sequence

import pytest

from rollout.env.protocol import ToolCall, ToolSpec
from rollout.env.tools.parser import (
    ONE,
    OTHER,
    PROBE,
    Attempts,
    Written,
    choose,
    hermes,
    reads,
    written_by,
)
from tests.rollout.data.test_observation import CHATML_TOOLS, RETURNS, chat_of

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
    assert choose(chat_of(template)) == ("hermes", hermes)


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
