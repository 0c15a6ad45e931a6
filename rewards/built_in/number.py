"""Is the answer the right number, exactly?"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from rewards.base import (
    check_tag,
    column_of,
    gold_text,
    tagged,
    text_of,
)

# Digits, or digits grouped by threes with commas; then perhaps decimals. ASCII only: \d would take other scripts.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_WHOLE = re.compile(rf"(?P<sign>[-+]?)\s*\$?\s*(?P<sign2>-?)(?P<digits>{_DIGITS})\s*%?\s*\.?")
# What a number does not follow directly, nor its minus, which is a subtraction there: letters, but for those of scripts
# without blanks between words (Thai to Khmer, Chinese, Japanese, Korean), and digits.
_JOINED = r"(?<![^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\U0003ffff])(?<!\d)"
# Three digits of an exponent: what compares or shows the number writes it out.
_POWER = r"(?P<power>[eE][-+]?[0-9]{1,3}(?![A-Za-z0-9_]))"
_INSIDE = re.compile(
    rf"(?P<sign>{_JOINED}(?<![.)])[-+]?)\$?(?P<sign2>-?){_JOINED}(?<!\.)(?P<digits>{_DIGITS}){_POWER}?"
)
_UNDERLINED = re.compile(r"(?<![A-Za-z0-9_])(__?)([^_\n]+)\1(?![A-Za-z0-9_])")  # Markdown: __72__
# Not at the start of a line, where a minus and a blank make an item of a list.
_SIGN_APART = re.compile(r"((?:=|\bis)[ \t]*[-+])[ \t]+(?=\$?\.?[0-9])")
_EN_DASH = re.compile(r"(?:(?<==)|(?<==\s)|(?<=\bis\s)|^)\u2013(?=\$?\.?[0-9])")  # "3 \u20135" is a range


def parse_number(text: str) -> Decimal | None:
    """The number that `text` as a whole is, or None. `1,234.50`, `$5`, `-$5`, `50%` and `12.` are numbers.

    The signs $ and % are dropped, not converted: `50%` is 50.
    """
    match = _WHOLE.fullmatch(_plain(" ".join(text.split())))  # a run of blanks would take the square of its length
    return _value(match) if match else None


def last_number(text: str) -> Decimal | None:
    """The last number in running text, or None. `1.5e-3` is a number there, `__72__` 72, and `x = - 3` -3."""
    text = _SIGN_APART.sub(r"\1", _EN_DASH.sub("-", _plain(text)))
    found = list(_INSIDE.finditer(_UNDERLINED.sub(r"\2", text)))
    return _value(found[-1]) if found else None


def _plain(text: str) -> str:
    """`text` with LaTeX's thousands and dollars, and the minus sign of Unicode, as one types them."""
    for written, typed in (("\u2212", "-"), ("{,}", ","), (",\\!", ","), ("\\$", "$")):
        text = text.replace(written, typed)
    return text


def _value(match: re.Match[str]) -> Decimal | None:
    if match["sign"] and match["sign2"]:
        return None
    # Decimal, not float: 0.1 + 0.2 must not count as 0.3 by luck, and long digits must not be rounded to equality.
    power = match.groupdict().get("power") or ""
    return Decimal((match["sign"] or match["sign2"]) + match["digits"].replace(",", "") + power)


def number(
    completions: Sequence[Any], *, column: str = "answer", tag: str = "answer", **columns: Sequence[Any]
) -> list[float]:
    """1.0 if the answer equals the gold number exactly, else 0.0.

    The answer is what stands in the last `<tag>...</tag>`, which must be a number and nothing else; in a text without
    that tag it is the last number. Gold comes from `column`: a number, or a text as in GSM8K (`... #### 72`).
    Raises ValueError if the column is missing or a gold answer is not a number.
    """
    check_tag(tag)
    scores = []
    for completion, gold in zip(completions, column_of(columns, column), strict=True):
        right = parse_number(gold_text(gold))
        if right is None:
            raise ValueError(f"column {column!r}: the gold answer must be a number, got {gold!r}; use another reward")
        text = text_of(completion)
        inside = tagged(text, tag)
        answer = last_number(text) if inside is None else parse_number(inside)
        scores.append(float(answer == right))
    return scores
