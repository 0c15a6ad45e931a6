"""What reward functions of a run have printed, for its console: the first lines once, and how many there are."""

from collections.abc import Iterator
from pathlib import Path

from cluster.reading import BLOCK
from learner.driver.terminal_text import escaped
from rewards.output import NAME

SHOWN, LONGEST = 3, 100  # lines, and characters of each


class RewardOutput:
    """folder: of the run, whose earlier starts may have left lines in the file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / NAME
        self._begin = self._file.stat().st_size if self._file.is_file() else 0
        self._said = False

    def first(self) -> str:
        """What is to be said once they print; '' where that is said, or there is nothing yet."""
        if self._said or not (part := next(self._parts(), b"")):
            return ""
        self._said = True
        shown = [line.decode(errors="replace")[:LONGEST] for line in part.splitlines()[:SHOWN]]
        return f"reward functions print, into {self._file}; its first lines: {escaped(' | '.join(shown))}"

    def total(self) -> str:
        """What is to be said at the end of a run."""
        count = sum(part.count(b"\n") for part in self._parts())
        return f"reward functions printed {count} lines, into {self._file}" if count else ""

    def _parts(self) -> Iterator[bytes]:
        """What they have printed since this start."""
        if not self._file.is_file():
            return
        try:
            with self._file.open("rb") as file:
                file.seek(self._begin)
                yield from iter(lambda: file.read(BLOCK), b"")
        except OSError:  # somebody takes it away: what was printed is no reason to end a run
            return
