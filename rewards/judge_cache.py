"""What a judge has said, on disk: an answer that was paid for once is not asked for again, by a resumed run neither."""

import contextlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.files import writing
from cluster.reading import Unreadable, json_value, lines

log = logging.getLogger("rewards")


class JudgeCache:
    """Request -> what the judge said to it. One file for each process that writes, since several generators may share
    the folder; those of earlier ones are read at the start."""

    def __init__(self, folder: Path | None) -> None:
        """folder: null: nothing is kept beyond this process."""
        self._said: dict[str, str] = {}
        self._file: Path | None = None
        if folder is None:
            return
        for file in sorted(folder.glob("*.jsonl")):
            self._said |= _read(file)
        self._file = folder / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"

    def get(self, key: str) -> str | None:
        """What was said to this request; None if it was not asked."""
        return self._said.get(key)

    def put(self, key: str, said: str, about: Mapping[str, Any]) -> None:
        """Keeps an answer. `about`: what a reader of the file wants to see beside it."""
        self._said[key] = said
        if self._file is not None:
            with writing(self._file):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8", errors="backslashreplace") as written:
                    written.write(json.dumps({"key": key, "said": said, **about}) + "\n")


def _read(file: Path) -> dict[str, str]:
    """The answers in a file, but for lines that are none, as a killed process leaves its last one unfinished; none of
    what is no file of them."""
    found = {}
    try:
        for _, line in lines(file):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json_value(line, "line")
                found[str(row["key"])] = str(row["said"])
    except (OSError, Unreadable) as error:
        log.warning("answers of judges in %s are asked for again: %s", file, error)
    return found
