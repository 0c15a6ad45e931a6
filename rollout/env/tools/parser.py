"""Tool calls in a turn's text, and which parser reads those of a model."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.errors import WrongInput
from rewards.base import said
from rollout.data.chat import Chat
from rollout.data.observation import USER
from rollout.env.protocol import DEEPEST, ToolCall, ToolSpec, as_text, is_text, too_deep

# The tool calls in a turn's text, in the form of Hermes, Qwen2.5, Qwen3 and others:
#
#     <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>
#
# Unlike a server's parser it never takes an attempt that cannot be read for plain text: whoever is to learn to call
# must be told what was wrong, and what it costs is the environment's to say.


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


# Which parser reads a model's tool calls: the one that reads back what the model's chat template writes.

ToolParser = Callable[[str, Sequence[ToolSpec]], Parsed]
"""Text of a turn, special tokens kept, and the tools -> Parsed."""

PROBE: ToolSpec = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "what"},
                "count": {"type": "integer", "description": "how many"},
                "exact": {"type": "boolean", "description": "whether"},
            },
            "required": ["word", "count", "exact"],
        },
    },
}
ONE = ToolCall("look_up", {"word": "red fox", "count": 3, "exact": True})
OTHER = ToolCall("look_up", {"word": "hare", "count": 12, "exact": False})
NO_CALL = "It is a red fox."


@dataclass(frozen=True, slots=True)
class Written:
    """How a chat template writes ONE, and ONE and OTHER in one turn (None where it refuses that), in the text that the
    policy would sample, without the end token."""

    one: str
    two: str | None

    @property
    def mark(self) -> str:
        """What a call begins with: a tag such as <tool_call> or [TOOL_CALLS], else its first word; "" for none."""
        start = answer_of(self.one).partition(ONE.name)[0].lstrip()
        tag = re.search(r"<[^<>\s]+>|\[[A-Z_]+\]", start)
        return tag[0] if tag else (start.split() or [""])[0]


class Choice(NamedTuple):
    """A parser and its name: hermes, or one of vLLM's. mark: what a call begins with; "" where that is not known."""

    name: str
    parse: ToolParser
    mark: str


def choose(chat: Chat, name: str = "auto") -> Choice:
    """The parser for a model's turns.

    name: "hermes", ours; a parser of vLLM; or "auto", the first of these that reads back the calls that the chat
        template writes. A template that writes no calls leaves their form to the policy: hermes.

    Raises WrongInput: one sentence that names the setting.
    """
    forms = [] if name == "hermes" else written_by(chat)
    if is_hermes(forms, name):
        return Choice("hermes", hermes, OPEN)
    from rollout.vllm.tool_parsers import names

    known = names()
    if name != "auto" and name not in known:
        raise WrongInput(f"env.tool_parser: must be auto, hermes or one of {', '.join(known)}, got {name}")
    for candidate in known if name == "auto" else [name]:
        for form in forms:
            parser = of_vllm(candidate, chat, form)
            if parser is not None and reads(parser, form):
                return Choice(candidate, parser, form.mark)
    writes = f"it writes {forms[0].one[:120]!r}" if forms else "it writes none"
    raise WrongInput(
        f"env.tool_parser: {'some parser' if name == 'auto' else name} must read back the calls of the model's chat "
        f"template, and does not: {writes}; give hermes if the policy is to learn that form, or another model"
    )


def is_hermes(forms: Sequence[Written], name: str = "auto") -> bool:
    """Whether our own parser is the one to choose."""
    return name == "hermes" or (name == "auto" and (not forms or any(reads(hermes, form) for form in forms)))


def written_by(chat: Chat) -> list[Written]:
    """The chat template's ways to write calls: given their arguments as an object, or as text; [] for none."""
    forms = []
    for as_json in (False, True):
        one = _rendered(chat, [ONE], as_json)
        if one is not None:
            forms.append(Written(one, _rendered(chat, [ONE, OTHER], as_json)))
    return forms


def reads(parser: ToolParser, form: Written) -> bool:
    """Whether a parser gives back the calls that were written, and finds none in plain text."""
    cases: list[tuple[str, tuple[ToolCall, ...]]] = [(form.one, (ONE,)), (NO_CALL, ())]
    if form.two is not None:
        cases.append((form.two, (ONE, OTHER)))
    return all(parser(text, [PROBE]) == (calls, ()) for text, calls in cases)


def hermes(text: str, tools: Sequence[ToolSpec]) -> Parsed:
    """parse_hermes, which needs no tools to tell a number from a text."""
    return parse_hermes(text)


def of_vllm(name: str, chat: Chat, form: Written) -> ToolParser | None:
    """A parser of vLLM that sees attempts; None where it cannot be made for this tokenizer."""
    from rollout.vllm.tool_parsers import VllmToolParser

    try:
        parser = VllmToolParser(name, chat.tokenizer)
    except Exception:  # they have no error in common; most want a token of their model
        return None
    return Attempts(parser, form, [chat.decode([stop], special=True) for stop in chat.stop_ids])


class Attempts:
    """A parser that takes an attempt at a call for plain text, made to see it: a mark without a call behind it.

    parser: text without end token, and tools -> calls. form: how the template writes calls. ends: texts of end tokens.
    """

    def __init__(
        self, parser: Callable[[str, Sequence[ToolSpec]], list[ToolCall]], form: Written, ends: Sequence[str]
    ) -> None:
        self._parser, self._mark, self._ends = parser, form.mark, tuple(ends)
        self._one_for_all = form.two is None or form.two.count(form.mark) < 2  # calls of a turn may share their mark

    def __call__(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        text = answer_of(text)
        for end in self._ends:
            text = text.removesuffix(end)
        try:
            calls, why = tuple(self._parser(text, tools)), ""
        except Exception as error:  # of a parser that did not expect what a policy may write
            calls, why = (), f": {as_text(said(error))[:200]}"
        begun = text.count(self._mark) if self._mark else 0
        missed = begun > 0 and not calls if self._one_for_all else begun > len(calls)
        return calls, (f"A tool call was begun with {self._mark} and could not be read{why}.",) if missed else ()


def _rendered(chat: Chat, calls: Sequence[ToolCall], as_json: bool) -> str | None:
    """What the policy would have to sample for these calls; None where the template refuses or drops them."""
    tool_calls: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        arguments = json.dumps(call.arguments) if as_json else call.arguments
        function = {"name": call.name, "arguments": arguments}
        tool_calls.append({"type": "function", "id": f"callQ7x{index:02d}", "function": function})
    turn = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    try:
        opened = chat.observations.ids_of([USER], [PROBE])
        whole = chat.observations.ids_of([USER, turn], [PROBE], opened=False)
    except WrongInput:
        return None
    # What opens a turn may be written otherwise for one that is past, such as with the end of thinking.
    same = next((i for i, (a, b) in enumerate(zip(opened, whole, strict=False)) if a != b), len(opened))
    sampled = whole[same:]
    end = next((i for i, token in enumerate(sampled) if token in chat.stop_ids), len(sampled))
    text = chat.decode(sampled[:end], special=True)
    return text if all(str(call.arguments["word"]) in text for call in calls) else None
