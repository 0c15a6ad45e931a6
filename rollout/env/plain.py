"""What tokenizers, pickle and JSON all take, of what a policy or an environment has written."""

from collections.abc import Mapping
from typing import Any

DEEPEST = 100  # brackets within brackets; ten times as many are beyond what Python can pickle


def is_text(value: object) -> bool:
    """Whether it is a text of which UTF-8 can be made. Half of a surrogate pair is none, and no tokenizer takes it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_text(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def too_deep(value: Any, most: int = DEEPEST) -> bool:
    """Whether mappings and sequences are nested more than `most` deep in it."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return most == 0 or any(too_deep(one, most - 1) for one in value)
