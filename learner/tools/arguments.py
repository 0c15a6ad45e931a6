"""Types of command-line arguments that argparse lacks."""

import argparse
import math


def natural(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1)


def rate(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text[:40]!r}")
    return number


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to 999999999, got {text[:40]!r}")
    return int(text)
