"""Reads rows of JSON and CSV exactly as they are written, and keeps them on disk, so that a million rows take no more
memory than some thousands (Packed). Each row is read by its position."""

import bz2
import csv
import gzip
import io
import json
import lzma
import marshal
import re
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from math import isfinite
from pathlib import Path
from typing import IO, Any, NamedTuple, overload

from cluster.errors import WrongInput

Row = dict[str, Any]

MEMORY = 2**25  # bytes of rows in memory; more rows lie in an unnamed file in the folder for temporary files
BLOCK = 64  # rows that are written and read together
MAX_DEPTH = 64  # deepest nesting of a row's lists and mappings that a reward process and Arrow accept


class _ByPosition(Sequence[Row], ABC):
    """A sequence of rows; a subclass implements `_at`, which returns one."""

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
    """Rows with values of JSON's types, as a copy that does not need the source any more. A row has None in columns
    that only other rows have."""

    def __init__(self) -> None:
        self._blocks = tempfile.SpooledTemporaryFile(max_size=MEMORY)  # noqa: SIM115, it lives as long as the rows
        self._ends = array("q", [0])  # 0, and the byte at which each block ends
        self._last: list[Row] = []  # rows of the block that is not full yet
        self._columns: dict[str, None] = {}
        self._values: dict[str, Callable[[Any], Any]] = {}

    def add(self, row: Row) -> None:
        """Adds a row, which must not be changed afterwards. Raises WrongInput if the disk has no room for it."""
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
            raise WrongInput(
                f"data: what was read must fit into the folder for temporary files, {tempfile.gettempdir()} "
                f"({error.strerror}); free some of its disk, or name another folder by TMPDIR"
            ) from error
        self._ends.append(self._ends[-1] + len(block))
        self._last = []

    def meaning(self, values: Mapping[str, Callable[[Any], Any]]) -> "Packed":
        """Has the values of these columns converted by the functions when rows are read. Returns itself."""
        self._values = dict(values)
        return self

    def part(self, start: int, stop: int) -> "Packed":
        """A copy of the rows from position `start` up to `stop`, with the columns that these rows have."""
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
        """The rows as they were added."""
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
    """The first `size` rows, or all, of a data set of Hugging Face's datasets, which maps its files into memory."""

    def __init__(self, found: Any, size: int | None) -> None:
        self._found, self._places = found, range(len(found))[:size]

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, place: int) -> Row:
        return dict(self._found[self._places[place]])

    def __iter__(self) -> Iterator[Row]:
        return (dict(row) for row in self._found.select(self._places))


def checked(value: Any, where: str) -> Row:
    """Returns a row that Arrow, reward processes and tokenizers can take, else raises WrongInput. where: its place."""
    if not isinstance(value, dict):
        raise WrongInput(f"{where} must be a mapping of columns, got {type(value).__name__}; correct it")
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise WrongInput(f"{where} is nested more than {MAX_DEPTH} deep; take levels out")
        if isinstance(part, dict):
            waiting += [(item, depth + 1) for pair in part.items() for item in pair]
        elif isinstance(part, list):
            waiting += [(item, depth + 1) for item in part]
        elif isinstance(part, str) and not part.isascii():
            try:
                part.encode()
            except UnicodeEncodeError:
                raise WrongInput(f"{where} holds half a surrogate pair, which is no text; correct it") from None
    return value


# JSON, line by line or in one array. Whole numbers of any size stay exact, and errors name the line.

PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
BOM = b"\xef\xbb\xbf"  # byte order mark, which some editors put before UTF-8
SPACE = re.compile(r"[ \t\n\r]*")  # JSON's white space

_DECODE = json.JSONDecoder().raw_decode


def opened(file: Path, packing: str) -> Any:
    """A stream of a file's unpacked bytes. packing: a key of PACKED, or "" for a plain file."""
    opener: Callable[..., Any] = PACKED.get(packing, open)
    return opener(file, "rb")


def json_rows(file: Path, packing: str, named: str, *, lines: bool, field: str | None = None) -> Iterator[Row]:
    """The rows of a JSON file. One object over several lines, whose values are lists of one length, holds columns.

    Args:
        named: the configuration key and the file, for error messages.
        lines: whether each line is certainly an object; if not, the file may be an array.
        field: key of the rows, if the file is one object that holds them.

    Raises WrongInput if the file cannot be read.
    """
    number = 1
    try:
        with opened(file, packing) as stream:
            if field is not None or (not lines and _begins_array(stream)):
                whole = stream.read().removeprefix(BOM).decode("utf-8")
                yield from _entries(whole, named) if field is None else _in_field(whole, field, named)
                return
            for number, line in enumerate(stream, start=1):
                if text := line.strip().removeprefix(BOM).lstrip():
                    if number == 1 and not lines and (columns := _columns(text, stream)) is not None:
                        yield from _listed(columns, named)
                        return
                    yield _row(text, named, number)
    except UnicodeDecodeError as error:
        wrong = f"0x{error.object[error.start]:02x}"
        raise WrongInput(f"{named} line {number} must be UTF-8, got the byte {wrong}; save it as UTF-8") from None
    except RecursionError:
        raise WrongInput(f"{named} line {number} is nested too deep; take levels out") from None
    except (ValueError, EOFError, OSError) as error:  # OSError: the file is not packed as its name says
        if isinstance(error, WrongInput):
            raise
        plain = f"{error.msg} character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        said = " ".join(plain.split())[:200]
        raise WrongInput(f"{named} line {number} cannot be read: {said}; correct it") from None


def _begins_array(stream: Any) -> bool:
    return bool(stream.peek(16).removeprefix(BOM).lstrip()[:1] == b"[")


def _row(text: bytes, named: str, number: int) -> Row:
    decoded = text.decode()
    row, end = _DECODE(decoded)
    if end != len(decoded):
        row = json.loads(decoded)  # raises an error that says that the line goes on
    # A text without escapes holds no half of a surrogate pair, and few brackets cannot be nested deep.
    if type(row) is dict and b"\\u" not in text and text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
        return row
    return checked(row, f"{named} line {number}")


def _entries(whole: str, named: str) -> Iterator[Row]:
    """The rows of an array, decoded one by one, since all together would take ten times the memory of their text."""
    at, entry = SPACE.match(whole, whole.index("[") + 1).end(), 0  # type: ignore[union-attr]
    if whole[at : at + 1] != "]":
        while True:
            entry += 1
            try:
                value, end = _DECODE(whole, at)
            except json.JSONDecodeError:
                json.loads(whole)  # raises an error that names the place
                raise
            yield checked(value, f"{named} entry {entry}")
            at = SPACE.match(whole, end).end()  # type: ignore[union-attr]
            if whole[at : at + 1] != ",":
                break
            at = SPACE.match(whole, at + 1).end()  # type: ignore[union-attr]
    if SPACE.fullmatch(whole, at + 1) is None or whole[at : at + 1] != "]":
        json.loads(whole)  # raises an error that names the place


def _in_field(whole: str, field: str, named: str) -> Iterator[Row]:
    content = json.loads(whole)
    if not isinstance(content, dict) or field not in content:
        there = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise WrongInput(f"{named} must hold {field!r} (data.args: field), got {there[:200]}; correct data.args")
    found = content[field]
    return _listed(found, named)


def _columns(first: bytes, stream: IO[bytes]) -> dict[str, list[Any]] | None:
    """The columns of a file that is one object over several lines with lists of one length; None for other files."""
    try:
        json.loads(first.decode())
        return None
    except (ValueError, RecursionError):
        place = stream.tell()
    try:
        found = json.loads(first.decode() + "\n" + stream.read().decode())
    except (ValueError, RecursionError):
        found = None
    stream.seek(place)
    if not isinstance(found, dict) or not found or not all(isinstance(one, list) for one in found.values()):
        return None
    return found if len({len(one) for one in found.values()}) == 1 else None


def _listed(found: Any, named: str) -> Iterator[Row]:
    """The rows of a list, or of an object of columns."""
    if isinstance(found, dict) and found and all(isinstance(one, list) for one in found.values()):
        found = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    if not isinstance(found, list):
        raise WrongInput(f"{named} must hold a list of rows, got {type(found).__name__}; correct it, or data.args")
    for entry, value in enumerate(found, start=1):
        yield checked(value, f"{named} entry {entry}")


# CSV. Cells stay as they are written, and a row that does not fit the header is an error.

WHOLE = re.compile(r"0|-?[1-9][0-9]{0,999}", re.ASCII)  # a whole number as Python writes it
AT_ONCE = 20_000  # rows that pandas reads at once
COMPRESSIONS = {"": None, ".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}  # packing -> pandas' name
PLAIN = {str, int, float, bool, type(None)}
MARKS = (";", "\t", "|", ",")  # separators in files that are called CSV or TSV
TRUTH = {"True": True, "False": False}
# Arguments of pandas.read_csv: those that say how lines are divided, in which the standard library's csv agrees; those
# that say where rows begin and end; and those about cells. With any other argument only pandas divides the lines.
DIVIDES = ("sep", "delimiter", "quotechar", "quoting", "escapechar", "doublequote", "skipinitialspace")
BEGINS = ("header", "names", "column_names", "skiprows", "nrows", "encoding", "encoding_errors")
OF_CELLS = (
    "usecols", "dtype", "na_values", "keep_default_na", "na_filter", "true_values", "false_values", "thousands",
    "decimal", "converters", "parse_dates", "date_format", "dayfirst", "low_memory", "float_precision", "memory_map",
    "dtype_backend",
)  # fmt: skip


class CsvFile(NamedTuple):
    """A CSV file. packing: a key of PACKED, or "". named: the configuration key and the file, for error messages. tabs:
    whether the name says that tabs separate the fields."""

    file: Path
    packing: str
    named: str
    tabs: bool = False

    def separated(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of pandas.read_csv for this file."""
        return {"sep": "\t", **args} if self.tabs and not {"sep", "delimiter"} & args.keys() else args


def csv_rows(files: Sequence[CsvFile], args: Mapping[str, Any]) -> Packed | list[Row]:
    """All rows of files that have the same header. args: arguments of pandas.read_csv.

    pandas' own conversions would change gold answers: 00712 to 712, 2 to 2.0 in a column with an empty cell, NA to a
    missing value. So a column becomes numbers or truth values only if Python writes each value as its cell does, or if
    `args` ask for a type.

    Raises WrongInput if a row has more or fewer fields than the header or two columns the same name; pandas' errors.
    """
    if args.get("index_col") is not None and args["index_col"] is not False:
        raise WrongInput(
            f"data.args: index_col is not taken, since rows have no index, got {args['index_col']!r}; leave it out: a "
            "column that nothing names does no harm"
        )
    asked = args.get("dtype", {})
    kinds, found, header = _Kinds(), Packed(), None
    for one in files:
        own = one.separated(args)
        if _is_plain(own):
            _check_fields(one, own, chosen=bool({"sep", "delimiter"} & args.keys()))
        else:
            _check_by_pandas(one, own)
        for table in _tables(one, own):
            if header is None:
                header = list(table.columns)
            elif set(table.columns) != set(header):
                raise WrongInput(
                    f"{one.named} has the columns {', '.join(map(str, table.columns))}, and another file "
                    f"{', '.join(map(str, header))}; name files of one kind (data.args: data_files)"
                )
            if not _add(found, table, asked, kinds):
                return _as_they_are(files, args)
    return found.meaning(kinds.values())


def _tables(one: CsvFile, args: Mapping[str, Any]) -> Iterator[Any]:
    """pandas' tables of the file, some rows in each. args: the arguments for this file."""
    import pandas

    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""], "compression": COMPRESSIONS[one.packing]}
    options |= args
    asked = options.setdefault("dtype", {})
    if isinstance(asked, Mapping):
        options["dtype"] = defaultdict(lambda: str, asked)
    if "column_names" in options:
        options["names"] = options.pop("column_names")
    if "names" not in options:
        options["index_col"] = False  # so that pandas makes no index if all rows are longer than the header
    options["chunksize"] = AT_ONCE if isinstance(asked, Mapping | str) else None  # None: pandas must see all cells

    def without_losses(read: Callable[[], Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # pandas warns of fields that it leaves out
            return read()

    found = without_losses(lambda: pandas.read_csv(one.file, **options))
    if options["chunksize"] is None:
        yield found
        return
    with found:
        while (table := without_losses(lambda: next(found, None))) is not None:
            yield table


class _Kinds:
    """Finds for each column whether all of its cells are numbers, or truth values, or neither."""

    def __init__(self) -> None:
        self._left: dict[str, list[Callable[[str], Any]]] = {}

    def see(self, name: str, cells: Sequence[Any]) -> None:
        left = self._left.setdefault(name, [number_in, TRUTH.get])
        filled = {cell for cell in cells if cell is not None} if left else ()
        self._left[name] = [
            value_of
            for value_of in left
            if all(isinstance(cell, str) and value_of(cell.strip()) is not None for cell in filled)
        ]

    def values(self) -> dict[str, Callable[[str], Any]]:
        """The functions that convert the cells of each column, for Packed.meaning."""
        return {name: _stripped(left[0]) for name, left in self._left.items() if left}


def _stripped(value_of: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda cell: value_of(cell.strip())


def _add(found: Packed, table: Any, asked: Any, kinds: _Kinds) -> bool:
    """Adds the rows of a table; False, and adds none, if it has values such as dates, which `args` can ask for."""
    columns = _texts_by_column(table)
    if not all({*map(type, cells)} <= PLAIN for cells in columns.values()):
        return False
    for name, cells in columns.items():
        if isinstance(asked, Mapping) and name not in asked:
            kinds.see(name, cells)
    for values in zip(*columns.values(), strict=True):
        found.add(dict(zip(columns, values, strict=True)))
    return True


def _texts_by_column(table: Any) -> dict[str, list[Any]]:
    columns = {}
    for name in table.columns:
        column = table[name].astype(object)
        columns[str(name)] = column.where(column.notna(), None).tolist()
    return columns


def _as_they_are(files: Sequence[CsvFile], args: Mapping[str, Any]) -> list[Row]:
    """All rows in memory, if they have values of other types than JSON's."""
    kinds, rows, asked = _Kinds(), list[Row](), args.get("dtype", {})
    for table in (table for one in files for table in _tables(one, one.separated(args))):
        columns = _texts_by_column(table)
        for name, cells in columns.items():
            if isinstance(asked, Mapping) and name not in asked and all(isinstance(c, str | None) for c in cells):
                kinds.see(name, cells)
        rows += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for name, value_of in kinds.values().items():
        for row in rows:
            row[name] = None if row[name] is None else value_of(row[name])
    return rows


def number_in(text: str) -> int | float | None:
    """The number that a text is; None if Python would write the number otherwise (007, 1.50, +5), or for nan."""
    if WHOLE.fullmatch(text):
        return int(text)
    try:
        found = float(text)
    except ValueError:
        return None
    return found if repr(found) == text and isfinite(found) else None


def _is_plain(args: Mapping[str, Any]) -> bool:
    """Whether the standard library's csv divides the lines as pandas does with these arguments."""
    between = args.get("delimiter") or args.get("sep", ",")
    plain = args.keys() <= {*DIVIDES, *BEGINS, *OF_CELLS} and isinstance(between, str) and len(between) == 1
    starts = all(isinstance(args.get(name, 0), int) for name in ("skiprows", "nrows"))
    return plain and starts and isinstance(args.get("header", 0), int | None)


def _check_fields(one: CsvFile, args: Mapping[str, Any], *, chosen: bool) -> None:
    """Raises WrongInput if a row has more or fewer fields than the first, or if the header has a name twice or seems to
    be divided by another separator. chosen: whether the user has set the separator."""
    names = args.get("names") or args.get("column_names")
    skipped, last = args.get("skiprows", 0), args.get("nrows", sys.maxsize)
    begin = -1 if names and "header" not in args else args.get("header", 0)  # index of the header among the records
    encoding = str(args.get("encoding") or "utf-8").replace("_", "-").lower()
    wanted, header = len(names) if names else None, -1 if begin is None else begin
    with (
        _any_size(),
        opened(one.file, one.packing) as stream,
        io.TextIOWrapper(
            stream,
            encoding="utf-8-sig" if encoding in ("utf-8", "utf8") else encoding,
            errors=args.get("encoding_errors") or "strict",
            newline="",
        ) as text,
    ):
        reader = csv.reader(_after(text, skipped), **_dialect(args), strict=True)
        before, place = skipped, 0
        try:
            for record in reader:
                line, before = before + 1, skipped + reader.line_num
                if not record or (len(record) == 1 and record[0].isspace()):
                    continue
                if place == header and not names:
                    _check_names(record, f"{one.named} line {line}")
                    if not chosen:
                        _check_divided(record, f"{one.named} line {line}", "\t" if one.tabs else ",")
                if place >= header and wanted is None:
                    wanted = len(record)
                if place > last + max(header, 0):
                    return
                if place > header and wanted is not None and len(record) != wanted:
                    raise WrongInput(
                        f"{one.named} line {line} must have {wanted} fields as "
                        f"{'its header' if header >= 0 else 'the others'}, got {len(record)}: {_shown(record)}; put a "
                        "field that holds the separator between quotes, or correct the line"
                    )
                place += 1
        except UnicodeDecodeError as error:
            wrong = f"0x{error.object[error.start]:02x}"
            raise WrongInput(
                f"{one.named} line {_line_of(one, encoding)} must be {encoding.upper()}, got the byte {wrong}; save it "
                'as UTF-8, or say what it is (data.args: {encoding: "..."})'
            ) from None
        except csv.Error as error:
            raise WrongInput(
                f"{one.named} line {before + 1} cannot be read: {error}; correct it: a quote within quotes is written "
                "twice, or say that quotes are plain characters (data.args: {quoting: 3})"
            ) from None


def _check_by_pandas(one: CsvFile, args: Mapping[str, Any]) -> None:
    """Raises WrongInput if a row has fewer fields than the header, in a file whose lines only pandas can divide. Only
    pandas' parser in Python distinguishes a missing field from an empty one."""
    import pandas

    divided = {name: value for name, value in args.items() if name not in OF_CELLS}
    if "column_names" in divided:
        divided["names"] = divided.pop("column_names")
    cells = {"dtype": str, "keep_default_na": False, "na_values": [], "index_col": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pandas.errors.ParserWarning)  # longer rows raise an error when they are read
        table = pandas.read_csv(
            one.file, **divided | cells | {"engine": "python", "compression": COMPRESSIONS[one.packing]}
        )
    short = table.isna().any(axis=1)
    if short.any():
        row = int(short.to_numpy().argmax())
        fields = [str(cell) for cell in table.iloc[row] if isinstance(cell, str)]
        raise WrongInput(
            f"{one.named} row {row + 1} must have {table.shape[1]} fields as its header, got {len(fields)}: "
            f"{_shown(fields)}; correct the row"
        )


def _line_of(one: CsvFile, encoding: str) -> int:
    """The number of the first line that is not in this encoding; the decoder, which reads blocks, does not tell it."""
    with opened(one.file, one.packing) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode(encoding)
            except UnicodeDecodeError:
                return number
    return 0


def _after(text: io.TextIOWrapper, skipped: int) -> io.TextIOWrapper:
    for _ in range(skipped):
        text.readline()
    return text


def _dialect(args: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: args[name] for name in DIVIDES[2:] if args.get(name) is not None}
    return {"delimiter": args.get("delimiter") or args.get("sep", ","), **found}


def _check_names(header: Sequence[str], where: str) -> None:
    twice = [name for name, count in Counter(header).items() if count > 1 and name.strip()]
    if twice:
        raise WrongInput(
            f"{where} must name each column once, got {twice[0]!r} twice: which of them is meant is not known; rename "
            "one"
        )


def _check_divided(header: Sequence[str], where: str, by: str) -> None:
    found = [mark for mark in MARKS if len(header) == 1 and mark != by and mark in header[0].strip()]
    if found:
        other, own = (mark.replace("\t", "\\t") for mark in (found[0], by))
        raise WrongInput(
            f"{where} must name columns divided by '{own}', and {header[0]!r:.80} seems to be by '{other}'; set "
            f'data.args={{sep: "{other}"}}, or data.args={{sep: "{own}"}} if it is the name of one column'
        )


def _shown(record: Sequence[str]) -> str:
    text = " | ".join(record)
    return repr(text if len(text) <= 80 else text[:77] + "...")


@contextmanager
def _any_size() -> Iterator[None]:
    """A context in which a field may have any number of characters; csv has one limit for the whole process."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)
