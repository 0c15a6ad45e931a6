"""Does the text match a pattern?"""

import re
from collections.abc import Sequence
from typing import Any

from rewards.text import text_of


def regex(completions: Sequence[Any], *, pattern: str, full: bool = False, **columns: Sequence[Any]) -> list[float]:
    """1.0 if `pattern` (Python's re syntax) is found in the text, or matches all of it if `full`; else 0.0.

    Flags go into the pattern: `(?s)` lets the dot match newlines. One that backtracks for ever meets the deadline.
    Raises ValueError if the pattern does not compile.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"args.pattern: {pattern!r} is not a regular expression: {error}") from error
    match = compiled.fullmatch if full else compiled.search
    return [float(match(text_of(completion)) is not None) for completion in completions]
