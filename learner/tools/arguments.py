"""Types of command-line arguments that argparse lacks."""

import argparse


def natural(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to 999999999, got {text[:40]!r}")
    return int(text)
