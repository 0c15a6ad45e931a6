"""What a completion answers, for the vote of majority@k."""

from decimal import Decimal

from rewards.number import last_number, parse_number
from rewards.text import tagged

TAG = "answer"


def answer_of(text: str) -> str:
    """What stands in the last <answer>...</answer>, else in the last \\boxed{...}, else the last number, else the
    whole text, stripped. Numbers that are equal are one answer."""
    said = tagged(text, TAG)
    said = _boxed(text) if said is None else said
    if said:
        number = parse_number(said)
    else:
        said, number = text.strip(), last_number(text)
    return said if number is None else _shortest(number)


def _shortest(number: Decimal) -> str:
    """Digits without zeros at the end, and 0 without a sign: one text for all that are equal. Of Decimal's own,
    normalize rounds to 28 digits."""
    text = f"{number:f}"  # no longer than what was said, or a thousand digits of an exponent
    return (text.rstrip("0").rstrip(".") if "." in text else text) if number else "0"


def _boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, whose braces match."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place].strip()
    return None
