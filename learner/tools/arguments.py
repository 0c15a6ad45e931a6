"""Numbers of the command line, each with its range, as texts or as the defaults that stand for them. All raise
ValueError, which Typer shows beside the option's name."""

import math


def natural(text: str | int) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def positive(text: str | int) -> int:
    """A whole number from 1."""
    return _whole(text, 1)


def rate(text: str | float) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"must be a finite number above 0, got {str(text)[:40]!r}")
    return number


def _whole(given: str | int, least: int) -> int:
    text = str(given)
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise ValueError(f"must be a whole number from {least} to 999999999, got {text[:40]!r}")
    return int(text)
