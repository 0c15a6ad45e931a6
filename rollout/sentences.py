"""Warnings of which each is logged once; metrics count what they are about."""

import logging
from collections.abc import Iterable

MOST = 50  # different ones that are logged


class Sentences:
    """Those that were said to one log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[str] = set()

    def warn(self, sentences: Iterable[str]) -> None:
        """Logs those that are new."""
        for sentence in sentences:
            if sentence not in self._said and len(self._said) < MOST:
                self._said.add(sentence)
                self._log.warning(sentence)
