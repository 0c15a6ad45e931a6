"""Observations: turns the messages that answer a sampled turn into the token ids that follow it.

Rendering the whole conversation after each turn would tokenise the sampled text again, often into other ids, and many
templates also rewrite past turns. So the past stays as it was sampled, and only the messages behind it are rendered:
behind a dummy turn that holds a marker. The text behind the token that ends the dummy turn is the text behind any turn;
`check` tries before a run whether this holds for a chat template.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from cluster.errors import WrongInput
from rollout.data.ordinary_text import OrdinaryText

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Shape = tuple[tuple[str, str | None, str | None], ...]
"""Role, name and tool_call_id of each message."""

MARKER = "markerQ7x"  # letters and a digit, which no template escapes, trims or splits
CALL_ID = "callQ7x{:02d}"  # some templates want nine letters and digits
USER = {"role": "user", "content": "Go."}


class TemplateRefuses(WrongInput):
    """The template itself raised; who tries several conversations passes over this one (here and in
    rollout.data.chat)."""


class UnclosedTurn(WrongInput):
    """The sampled turn ended with another stop token than the one the template ends such a turn with. The trajectory
    ends as `unclosed` (rollout.env.play)."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the template ends the turn before observations of one shape.

    Attributes:
        past: the dummy conversation, whose last message is the turn with the marker.
        between: the text between the marker and the ending.
        text, token: the token that the template writes as the ending, as text and as id. It may be the first token of
            the observation.
        sampled: id of the stop token that the policy samples there. It differs from `token` only if the template
            changes the ending of a turn when the turn is past.
    """

    past: tuple[dict[str, Any], ...]
    between: str
    text: str
    token: int
    sampled: int

    def tail(self, rendered: str) -> str:
        """The text behind the ending in a rendered conversation. Raises WrongInput if the turn ends otherwise there."""
        rest = rendered.partition(MARKER)[2]
        if not rest.startswith(self.between + self.text):
            raise WrongInput("model.path: the model's chat template ends a turn differently for different observations")
        return rest[len(self.between) + len(self.text) :]


class Observations:
    """Converts observation messages to token ids, for one tokenizer with a chat template."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer, self._template_kwargs = tokenizer, dict(template_kwargs)
        self._stops = {str(tokenizer.decode([i], skip_special_tokens=False)): i for i in stop_ids}
        self._added = sorted(tokenizer.get_added_vocab().items(), key=lambda item: -len(item[0]))
        self.ending = lru_cache(maxsize=1024)(self._ending)

    @cached_property
    def _ordinary(self) -> OrdinaryText:
        return OrdinaryText(self._tokenizer, self._encode, self._stops.values())

    def ids(self, messages: Messages, closed_by: int | None, tools: Tools = ()) -> tuple[int, ...]:
        """See Chat.observe."""
        _check(messages)
        messages, tools = self._ordinary.cover(messages), self._ordinary.cover(tools)
        shape = tuple((m["role"], m.get("name"), m.get("tool_call_id")) for m in messages)
        ending = self.ending(shape, json.dumps(tools))
        if closed_by is not None and closed_by != ending.sampled:
            raise UnclosedTurn(
                f"trajectory: the turn before observations of roles {', '.join(m['role'] for m in messages)} must end "
                f"with token {ending.sampled}, as the chat template ends it, got {closed_by}"
            )
        tail = ending.tail(self.render([*ending.past, *_with_ids(messages)], tools))
        # The text is encoded from the ending on. An added token separates texts for every tokenizer: what stands before
        # it changes no id, and no tokenizer puts a space before it. `check` verifies this by `ends_with`.
        token, *rest = self._ordinary.ids(ending.text + tail)
        if token != ending.token:
            raise WrongInput(f"model.path: the tokenizer must keep {ending.text!r} as one token, since it ends turns")
        return tuple(rest) if closed_by is not None else (token, *rest)

    def render(self, messages: Messages, tools: Tools = (), *, opened: bool = True) -> str:
        """The text of a conversation, with the opening of the assistant's turn if `opened`. Raises WrongInput."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=list(tools) or None,
                    add_generation_prompt=opened,
                    tokenize=False,
                    **self._template_kwargs,
                )
            )
        except Exception as error:  # a template is a program and may raise any exception
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateRefuses(
                f"model.path: the model's chat template refuses roles {roles}: {_said(error)}"
            ) from error

    def played_ids(self, messages: Messages, tools: Tools) -> list[int]:
        """The ids of `render`. Text in a message makes no special token, unless it is OwnText (ordinary_text.py)."""
        return self._ordinary.ids(self.render(self._ordinary.cover(messages), self._ordinary.cover(tools)))

    def ids_of(self, messages: Messages, tools: Tools = (), *, opened: bool = True) -> list[int]:
        """The ids of `render`."""
        return self._encode(self.render(messages, tools, opened=opened))

    def ending_behind(self, past: Messages, probes: Messages, tools: Tools) -> Ending:
        """How the template ends the last turn of `past`, which holds MARKER, before `probes`.

        probes: observations whose contents occur nowhere else. Raises WrongInput if the template drops, repeats or
        reorders a message, or ends the turn in an unknown way.
        """
        text = self.render([*past, *probes], tools)
        words = [MARKER, *(probe["content"] for probe in probes)]
        places = [text.find(word) for word in words]
        if [text.count(word) for word in words] != [1] * len(words) or places != sorted(places):
            roles = ", ".join(["assistant", *(probe["role"] for probe in probes)])
            raise WrongInput(
                f"model.path: the model's chat template drops or repeats a message of roles {roles}, or changes their "
                "order; such a conversation needs another model or template"
            )
        start = places[0] + len(MARKER)
        found = _first(text[start : places[1]], self._stops)
        if found is not None:
            at, stop = found
            return Ending(tuple(map(dict, past)), text[start : start + at], stop, self._stops[stop], self._stops[stop])
        return self._rewritten(past, tools, text[start : places[1]])

    def until_stop(self, text: str) -> str:
        """The text up to the first stop token behind MARKER, with that token; the whole text if there is none."""
        before, marker, rest = text.partition(MARKER)
        found = _first(rest, self._stops)
        return text if found is None else before + marker + rest[: found[0]] + found[1]

    def ends_with(self, text: str, end: str) -> bool:
        """Whether the ids of `text` end with the ids that `end` has by itself."""
        ids = self._encode(end)
        return self._encode(text)[-len(ids) :] == ids

    def _encode(self, text: str, encode: Callable[[str], Sequence[int]] | None = None) -> list[int]:
        """The ids of a text. encode: another tokenizer's method to use instead of the model's. Raises WrongInput."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False) if encode is None else encode(text))
        except Exception as error:  # e.g. half of a surrogate pair makes tokenizers raise exceptions of any type
            raise WrongInput(f"model.path: the model's tokenizer refuses {text!r:.80}: {_said(error)}") from error

    def _rewritten(self, past: Messages, tools: Tools, before: str) -> Ending:
        """The ending, if the template ends a past turn with another token than the last turn of a conversation.

        before: the text between the marker and the observation.
        """
        last = self.render(past, tools, opened=False).partition(MARKER)[2]
        found = _first(last, self._stops)
        if found is not None and before.startswith(last[: found[0]]):
            # A token is the ending only if the opening of the next turn may follow it at once. That is not so of a
            # token that opens an observation, which comes first in a template that writes no end of past turns.
            opening = self.render([USER], tools).removeprefix(self.render([USER], tools, opened=False)).strip()
            opened = self.render(past, tools).partition(MARKER)[2]
            for token, id_ in self._added:
                ended = last[: found[0]] + token
                if before.startswith(ended) and opened.startswith(ended) and opened[len(ended) :].strip() == opening:
                    return Ending(tuple(map(dict, past)), last[: found[0]], token, id_, self._stops[found[1]])
        raise WrongInput(
            "model.path: the model's chat template ends a turn that is past with none of the model's stop tokens "
            f"({', '.join(self._stops)}), but with {before[:40]!r}"
        )

    def _ending(self, shape: Shape, tools_json: str) -> Ending:
        """How the template ends the turn before observations of a shape, for the first dummy turn that it accepts."""
        tools, probes = json.loads(tools_json), probes_of(shape)
        refused = None
        for turn in dummies(probes, tools):
            try:
                ending = self.ending_behind([USER, turn], probes, tools)
            except WrongInput as error:
                refused = error
                continue
            self._check_ids(ending, probes, shape, tools)
            return ending
        assert refused is not None
        raise refused

    def _check_ids(self, ending: Ending, probes: Messages, shape: Shape, tools: Tools) -> None:
        tail = ending.tail(self.render([*ending.past, *probes], tools))
        made_up = [
            p["tool_call_id"] for p, (*_, id_) in zip(probes, shape, strict=True) if "tool_call_id" in p and not id_
        ]
        if any(id_ in tail for id_ in made_up):
            raise WrongInput(
                "model.path: the model's chat template writes the id of the call into its answer, so messages of role "
                "tool must hold it as tool_call_id, as the policy wrote it"
            )


def probes_of(shape: Shape) -> list[dict[str, Any]]:
    """Messages of a shape, with contents that occur nowhere else."""
    probes = [{"role": role, "name": name, "tool_call_id": id_} for role, name, id_ in shape]
    probes = [{key: value for key, value in probe.items() if value is not None} for probe in probes]
    return _with_ids([probe | {"content": f"probe{index}Q7x"} for index, probe in enumerate(probes)])


def dummies(probes: Messages, tools: Tools = ()) -> Iterator[dict[str, Any]]:
    """Assistant turns with MARKER that observations like `probes` may follow, the likeliest first.

    Before messages of role tool there are three kinds: a turn with as many calls, MARKER in the last; a turn with one
    call, for templates that allow no more; and plain text, for templates without calls, where the policy's calls are
    part of its text.
    """
    asked = [probe for probe in probes if probe["role"] == "tool"] if probes[0]["role"] == "tool" else []
    fallback = tools[0]["function"]["name"] if tools else "tool"
    for answered in (asked, asked[-1:]) if len(asked) > 1 else (asked,) if asked else ():
        for as_json in (False, True):  # some templates want arguments as a mapping, some as JSON
            calls = []
            for probe in answered:
                value = {"value": MARKER if probe is answered[-1] else "0"}
                arguments = json.dumps(value) if as_json else value
                function = {"name": probe.get("name", fallback), "arguments": arguments}
                calls.append({"type": "function", "id": probe["tool_call_id"], "function": function})
            yield {"role": "assistant", "content": "", "tool_calls": calls}
    yield {"role": "assistant", "content": MARKER}


def _with_ids(messages: Messages) -> list[dict[str, Any]]:
    """Copies of the messages in which each tool's answer has a tool_call_id."""
    return [
        {"tool_call_id": CALL_ID.format(index), **message} if message["role"] == "tool" else dict(message)
        for index, message in enumerate(messages)
    ]


def _first(text: str, tokens: Mapping[str, int]) -> tuple[int, str] | None:
    """Returns (index, text) of the first of these tokens in a text; of two that begin there, of the longer one."""
    places = [(text.find(token), -len(token), token) for token in tokens if token in text]
    if not places:
        return None
    at, _, token = min(places)
    return at, token


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check(messages: Messages) -> None:
    if not messages:
        raise WrongInput("trajectory: an environment that is not done must answer a turn with messages, got none")
    for message in messages:
        if message.get("role") not in ("tool", "user") or not isinstance(message.get("content"), str):
            raise WrongInput(
                "trajectory: an observation must be a message of role tool or user with its content as text, got "
                f"{str(dict(message))[:100]}"
            )


# Checks before a run: does the template write behind any turn what it writes behind the dummy turn?

THOUGHT, ANSWER = "thoughtQ7x", "answerQ7x"
SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN, FIELD, INLINE = "no thinking", "thinking in a field of its own", "thinking in the text"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `check`: what a template does with observations of some roles.

    Attributes:
        state: "exact": the template writes the same text, with the same ids, behind every turn that was tried.
            "varies": the text depends on what came before, so that what is appended may differ from a rendering of the
            whole conversation. "refused": nothing can be appended.
        reason: one clause; "" if the state is "exact".
    """

    state: Literal["exact", "varies", "refused"]
    reason: str = ""


def check(observations: Observations, roles: Sequence[str], tools: Tools = ()) -> Verdict:
    """Tries observations of these roles, e.g. ("tool", "tool"), behind a dozen conversations: with and without thinking
    (in a field of its own, in the text), a system message, an earlier round.

    Conversations that the template refuses are skipped, except the shortest, which it must accept.
    """
    shape = shape_of(roles, tools)
    try:
        base = observations.ending(shape, json.dumps(tools))
    except WrongInput as error:
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
        except WrongInput as error:
            return Verdict("varies", f"with {name}: it {_clause(error)}")
        tail = ending.tail(text)
        if (tail, ending.text, ending.sampled) != (expected, base.text, base.sampled):
            return Verdict("varies", f"with {name}: " + _difference(ending.text + tail, base.text + expected))
    return Verdict("exact")


def keeps_past(observations: Observations, roles: Sequence[str], tools: Tools = (), *, thinking: bool) -> bool:
    """Whether rendering a conversation with observations of these roles leaves the text before them unchanged.

    thinking: whether the turn before them has thinking. Raises WrongInput if the template refuses these observations.
    """
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
    """What is wrong, as a clause, if an answer of this role is rendered behind `turn`, an assistant's message of text
    alone (with its calls as text); "" if the answer is in the rendered conversation."""
    answer = {"role": role, "content": ANSWER} | ({"name": tools[0]["function"]["name"]} if tools else {})
    try:
        text = observations.render([USER, {"role": "assistant", "content": turn}, answer], tools)
    except WrongInput as error:
        return _clause(error)
    return "" if ANSWER in text else "leaves it out"


def hidden_tools(observations: Observations, tools: Tools) -> list[str]:
    """Names of the tools that the template does not write into the prompt, so that the policy is not told of them."""
    text = observations.render([USER], tools)
    return [name for name in (str(tool["function"]["name"]) for tool in tools) if name not in text]


def shape_of(roles: Sequence[str], tools: Tools = ()) -> Shape:
    """The shape of observations of these roles, in which messages of role tool are answers of the first tool."""
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
    if style == FIELD:  # templates differ in the name of the field
        return {**turn, "reasoning_content": THOUGHT, "reasoning": THOUGHT, "thinking": THOUGHT}
    if style == INLINE:
        return {**turn, "content": f"<think>\n{THOUGHT}\n</think>\n\n{turn['content']}"}
    return turn


def _without_marker(turn: Mapping[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(turn).replace(MARKER, "earlier"))
    return copy


def _clause(error: WrongInput) -> str:
    """The message of an error without the key before it and the advice behind it."""
    return str(error).removeprefix("model.path: the model's chat template ").partition("; ")[0]


def _difference(found: str, expected: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    return f"it writes {found[at : at + 30]!r} where it else writes {expected[at : at + 30]!r}"
