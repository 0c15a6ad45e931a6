"""What several reward functions need to read of a completion or of a gold answer."""

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a completion, plain or conversational.

    Of a conversation only the assistant's messages count (tool output is not the policy's work); they are joined by
    newlines. Content given in parts contributes its text parts.
    """
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return "\n".join(_content(message.get("content")) for message in said)


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a prompt: of a conversation that of all its messages, without the marks of a chat template."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(_content(message.get("content")) for message in prompt)


def _content(content: Any) -> str:
    if content is None:  # an assistant message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


_OPENING = re.compile(r"<([A-Za-z_][\w.-]*)>\s*\Z")


def opening_at_end(prompt: str) -> str:
    """The opening tag that a prompt's text ends in, with the white space behind it; "" where there is none. A template
    that prefills <think> writes it there, and completions begin inside of it."""
    found = _OPENING.search(prompt)
    return "" if found is None else found[0]


def tag_of(opening: str) -> str:
    """The name in what `opening_at_end` found."""
    return opening.strip()[1:-1]


def behind(opening: str, completion: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """A completion with the opening tag of its prompt in front, of a conversation before its first answer."""
    if isinstance(completion, str):
        return opening + completion
    said = list(completion)
    first = next((i for i, message in enumerate(said) if message.get("role", "assistant") == "assistant"), None)
    if first is not None:
        said[first] = {**said[first], "content": opening + _content(said[first].get("content"))}
    return said


def tagged(text: str, tag: str) -> str | None:
    """The stripped text inside the last closed `<tag>...</tag>`, or None if there is none. It ends at its first
    `</tag>`, if more of them follow."""
    start = text.rfind(f"<{tag}>", 0, max(0, text.rfind(f"</{tag}>")))
    return text[start + len(tag) + 2 : text.find(f"</{tag}>", start)].strip() if start >= 0 else None


def gold_text(gold: object) -> str:
    """The gold answer as text; of GSM8K's worked solutions what follows the last `####`. Of a number all its digits:
    0.00005, not 5e-05."""
    if isinstance(gold, float) and math.isfinite(gold):
        gold = Decimal(repr(float(gold)))
    text = format(gold, "f") if isinstance(gold, Decimal) else str(gold)
    return text.rsplit("####", 1)[-1].strip()


def column_of(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    """A data column by its configured name, or a part of a nested one: `conversations[2][value]`.

    Raises ValueError naming the columns that exist, or what there is in place of a part.
    """
    if name in columns:
        return columns[name]
    first, steps = name.partition("[")[0], _STEP.findall(name)
    if first not in columns or f"{first}{''.join(f'[{step}]' for step in steps)}" != name:
        raise ValueError(f"args.column: the data has no column {name!r}; it has {sorted(columns)}")
    return [_part(value, steps, name) for value in columns[first]]


_STEP = re.compile(r"\[([^\[\]]+)\]")


def _part(value: Any, steps: Sequence[str], name: str) -> Any:
    for step in steps:
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"args.column: there is no {step!r} of {name!r} in {str(value)[:80]!r}") from None
    return value


_NAME = re.compile(r"[A-Za-z_][\w.-]*")


def check_tag(tag: object) -> str:
    """A tag name as it may stand in a configuration. Raises ValueError for anything else, such as `<answer>`."""
    if not isinstance(tag, str) or not _NAME.fullmatch(tag):
        raise ValueError(f"args: a tag must be a plain name such as 'answer', got {tag!r}; leave out the brackets")
    return tag
