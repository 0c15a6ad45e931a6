"""What a chat template writes behind an assistant's message: the end of the policy's turn, found by rendering one.

A base model with ChatML is the usual case: its end token is <|endoftext|>, its template ends turns with <|im_end|>, and
where that is no stop token every completion goes on to the length limit.
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from rollout.data.observation import MARKER, USER, Observations, TemplateRefuses

ASKED = {"role": "user", "content": "askedQ7x"}
SAID = {"role": "assistant", "content": MARKER}


class TurnEnd(NamedTuple):
    """token: the added token that ends the policy's turn and is none of the model's stop tokens; None where one of
    those does, or no added token. text: what ends it where no token does, or begins the turn that follows; "" where
    nothing is written there; None where a token ends it, or the template cannot be asked."""

    token: str | None = None
    text: str | None = None


def turn_end(observations: Observations, stops: Collection[str], added: Mapping[str, int]) -> TurnEnd:
    """How a template ends the policy's turn. stops: the texts of stop tokens. added: text -> id of added tokens."""
    last = _behind(observations, ())
    if last is None:
        return TurnEnd()
    past = _behind(observations, (ASKED,)) or ""
    there = sorted((name for name in added if name in last or name in past), key=len, reverse=True)
    tokens = re.compile("|".join(map(re.escape, there)) or r"(?!)")
    # What both have ends any turn. Behind a conversation's last turn may stand an end of the whole; and where a past
    # turn ends with another token (gpt-oss), the policy samples what ends the last one.
    common, last = _common(last, past, tokens), last.removesuffix(_always_opened(observations, last))
    texts = (_common(last, past, tokens), common, last, "" if last.strip() else past)
    for found in texts:
        marks = tokens.findall(found)
        if any(mark in stops for mark in marks):
            return TurnEnd()
        if marks:
            return TurnEnd(token=marks[0])
    return TurnEnd(text=next((found.rstrip().lstrip(" ") for found in texts if found.strip()), ""))


def turn_marks(observations: Observations, added: Collection[str]) -> re.Pattern[str]:
    """Those of the added tokens that the template puts around messages; of a template that cannot be asked none."""
    try:
        text = observations.render([USER, SAID, USER])
    except TemplateRefuses:
        text = ""
    marks = sorted((name for name in added if name in text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def opens_with(observations: Observations) -> str | None:
    """What the template writes between a user's message and the assistant's that answers it; None where it cannot be
    asked."""
    try:
        text = observations.render([ASKED, SAID], opened=False)
    except TemplateRefuses:
        return None
    _, asked, rest = text.partition(ASKED["content"])
    between, said, _ = rest.partition(MARKER)
    return between if asked and said else None


def behind_asked(observations: Observations, *, opened: bool = True) -> str | None:
    """What the template writes behind a user's message at the end of a prompt."""
    try:
        _, asked, rest = observations.render([ASKED], opened=opened).partition(ASKED["content"])
    except TemplateRefuses:
        return None
    return rest if asked else None


def _behind(observations: Observations, more: tuple[dict[str, str], ...]) -> str | None:
    """The text behind an assistant's message, up to the message that follows it, or to the end."""
    try:
        text = observations.render([USER, SAID, *more], opened=False)
    except TemplateRefuses:
        return None
    _, said, rest = text.partition(MARKER)
    return rest.partition(more[0]["content"])[0] if said and more else rest if said else None


def _always_opened(observations: Observations, last: str) -> str:
    """What a template that opens the assistant's turn whether it is asked to or not writes behind the last message."""
    behind, unasked = behind_asked(observations), behind_asked(observations, opened=False)
    if behind is None or behind != unasked:
        return ""
    size = next((i for i, (a, b) in enumerate(zip(reversed(behind), reversed(last), strict=False)) if a != b), None)
    size = min(len(behind), len(last)) if size is None else size
    return last[len(last) - size :]


def _common(last: str, past: str, tokens: re.Pattern[str]) -> str:
    """What both begin with, up to a token that they do not share."""
    size = next((i for i, (a, b) in enumerate(zip(last, past, strict=False)) if a != b), min(len(last), len(past)))
    cut = next((match.start() for match in tokens.finditer(last) if match.start() < size < match.end()), size)
    return last[:cut]
