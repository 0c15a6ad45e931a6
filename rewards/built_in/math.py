"""Is the answer mathematically equal to the gold answer? By math-verify (LaTeX, sets, intervals, fractions, ...)."""

import importlib
import logging
import re
from collections.abc import Sequence
from functools import partial
from math import nan
from typing import Any, NamedTuple

from rewards.base import (
    check_tag,
    column_of,
    gold_text,
    tagged,
    text_of,
)
from rewards.limits import Patience, computing

# What math-verify is to read of an answer: forms that it takes for something else, written as it knows them.


_DELIMITER = re.compile(r"(?<!\\)(?:\$|\\[\[(])")  # $, \[ or \(, but no \$, which is money, and no \\[, a line's end
_BRACE = re.compile(r"\\boxed\{|\\[{}]|[{}]")
_EMPHASIS = re.compile(r"(\*\*|__|`)(?P<text>(?:(?!\1).)+)\1", re.DOTALL)
# Between boxes that are one answer, as in `$x=\boxed{1}$ or $x=\boxed{2}$`.
_WORD = r"\\text\{\s*(?:and|or)\s*\}|\\(?:lor|land)(?![A-Za-z])|\b(?:and|or)\b"
_APART = rf"[,;]|\\\\|\\q?quad|{_WORD}"
_JOINT = re.compile(rf"(?:[\s$~]|\\[()\[\],;: ]|{_APART})*(?:[A-Za-z]\w*(?:_\{{\w+\}})?\s*=\s*)?")
_SEPARATES = re.compile(_APART)
_RELATION = re.compile(r"(?:[\s$]|\\[(\[])*(?:\\(?:neq?|[gl]eq?|[gl]eqslant|[gl]t|not)(?![A-Za-z])|[<>≠≥≤]|!=)")
_BLANK = r"(?:[^\S\n]|~|\\[ ,;:]|\\q?quad)+"
_THIN = r"[ \u00a0\u202f]"
_GROUPED = re.compile(rf"(?<![\w.,/^}}])(?<![0-9]{_THIN})[1-9][0-9]{{0,2}}(?:(?:{_THIN}|\\,)[0-9]{{3}})+(?![0-9])")
_BEGIN = r"(?P<begin>(?:\\?\$\$?|\\[(\[])?\s*(?:[-+\u2212]\s*)?)"
_END = r"(?P<end>(?:\s+[A-Za-z]{3,}(?: [A-Za-z]+)*)?(?:\s*\\?%)?\.?(?:\s*(?:\$\$?|\\[)\]]))?\.?)"
_MIXED = re.compile(
    rf"{_BEGIN}(?P<whole>[0-9]{{1,20}}){_BLANK}(?P<over>[0-9]{{1,20}})\s*/\s*(?P<under>[0-9]{{1,20}}){_END}"
)
_ITEM = r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:\s*/\s*[0-9]+)?"
_SEVERAL = re.compile(rf"{_BEGIN}{_ITEM}(?:{_BLANK}{_ITEM})+{_END}")
_LATEX = (
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"√\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*([0-9]+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=[\w)}])\*\*(-?[0-9]+|[A-Za-z]\b)"), r"^{\1}"),
    *((re.compile(sign), rf"\\frac{{{over}}}{{{under}}}") for sign, over, under in ("½12", "⅓13", "⅔23", "¼14", "¾34")),
)


class Written(NamedTuple):
    """A text for math-verify; `bare` without LaTeX's delimiters; `relation` if it begins with one, such as `>`."""

    text: str
    bare: bool = False
    relation: bool = False


def written(text: str, *, prose: bool) -> Written | None:
    """`text` as math-verify is to read it; None for numbers with nothing but blanks between them, which it adds up.

    Of several boxes the last counts, with those that are joined to it by a comma, `and` or `or`. Prose without a box
    stays as it is.
    """
    if boxes := _boxes(text):
        last = len(boxes) - 1
        while last and _joined(text[boxes[last - 1][1] + 1 : boxes[last][0] - len(r"\boxed{")]):
            last -= 1
        first = text[slice(*boxes[last])]
        pieces, behind = [], 0
        for i, (start, end) in enumerate(boxes):
            said = _rewritten(text[start:end]) if i >= last else text[start:end]
            if said is None:
                return None
            pieces += [text[behind : start - len(r"\boxed{")], rf"\boxed{{{said}}}" if i >= last else said]
            behind = end + 1
        return Written("".join([*pieces, text[behind:]]), relation=bool(_RELATION.match(first)))
    if prose:
        return Written(text)
    said = _rewritten(text)
    if said is None:
        return None
    bare = not _DELIMITER.search(said) and "\\boxed" not in said
    return Written(said, bare=bare, relation=bool(_RELATION.match(said)))


def _joined(between: str) -> bool:
    """Whether boxes with this between them are one answer."""
    return bool(_JOINT.fullmatch(between) and _SEPARATES.search(between))


def _boxes(text: str) -> list[tuple[int, int]]:
    r"""Begin and end of what stands in each \boxed{...} that is closed, not empty and in no other."""
    opened: list[int] = []
    found: list[tuple[int, int]] = []
    for match in _BRACE.finditer(text):
        if match[0] == "}" and opened:
            begin = opened.pop()
            if begin >= 0 and text[begin : match.start()].strip():
                while found and found[-1][0] > begin:
                    found.pop()
                found.append((begin, match.start()))
        elif match[0][-1] == "{" and match[0] != r"\{":
            opened.append(match.end() if match[0] != "{" else -1)
    return found


def _rewritten(text: str) -> str | None:
    text = text.strip()
    while match := _EMPHASIS.fullmatch(text):
        text = match["text"].strip()
    for sign, latex in _LATEX:
        text = sign.sub(latex, text)
    match = _MIXED.fullmatch(text)
    if match and 0 < int(match["over"]) < int(match["under"]):
        over = int(match["whole"]) * int(match["under"]) + int(match["over"])
        return rf"{match['begin']}\frac{{{over}}}{{{int(match['under'])}}}{match['end']}"
    text = _GROUPED.sub(lambda group: re.sub("[^0-9]", "", group[0]), text)
    return None if _SEVERAL.fullmatch(text) else text


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
