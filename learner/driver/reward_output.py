"""What reward functions of a run have printed, for its console: the first lines once, and how many there are."""

from collections.abc import Iterator
from pathlib import Path

from cluster.reading import BLOCK
from learner.driver.terminal_text import escaped
from rewards.output import NAME

SHOWN, LONGEST = 3, 100  # lines, and characters of each
MOST = 64 * 2**20  # bytes that the file may have; a function that prints each completion fills a disk in a long run


class RewardOutput:
    """folder: of the run, whose earlier starts may have left lines in the file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / NAME
        self._begin = self._file.stat().st_size if self._file.is_file() else 0
        self._said, self._cut = False, False
        self._left_out = 0  # lines

    def first(self) -> str:
        """What is to be said once they print; '' where that is said, or there is nothing yet."""
        if self._said or not (part := next(self._parts(), b"")):
            return ""
        self._said = True
        shown = [line.decode(errors="replace")[:LONGEST] for line in part.splitlines()[:SHOWN]]
        return f"reward functions print, into {self._file}; its first lines: {escaped(' | '.join(shown))}"

    def bound(self) -> str:
        """Cuts the file off behind its first MOST bytes, as often as it is asked; what is to be said at the first time.
        What functions print in that moment may be neither there nor counted: they write to its end by themselves."""
        try:
            if not self._file.is_file() or self._file.stat().st_size <= MOST:
                return ""
            with self._file.open("r+b") as file:
                file.seek(MOST)
                self._left_out += sum(part.count(b"\n") for part in iter(lambda: file.read(BLOCK), b""))
                file.truncate(MOST)
        except OSError:  # as of _parts
            return ""
        said, self._cut = self._cut, True
        size = f"{MOST // 2**20} MiB"
        return (
            "" if said else f"reward functions have printed {size}, which {self._file} keeps; what follows is left out"
        )

    def total(self) -> str:
        """What is to be said at the end of a run."""
        count = self._left_out + sum(part.count(b"\n") for part in self._parts())
        cut = f", of which {self._left_out} are left out" if self._left_out else ""
        return f"reward functions printed {count} lines, into {self._file}{cut}" if count else ""

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
