"""metrics.jsonl, read while a run writes it."""

import os
from pathlib import Path

from cluster.reading import json_value, lines, opened

Metrics = dict[str, float | None]  # of one step; None: not finite


class MetricsLines:
    """The lines that a run adds, each once. A resumed run replaces the file, without the steps that it repeats."""

    def __init__(self, path: Path) -> None:
        """Lines that are there already are none of this run's."""
        self._path = path
        self._seen: set[bytes] = set()
        self._inode, self._offset = -1, 0
        self.new()

    def new(self) -> list[Metrics]:
        """What was added since the last call. A line that is still being written is left for the next one."""
        try:
            with opened(self._path) as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        added = [line for line in whole.splitlines() if line not in self._seen]
        self._seen.update(added)
        return [json_value(line, str(self._path)) for line in added]


def rows_of(path: Path) -> list[Metrics]:
    """Every line of the file; none where there is no file."""
    return [json_value(line, str(path)) for _, line in lines(path)] if path.exists() else []
