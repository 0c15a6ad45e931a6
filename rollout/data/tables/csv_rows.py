"""Rows of CSV: cells as they are written, and no row that does not fit the header."""

import csv
import io
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from rollout.data.tables.json_rows import opened
from rollout.data.tables.rows import Packed, ProblemsError, Row

WHOLE = re.compile(r"0|-?[1-9][0-9]{0,999}", re.ASCII)  # a number that is written in no other way
AT_ONCE = 20_000  # rows that pandas reads at once
COMPRESSIONS = {"": None, ".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}  # by pandas' names
PLAIN = {str, int, float, bool, type(None)}
MARKS = (";", "\t", "|", ",")  # between fields, in files that are called CSV or TSV
TRUTH = {"True": True, "False": False}
# Arguments of pandas.read_csv that say how a line is divided, which csv of the standard library understands alike; and
# those that say nothing of it. With any other one only pandas looks at the lines.
DIVIDES = ("sep", "delimiter", "quotechar", "quoting", "escapechar", "doublequote", "skipinitialspace")
BEGINS = ("header", "names", "column_names", "skiprows", "nrows", "encoding", "encoding_errors")
OF_CELLS = (
    "usecols", "dtype", "na_values", "keep_default_na", "na_filter", "true_values", "false_values", "thousands",
    "decimal", "converters", "parse_dates", "date_format", "dayfirst", "low_memory", "float_precision", "memory_map",
    "dtype_backend",
)  # fmt: skip


class CsvFile(NamedTuple):
    """A file to be read. packing: of json_rows.PACKED, or nothing. named: the key of the configuration and the file,
    for messages. tabs: whether its name says that they stand between fields."""

    file: Path
    packing: str
    named: str
    tabs: bool = False

    def separated(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments for this file."""
        return {"sep": "\t", **args} if self.tabs and not {"sep", "delimiter"} & args.keys() else args


def csv_rows(files: Sequence[CsvFile], args: Mapping[str, Any]) -> Packed | list[Row]:
    """All rows of files that have one header. What pandas takes for a number or for nothing by itself would be other
    gold answers: 712 for 00712, 2.0 for 2 in a column with an empty cell, nothing for NA. So a column is numbers, or
    truth values, where Python writes each of them as its cell has it, and where `args` ask for a type.

    args: of pandas.read_csv.

    Raises ProblemsError: a row has more or fewer fields than the header, or two columns have one name; and what pandas
    raises.
    """
    if args.get("index_col") is not None and args["index_col"] is not False:
        raise ProblemsError(
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
                raise ProblemsError(
                    f"{one.named} has the columns {', '.join(map(str, table.columns))}, and another file "
                    f"{', '.join(map(str, header))}; name files of one kind (data.args: data_files)"
                )
            if not _add(found, table, asked, kinds):
                return _as_they_are(files, args)
    return found.meaning(kinds.values())


def _tables(one: CsvFile, args: Mapping[str, Any]) -> Iterator[Any]:
    """Of pandas, some rows each. args: for this file."""
    import pandas

    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""], "compression": COMPRESSIONS[one.packing]}
    options |= args
    asked = options.setdefault("dtype", {})
    if isinstance(asked, Mapping):
        options["dtype"] = defaultdict(lambda: str, asked)
    if "column_names" in options:
        options["names"] = options.pop("column_names")
    if "names" not in options:
        options["index_col"] = False  # else the first column of rows that are all longer than the header is an index
    options["chunksize"] = AT_ONCE if isinstance(asked, Mapping | str) else None  # None: other cells have a say

    def without_losses(read: Callable[[], Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # of fields that are left out
            return read()

    found = without_losses(lambda: pandas.read_csv(one.file, **options))
    if options["chunksize"] is None:
        yield found
        return
    with found:
        while (table := without_losses(lambda: next(found, None))) is not None:
            yield table


class _Kinds:
    """What the cells of each column may be: all that were seen are numbers, or truth values, or neither."""

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
        """For Packed.meaning."""
        return {name: _stripped(left[0]) for name, left in self._left.items() if left}


def _stripped(value_of: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda cell: value_of(cell.strip())


def _add(found: Packed, table: Any, asked: Any, kinds: _Kinds) -> bool:
    """Whether all rows of a table could be added, which hold no dates or others of the types that may be asked for."""
    columns = _columns(table)
    if not all({*map(type, cells)} <= PLAIN for cells in columns.values()):
        return False
    for name, cells in columns.items():
        if isinstance(asked, Mapping) and name not in asked:
            kinds.see(name, cells)
    for values in zip(*columns.values(), strict=True):
        found.add(dict(zip(columns, values, strict=True)))
    return True


def _columns(table: Any) -> dict[str, list[Any]]:
    columns = {}
    for name in table.columns:
        column = table[name].astype(object)
        columns[str(name)] = column.where(column.notna(), None).tolist()
    return columns


def _as_they_are(files: Sequence[CsvFile], args: Mapping[str, Any]) -> list[Row]:
    """Rows of other types, in memory."""
    kinds, rows, asked = _Kinds(), list[Row](), args.get("dtype", {})
    for table in (table for one in files for table in _tables(one, one.separated(args))):
        columns = _columns(table)
        for name, cells in columns.items():
            if isinstance(asked, Mapping) and name not in asked and all(isinstance(c, str | None) for c in cells):
                kinds.see(name, cells)
        rows += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for name, value_of in kinds.values().items():
        for row in rows:
            row[name] = None if row[name] is None else value_of(row[name])
    return rows


def number_in(text: str) -> int | float | None:
    """None for what is written as Python would not write it: 007, 1.50, +5, nan."""
    if WHOLE.fullmatch(text):
        return int(text)
    try:
        found = float(text)
    except ValueError:
        return None
    return found if repr(found) == text and isfinite(found) else None


def _is_plain(args: Mapping[str, Any]) -> bool:
    """Whether csv of the standard library divides the lines as pandas does."""
    between = args.get("delimiter") or args.get("sep", ",")
    plain = args.keys() <= {*DIVIDES, *BEGINS, *OF_CELLS} and isinstance(between, str) and len(between) == 1
    starts = all(isinstance(args.get(name, 0), int) for name in ("skiprows", "nrows"))
    return plain and starts and isinstance(args.get("header", 0), int | None)


def _check_fields(one: CsvFile, args: Mapping[str, Any], *, chosen: bool) -> None:
    """Raises ProblemsError: a row has more or fewer fields than the first, or a file of its own names has two of one
    name, or but one that is divided by another separator. chosen: the user says by which fields are divided."""
    names = args.get("names") or args.get("column_names")
    skipped, last = args.get("skiprows", 0), args.get("nrows", sys.maxsize)
    begin = -1 if names and "header" not in args else args.get("header", 0)  # place of the header among the records
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
                    raise ProblemsError(
                        f"{one.named} line {line} must have {wanted} fields as "
                        f"{'its header' if header >= 0 else 'the others'}, got {len(record)}: {_shown(record)}; put a "
                        "field that holds the separator between quotes, or correct the line"
                    )
                place += 1
        except UnicodeDecodeError as error:
            wrong = f"0x{error.object[error.start]:02x}"
            raise ProblemsError(
                f"{one.named} line {_line_of(one, encoding)} must be {encoding.upper()}, got the byte {wrong}; save it "
                'as UTF-8, or say what it is (data.args: {encoding: "..."})'
            ) from None
        except csv.Error as error:
            raise ProblemsError(
                f"{one.named} line {before + 1} cannot be read: {error}; correct it: a quote within quotes is written "
                "twice, or say that quotes are plain characters (data.args: {quoting: 3})"
            ) from None


def _check_by_pandas(one: CsvFile, args: Mapping[str, Any]) -> None:
    """Raises ProblemsError: a row has fewer fields than the header, of lines that only pandas can divide. Its parser in
    Python alone tells a field that is not there from an empty one."""
    import pandas

    divided = {name: value for name, value in args.items() if name not in OF_CELLS}
    if "column_names" in divided:
        divided["names"] = divided.pop("column_names")
    cells = {"dtype": str, "keep_default_na": False, "na_values": [], "index_col": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pandas.errors.ParserWarning)  # of longer rows, which is raised as rows are read
        table = pandas.read_csv(
            one.file, **divided | cells | {"engine": "python", "compression": COMPRESSIONS[one.packing]}
        )
    short = table.isna().any(axis=1)
    if short.any():
        row = int(short.to_numpy().argmax())
        fields = [str(cell) for cell in table.iloc[row] if isinstance(cell, str)]
        raise ProblemsError(
            f"{one.named} row {row + 1} must have {table.shape[1]} fields as its header, got {len(fields)}: "
            f"{_shown(fields)}; correct the row"
        )


def _line_of(one: CsvFile, encoding: str) -> int:
    """The first line that is not of this encoding: text is decoded by more than a line."""
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
        raise ProblemsError(
            f"{where} must name each column once, got {twice[0]!r} twice: which of them is meant is not known; rename "
            "one"
        )


def _check_divided(header: Sequence[str], where: str, by: str) -> None:
    found = [mark for mark in MARKS if len(header) == 1 and mark != by and mark in header[0].strip()]
    if found:
        other, own = (mark.replace("\t", "\\t") for mark in (found[0], by))
        raise ProblemsError(
            f"{where} must name columns divided by '{own}', and {header[0]!r:.80} seems to be by '{other}'; set "
            f'data.args={{sep: "{other}"}}, or data.args={{sep: "{own}"}} if it is the name of one column'
        )


def _shown(record: Sequence[str]) -> str:
    text = " | ".join(record)
    return repr(text if len(text) <= 80 else text[:77] + "...")


@contextmanager
def _any_size() -> Iterator[None]:
    """Inside this block a field may have any number of characters; csv has one limit for the whole process."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)
