"""Warnings of which each is logged once; metrics count what they are about."""

import logging
from collections.abc import Iterable, Mapping

MOST = 50  # different ones that are logged


class Sentences:
    """Those that were said to one log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[str] = set()

    def warn(self, sentences: Iterable[str]) -> None:
        """Logs those that are new."""
        self.warn_of({sentence: sentence for sentence in sentences})

    def warn_of(self, sentences: Mapping[str, str]) -> None:
        """Logs those that are about something new; the keys say about what."""
        for about, sentence in sentences.items():
            if about not in self._said and len(self._said) < MOST:
                self._said.add(about)
                self._log.warning(sentence)
