"""Does the text match a pattern?"""

import re
from collections.abc import Sequence
from typing import Any

from rewards.base import Zeroed, text_of
from rewards.limits import Late, Patience

_SECONDS = 1.0  # for one completion


def regex(completions: Sequence[Any], *, pattern: str, full: bool = False, **columns: Sequence[Any]) -> list[float]:
    """1.0 if `pattern` (Python's re syntax) is found in the text, or matches all of it if `full`; else 0.0.

    Flags go into the pattern: `(?s)` lets the dot match newlines. A text on which it backtracks for more than a second
    scores 0.0.
    Raises ValueError if the pattern does not compile.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"args.pattern: {pattern!r} is not a regular expression: {error}") from error
    match = compiled.fullmatch if full else compiled.search
    scores: list[float] = []
    why: dict[int, str] = {}
    patience = Patience(_SECONDS)
    for completion in completions:
        found = None
        try:
            with patience.with_one():
                found = match(text_of(completion))
        except Late:
            why[len(scores)] = f"the pattern has no answer within {_SECONDS:g} s: it backtracks on this text"
        scores.append(float(found is not None))
    return Zeroed(scores, why)
