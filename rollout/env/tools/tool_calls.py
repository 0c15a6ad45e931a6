"""The tool calls in a turn's text, in the form of Hermes, Qwen2.5, Qwen3 and others:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

Unlike a server's parser it never takes an attempt that cannot be read for plain text: whoever is to learn to call must
be told what was wrong, and what it costs is the environment's to say.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from rollout.env.plain import DEEPEST, is_text, too_deep
from rollout.env.protocol import ToolCall

Parsed = tuple[tuple[ToolCall, ...], tuple[str, ...]]
"""Calls in their order, and one sentence for each attempt that could not be read, fit to be shown to the policy."""

Parser = Callable[[str], Parsed]
"""Text of a turn, special tokens kept -> Parsed."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_SENTENCES = 8  # a turn may be nothing but opening marks, and to say why not takes as long as the turn is
MAX_NAME = 100  # characters of a name that a sentence repeats


def parse_hermes(text: str) -> Parsed:
    """Every call behind the thinking, up to the last attempt of MAX_SENTENCES; an attempt begins with <tool_call>."""
    text = answer_of(text)
    calls: list[ToolCall] = []
    malformed: list[str] = []
    at = text.find(OPEN)
    while at >= 0 and len(malformed) < MAX_SENTENCES:
        at += len(OPEN)
        try:
            call, at = _call(text, at)
            calls.append(call)
        except ValueError as error:
            malformed.append(f"Tool call {len(calls) + len(malformed) + 1} could not be read: {error}.")
        at = text.find(OPEN, at)
    if at >= 0:
        malformed[-1] += " What follows it was not read."
    return tuple(calls), tuple(malformed)


def answer_of(text: str) -> str:
    """A turn without its thinking, in which calls are only thought of: up to the first </think>, or all of a turn that
    opens <think> and never ends it. The template may have opened it in the prompt already. Within the JSON of a call
    the mark is part of an argument."""
    before, closed, after = text.partition("</think>")
    opened = before.lstrip().startswith("<think>")
    if closed:
        return text if not opened and _in_call(text, len(before)) else after
    return "" if opened else before


def _in_call(text: str, place: int) -> bool:
    """Whether the last opening mark before that place begins a call that can be read and goes beyond it. Of one mark
    alone: to try each of thousands takes as long as the turn is, each time."""
    at = text.rfind(OPEN, 0, place)
    try:
        return at >= 0 and _call(text, at + len(OPEN))[1] > place
    except ValueError:
        return False


def call_of(value: Any) -> ToolCall:
    """A call from its JSON value. Raises ValueError with what is wrong, as a clause."""
    if not isinstance(value, dict):
        raise ValueError(f"it must be a JSON object with name and arguments, got {_kind(value)}")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError('"name" must be the name of a tool, got ' + ("none" if name is None else _kind(name)))
    if too_deep(value):
        raise ValueError(f"it must be nested at most {DEEPEST} deep")
    if not is_text(json.dumps(value, ensure_ascii=False)):
        raise ValueError("it must be text that UTF-8 can hold, and has half of a surrogate pair")
    if not isinstance(arguments, dict):
        got = _kind(arguments) if "arguments" in value else "none"
        raise ValueError(f'"arguments" of {name[:MAX_NAME]} must be a JSON object, got {got}')
    return ToolCall(name, arguments)


def _call(text: str, at: int) -> tuple[ToolCall, int]:
    """The call whose opening mark ends at `at`, and where its closing mark ends. The JSON is read first, since a string
    in it may hold the marks. Raises ValueError."""
    start = _behind_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"it must be JSON, and is not: {error.msg} at character {error.pos - start + 1}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise ValueError(f"it must be JSON, and is not: {str(error)[:100]}") from None
    end = _behind_space(text, end)
    if not text.startswith(CLOSE, end):
        raise ValueError(f"its JSON must be followed by {CLOSE}")
    return call_of(value), end + len(CLOSE)


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)  # no copy of what is left for each mark
    assert found is not None
    return found.end()


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)  # Python's own would read NaN and Infinity
_SPACE = re.compile(r"\s*")
_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a number")
