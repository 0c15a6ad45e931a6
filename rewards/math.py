"""Is the answer mathematically equal to the gold answer? By math-verify (LaTeX, sets, intervals, fractions, ...)."""

import importlib
import logging
import re
from collections.abc import Sequence
from functools import partial
from math import nan
from typing import Any

from rewards.deadline import Patience, computing
from rewards.math_text import Written, written
from rewards.text import check_tag, column_of, gold_text, tagged, text_of

# Imported with this module, which only the loader imports: the second it takes must not count against the deadline.
_math_verify = importlib.import_module("math_verify")
_errors = importlib.import_module("math_verify.errors")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off: ours is on
_math_verify.parse(r"$\frac{x^2}{2}$", parsing_timeout=None)  # the first one builds tables, for a quarter of a second
# math-verify has its own limit in whole seconds only.
_within = partial(computing, error=_errors.TimeoutException)
_NUMBER = re.compile(r"[0-9]+(?:[.,/][0-9]+)*")


def math(
    completions: Sequence[Any],
    *,
    column: str = "answer",
    tag: str = "answer",
    seconds: float = 2,
    **columns: Sequence[Any],
) -> list[float]:
    r"""1.0 if the answer equals the gold answer, 0.0 if not, nan where math-verify gives up (an error, or `seconds`).

    The answer is what stands in the last `<tag>...</tag>`, or the whole text if there is no such tag (math-verify then
    looks for the last \boxed{...} or expression). `seconds` of CPU time bound each of the two steps, reading and
    comparing, per sample; once two samples of a group were late, an eighth of it. Must run in the main thread of its
    process: it uses SIGPROF.
    Raises ValueError if the column is missing or a gold answer cannot be read.
    """
    check_tag(tag)
    scores, patience = [], Patience(seconds)
    golds: dict[str, tuple[list[Any], bool]] = {}  # a group has one, which takes milliseconds to read
    for completion, gold in zip(completions, column_of(columns, column), strict=True):
        told = repr(gold)
        if told not in golds:
            golds[told] = _gold(gold, seconds, column)
        right, relation = golds[told]
        text = text_of(completion)
        inside = tagged(text, tag)
        asked = written(text if inside is None else inside, prose=inside is None)
        if asked is None or (asked.relation and not relation):
            scores.append(0.0)
            continue
        try:
            scores.append(_compare(right, asked, patience.seconds))
        except _errors.TimeoutException:
            patience.late += 1
            scores.append(nan)
        except Exception:  # sympy on what a model wrote: anything can come
            scores.append(nan)
    return scores


def _gold(gold: object, seconds: float, column: str) -> tuple[list[Any], bool]:
    """The readings of a gold answer, and whether it begins with a relation."""
    plain = "" if gold is None else gold_text(gold)
    asked = None if gold is None else written(plain, prose=False)
    try:
        with _within(seconds):
            right = [] if asked is None else _read(asked)
            if asked is not None and asked.bare and asked.text != plain:
                # Prose stays as it is written: what says the same there, letter by letter, is right, too.
                right += [one for one in _read(Written(plain, bare=True)) if isinstance(one, str)]
    except (Exception, _errors.TimeoutException):
        right = []
    if asked is None or not right:
        raise ValueError(f"column {column!r}: math-verify cannot read the gold answer {gold!r}; use another reward")
    return right, asked.relation


def _compare(right: list[Any], asked: Written, seconds: float) -> float:
    with _within(seconds):
        answer = _read(asked)
        # A text of which LaTeX makes no expression is the number in it, if there is just one.
        if asked.bare and not _expression(answer) and len(_NUMBER.findall(asked.text)) == 1:
            answer += _parsed(asked.text)
    if not answer:
        return 0.0
    with _within(seconds):
        return float(_math_verify.verify(right, answer, timeout_seconds=None, raise_on_error=True))


def _read(asked: Written) -> list[Any]:
    """math-verify's readings: [] if it finds nothing mathematical."""
    # LaTeX is only seen inside its delimiters, which gold answers and tags mostly lack.
    return (_parsed(f"${asked.text}$") if asked.bare else []) or _parsed(asked.text)


def _parsed(text: str) -> list[Any]:
    return list(_math_verify.parse(text, parsing_timeout=None, raise_on_error=True))


def _expression(readings: list[Any]) -> bool:
    return any(not isinstance(one, str) for one in readings)
