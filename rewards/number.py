"""Is the answer the right number, exactly?"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from rewards.text import check_tag, column_of, gold_text, tagged, text_of

# Digits, or digits grouped by threes with commas; then perhaps decimals. ASCII only: \d would take other scripts.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_WHOLE = re.compile(rf"(?P<sign>[-+]?)\s*\$?\s*(?P<sign2>-?)(?P<digits>{_DIGITS})\s*%?\s*\.?")
# In running text a minus after a word, a digit or a bracket is a subtraction, not a sign.
_INSIDE = re.compile(rf"(?P<sign>(?<![\w.)])[-+]?)\$?(?P<sign2>-?)(?<![\w.])(?P<digits>{_DIGITS})")


def parse_number(text: str) -> Decimal | None:
    """The number that `text` as a whole is, or None. `1,234.50`, `$5`, `-$5`, `50%` and `12.` are numbers.

    The signs $ and % are dropped, not converted: `50%` is 50.
    """
    match = _WHOLE.fullmatch(text.strip().replace("\u2212", "-"))
    return _value(match) if match else None


def last_number(text: str) -> Decimal | None:
    """The last number in running text, or None."""
    found = list(_INSIDE.finditer(text.replace("\u2212", "-")))
    return _value(found[-1]) if found else None


def _value(match: re.Match[str]) -> Decimal | None:
    if match["sign"] and match["sign2"]:
        return None
    # Decimal, not float: 0.1 + 0.2 must not count as 0.3 by luck, and long digits must not be rounded to equality.
    return Decimal((match["sign"] or match["sign2"]) + match["digits"].replace(",", ""))


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
