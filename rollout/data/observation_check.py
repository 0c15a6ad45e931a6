"""Before a run: whether what is appended behind one dummy turn is what the template writes behind any turn."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout.data.chat_error import ChatError
from rollout.data.observation import (
    MARKER,
    USER,
    Ending,
    Messages,
    Observations,
    Shape,
    TemplateRefuses,
    Tools,
    probes_of,
)

THOUGHT, ANSWER = "thoughtQ7x", "answerQ7x"
SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN, FIELD, INLINE = "no thinking", "thinking in a field of its own", "thinking in the text"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a template does with observations of some roles.

    Attributes:
        state: exact: the same text behind every turn that was tried, and the same ids; varies: it depends on what came
            before, so that what is appended is not always what a render of the whole conversation says; refused:
            nothing can be appended.
        reason: one clause, "" where exact.
    """

    state: Literal["exact", "varies", "refused"]
    reason: str = ""


def check(observations: Observations, roles: Sequence[str], tools: Tools = ()) -> Verdict:
    """Tries a dozen conversations before observations of these roles, e.g. ("tool", "tool"): with and without
    thinking (in a field of its own, in the text), a system message, an earlier round.

    A conversation that the template itself refuses is passed over, as long as it takes the shortest.
    """
    shape = shape_of(roles, tools)
    try:
        base = observations.ending(shape, json.dumps(tools))
    except ChatError as error:
        return Verdict("refused", _clause(error))
    probes = probes_of(shape)
    shortest = observations.render([*base.past, *probes], tools)
    expected = base.tail(shortest)
    if not observations.ends_with(shortest, base.text + expected):
        return Verdict(
            "refused", f"ends turns with {base.text!r}, behind which the tokenizer gives other ids than alone"
        )
    for name, past in _pasts(base, probes):
        try:
            text = observations.render([*past, *probes], tools)
            ending = observations.ending_behind(past, probes, tools)
        except TemplateRefuses:
            continue
        except ChatError as error:
            return Verdict("varies", f"with {name}: it {_clause(error)}")
        tail = ending.tail(text)
        if (tail, ending.text, ending.sampled) != (expected, base.text, base.sampled):
            return Verdict("varies", f"with {name}: " + _difference(ending.text + tail, base.text + expected))
    return Verdict("exact")


def keeps_past(observations: Observations, roles: Sequence[str], tools: Tools = (), *, thinking: bool) -> bool:
    """Whether a render of the whole conversation begins with the conversation before these observations as it was
    rendered then, with thinking or without. Raises ChatError where observations of these roles are refused."""
    shape = shape_of(roles, tools)
    base, probes = observations.ending(shape, json.dumps(tools)), probes_of(shape)
    for style in (FIELD, INLINE) if thinking else (PLAIN,):
        past = [USER, _turn(base, style)]
        try:
            before = observations.render(past, tools, opened=False)
            after = observations.render([*past, *probes], tools)
        except TemplateRefuses:
            continue
        if not after.startswith(observations.until_stop(before)):
            return False
    return True


def loses(observations: Observations, turn: str, role: str, tools: Tools = ()) -> str:
    """What is wrong with a render of a conversation in which an answer of this role follows a turn that is text alone,
    calls included: one clause; "" where the answer is in it."""
    answer = {"role": role, "content": ANSWER} | ({"name": tools[0]["function"]["name"]} if tools else {})
    try:
        text = observations.render([USER, {"role": "assistant", "content": turn}, answer], tools)
    except ChatError as error:
        return _clause(error)
    return "" if ANSWER in text else "leaves it out"


def hidden_tools(observations: Observations, tools: Tools) -> list[str]:
    """Names of the tools that the template does not write into the prompt: the policy must know them by itself."""
    text = observations.render([USER], tools)
    return [name for name in (str(tool["function"]["name"]) for tool in tools) if name not in text]


def shape_of(roles: Sequence[str], tools: Tools = ()) -> Shape:
    """Observations of these roles, the answers being of the first tool."""
    name = tools[0]["function"]["name"] if tools else None
    return tuple((role, name if role == "tool" else None, None) for role in roles)


def _pasts(base: Ending, probes: Messages) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    for style in (PLAIN, FIELD, INLINE):
        turn = _turn(base, style)
        answers = [{**probe, "content": f"earlier{index}"} for index, probe in enumerate(probes)]
        for system in (False, True):
            for earlier in (False, True):
                names = [style, *["a system message"] * system, *["an earlier round"] * earlier]
                history = [*[SYSTEM] * system, USER, *[_without_marker(turn), *answers] * earlier]
                yield " and ".join(names), [*history, turn]


def _turn(base: Ending, style: str) -> dict[str, Any]:
    turn = base.past[-1]
    if style == FIELD:  # the names that templates have for it
        return {**turn, "reasoning_content": THOUGHT, "reasoning": THOUGHT, "thinking": THOUGHT}
    if style == INLINE:
        return {**turn, "content": f"<think>\n{THOUGHT}\n</think>\n\n{turn['content']}"}
    return turn


def _without_marker(turn: Mapping[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(turn).replace(MARKER, "earlier"))
    return copy


def _clause(error: ChatError) -> str:
    """What the template does, without the key before it and the advice behind it."""
    return str(error).removeprefix("model.path: the model's chat template ").partition("; ")[0]


def _difference(found: str, expected: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    return f"it writes {found[at : at + 30]!r} where it else writes {expected[at : at + 30]!r}"
