"""Is the answer mathematically equal to the gold answer? By math-verify (LaTeX, sets, intervals, fractions, ...)."""

import importlib
import re
from collections.abc import Sequence
from math import nan
from typing import Any

from rewards.text import check_tag, column_of, gold_text, tagged, text_of

# Imported with this module, which only the loader imports: the second it takes must not count against the deadline.
_math_verify = importlib.import_module("math_verify")
_errors = importlib.import_module("math_verify.errors")
_DELIMITER = re.compile(r"(?<!\\)(?:\$|\\[\[(])")  # $, \[ or \(, but no \$, which is money, and no \\[, a line's end


def math(
    completions: Sequence[Any],
    *,
    column: str = "answer",
    tag: str = "answer",
    seconds: int = 2,
    **columns: Sequence[Any],
) -> list[float]:
    """1.0 if the answer equals the gold answer, 0.0 if not, nan where math-verify gives up (an error, or `seconds`).

    The answer is what stands in the last `<tag>...</tag>`, or the whole text if there is no such tag (math-verify then
    looks for a boxed or last expression). `seconds` bounds each of the two steps, reading and comparing, per sample.
    Must run in the main thread of its process: math-verify uses signal.alarm.
    Raises ValueError if the column is missing or a gold answer cannot be read.
    """
    check_tag(tag)
    scores = []
    for completion, gold in zip(completions, column_of(columns, column), strict=True):
        right = None if gold is None else _read(gold_text(gold), seconds, prose=False)
        if not right:
            raise ValueError(f"column {column!r}: math-verify cannot read the gold answer {gold!r}; use another reward")
        text = text_of(completion)
        inside = tagged(text, tag)
        scores.append(_compare(right, text if inside is None else inside, seconds, prose=inside is None))
    return scores


def _compare(right: list[Any], text: str, seconds: int, *, prose: bool) -> float:
    answer = _read(text, seconds, prose=prose)
    if not answer:
        return nan if answer is None else 0.0
    try:
        return float(_math_verify.verify(right, answer, timeout_seconds=seconds, raise_on_error=True))
    except (Exception, _errors.TimeoutException):  # sympy on what a model wrote: anything can come
        return nan


def _read(text: str, seconds: int, *, prose: bool) -> list[Any] | None:
    """math-verify's readings of `text`: [] if it finds nothing mathematical, None if it gives up."""
    # LaTeX is only seen inside its delimiters, which gold answers and tags mostly lack.
    bare = not prose and not _DELIMITER.search(text) and "\\boxed" not in text
    try:
        for form in (f"${text}$", text) if bare else (text,):
            found: list[Any] = _math_verify.parse(form, parsing_timeout=seconds, raise_on_error=True)
            if found:
                return found
    except (Exception, _errors.TimeoutException):
        return None
    return []
