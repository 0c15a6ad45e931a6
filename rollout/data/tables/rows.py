"""Where the rows of a source lie once it is read: a million of them take no more memory than some thousands, and each
is read by its position."""

import marshal
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, overload

Row = dict[str, Any]

MEMORY = 2**25  # bytes; more lies in a file without a name in the folder for temporary files
BLOCK = 64  # rows that are written and read together
MAX_DEPTH = 64  # of a row's lists and mappings: what a reward process and Arrow take


class ProblemsError(ValueError):
    """Problems that cannot be trained on; one line that says which, why, and what to do."""


class _ByPosition(Sequence[Row], ABC):
    """Rows of which `_at` gives one."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        places = range(len(self))[index]
        return self._at(places) if isinstance(places, int) else list(map(self._at, places))

    @abstractmethod
    def _at(self, place: int) -> Row:
        """The row at a place from 0 to len - 1."""


class Packed(_ByPosition):
    """Rows of JSON's types. A row that lacks columns which others have holds None there.

    What becomes of the file that they were read from does not matter: this is a copy.
    """

    def __init__(self) -> None:
        self._blocks = tempfile.SpooledTemporaryFile(max_size=MEMORY)  # noqa: SIM115, it lives as long as the rows
        self._ends = array("q", [0])  # bytes up to which each block goes, behind the begin of the first
        self._last: list[Row] = []  # of a block that is not full yet
        self._columns: dict[str, None] = {}
        self._values: dict[str, Callable[[Any], Any]] = {}

    def add(self, row: Row) -> None:
        """One more row, which must not be changed afterwards. Raises ProblemsError if there is no room for it."""
        if row.keys() != self._columns.keys():
            self._columns |= dict.fromkeys(row)
        self._last.append(row)
        if len(self._last) == BLOCK:
            self._write()

    def _write(self) -> None:
        block = marshal.dumps(self._last)
        try:
            self._blocks.write(block)
        except OSError as error:
            raise ProblemsError(
                f"data: what was read must fit into the folder for temporary files, {tempfile.gettempdir()} "
                f"({error.strerror}); free some of its disk, or name another folder by TMPDIR"
            ) from error
        self._ends.append(self._ends[-1] + len(block))
        self._last = []

    def meaning(self, values: Mapping[str, Callable[[Any], Any]]) -> "Packed":
        """The same rows, whose values of these columns are what the functions make of them."""
        self._values = dict(values)
        return self

    def part(self, start: int, stop: int) -> "Packed":
        """The rows from one position up to another, with the columns that these have."""
        found = Packed().meaning(self._values)
        for row in islice(self._raw(), start, stop):
            found.add(row)
        return found

    def __len__(self) -> int:
        return (len(self._ends) - 1) * BLOCK + len(self._last)

    def _at(self, place: int) -> Row:
        block, within = divmod(place, BLOCK)
        return self._whole(self._block(block)[within])

    def __iter__(self) -> Iterator[Row]:
        return map(self._whole, self._raw())

    def _raw(self) -> Iterator[Row]:
        """Rows as they were added."""
        return chain.from_iterable(map(self._block, range(len(self._ends))))

    def _block(self, number: int) -> list[Row]:
        if number == len(self._ends) - 1:
            return [dict(row) for row in self._last]
        self._blocks.seek(self._ends[number])
        block: list[Row] = marshal.loads(self._blocks.read(self._ends[number + 1] - self._ends[number]))
        return block

    def _whole(self, row: Row) -> Row:
        for name, value_of in self._values.items():
            if row.get(name) is not None:
                row[name] = value_of(row[name])
        return row if len(row) == len(self._columns) else {name: row.get(name) for name in self._columns}


class Table(_ByPosition):
    """The first rows, or all, of a data set of Hugging Face's library, which maps its files into memory."""

    def __init__(self, found: Any, size: int | None) -> None:
        self._found, self._places = found, range(len(found))[:size]

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, place: int) -> Row:
        return dict(self._found[self._places[place]])

    def __iter__(self) -> Iterator[Row]:
        return (dict(row) for row in self._found.select(self._places))


def checked(value: Any, where: str) -> Row:
    """A row, if Arrow, a reward process and a tokenizer can take it. Raises ProblemsError, which says `where` it is."""
    if not isinstance(value, dict):
        raise ProblemsError(f"{where} must be a mapping of columns, got {type(value).__name__}; correct it")
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ProblemsError(f"{where} is nested more than {MAX_DEPTH} deep; take levels out")
        if isinstance(part, dict):
            waiting += [(item, depth + 1) for pair in part.items() for item in pair]
        elif isinstance(part, list):
            waiting += [(item, depth + 1) for item in part]
        elif isinstance(part, str) and not part.isascii():
            try:
                part.encode()
            except UnicodeEncodeError:
                raise ProblemsError(f"{where} holds half a surrogate pair, which is no text; correct it") from None
    return value
