"""What is appended behind a turn against the naive way: the difference between two renders of a real conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.errors import WrongInput
from rollout.data.chat import Chat
from rollout.data.observation import TemplateRefuses
from rollout.env.tools.parser import PROBE

Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "You are a careful assistant."}
ASKED: Message = {"role": "user", "content": "Who jumps over the dog?\nUse what you have."}
MORE: Message = {"role": "user", "content": "And what colour is it?"}
NEW: Message = {"role": "user", "content": "Is that all?"}
SAID: Message = {"role": "assistant", "content": "A fox does."}
ANSWERS = ("A fox,\n  quick and brown.", '{"found": 3}')


def conversations(kind: str, form: str) -> Iterator[list[Message]]:
    """Conversations that end with a turn of the policy, before one tool result, two, or a message of the user.

    form: how calls are given to the template: arguments as an "object" or as "json", or calls in the turn's "text".
    """
    last = {"tool": _called(1, form), "tools": _called(2, form), "user": SAID}[kind]
    call = [_called(1, form), *_results(1)]
    rounds: list[list[Message]] = [[], [SAID, MORE], [*call, SAID, MORE]]
    if kind != "user":
        rounds.append([*call, SAID, MORE, *call])
    for before in rounds:
        for system in ([], [SYSTEM]):
            yield [*system, ASKED, *before, last]


def compared(chat: Chat, taken: Mapping[str, Sequence[str]]) -> tuple[int, int]:
    """In how many conversations what is appended is the difference, and how many have one."""
    agree = of = 0
    for kind, roles in taken.items():
        new = [NEW] if kind == "user" else _results(len(roles))
        for form in ("object", "json", "text"):
            found = [difference(chat, past, new) for past in conversations(kind, form)]
            pairs = [one for one in found if one is not None]
            of += len(pairs)
            agree += sum(appended(chat, new, stop) == expected for stop, expected in pairs)
            if pairs:  # the first form that the template shows
                break
    return agree, of


def difference(chat: Chat, past: list[Message], new: list[Message]) -> tuple[int, str] | None:
    """The stop token that ends the last turn of `past`, and what a render with `new` has behind it; None where the
    template refuses the conversation, drops the calls, or rewrites the past."""
    try:
        opened = chat.observations.render(past[:-1], [PROBE])
        before = chat.observations.render(past, [PROBE], opened=False)
        after = chat.observations.render([*past, *new], [PROBE])
    except TemplateRefuses:
        return None
    if past[-1].get("tool_calls") and before.count("look_up") == opened.count("look_up"):
        return None
    start = next((i for i, (a, b) in enumerate(zip(opened, before, strict=False)) if a != b), len(opened))
    stops = {chat.decode([stop], special=True): stop for stop in chat.stop_ids}
    ends = [(found.end(), stop) for text, stop in stops.items() for found in re.finditer(re.escape(text), before)]
    for end, stop in sorted(ends, reverse=True):  # the last but for one that is written at the very end alone
        if end > start and after.startswith(before[:end]):
            return stop, after[end:]
    if after.startswith(before):  # the turn has no end of its own: the stop token opens what comes behind it
        for text, stop in stops.items():
            if after.startswith(text, len(before)):
                return stop, after[len(before) + len(text) :]
    return None


def appended(chat: Chat, new: list[Message], closed_by: int) -> str:
    """The text of what is appended; what is wrong where nothing is."""
    try:
        return chat.decode(chat.observe(new, closed_by, [PROBE]), special=True)
    except WrongInput as error:
        return f"refused: {error}"


def _called(calls: int, form: str) -> Message:
    if form == "text":
        return {"role": "assistant", "content": "look_up fox\n" * calls}
    arguments = [{"word": "fox", "count": i} for i in range(calls)]
    functions = [{"name": "look_up", "arguments": json.dumps(a) if form == "json" else a} for a in arguments]
    tool_calls = [{"id": f"call{i:05d}", "type": "function", "function": f} for i, f in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _results(count: int) -> list[Message]:
    return [
        {"role": "tool", "name": "look_up", "tool_call_id": f"call{i:05d}", "content": ANSWERS[i]} for i in range(count)
    ]
