"""Problems that lie on this machine: JSON lines, JSON, CSV and Parquet files, and folders of datasets' save_to_disk."""

import bz2
import gzip
import json
import lzma
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from glob import escape
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
SAVED = ("dataset_dict.json", "state.json")  # one of them lies in a folder of save_to_disk
BOM = b"\xef\xbb\xbf"  # what some editors put before UTF-8
WHOLE = re.compile(r"0|-?[1-9][0-9]{0,999}", re.ASCII)  # a number that is written in no other way
MAX_DEPTH = 64  # of a row's lists and mappings: what a reward process and Arrow take


class ProblemsError(ValueError):
    """Problems that cannot be trained on; one line that says which, why, and what to do."""


class Names(NamedTuple):
    """What messages call what names a source; and the split of several that is meant where none is named."""

    path: str
    split: str
    usual: str = "train"
    others: str = " and data.args"  # what else may be wrong
    size: str = "data.size"


DATA = Names("data.path", "data.split")
EVAL = Names("data.eval.path", "data.eval.split", usual="test", size="data.eval.size")


def is_file_name(path: str) -> bool:
    """Whether a name ends as the files do that can be read here."""
    return _format(path) in FORMATS


def plain_name(path: str) -> str:
    """A file's or folder's name without the endings."""
    return Path(path).name.removesuffix(_packing(path)).removesuffix(_format(path))


def find(path: str, key: str) -> Path | None:
    """The file or folder at `path`; None where the name can only be one of the hub. Raises ProblemsError.

    key: of the configuration, for the message.
    """
    try:
        there = Path(path).expanduser()
        is_file, is_folder = there.is_file(), there.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise ProblemsError(f"{key}: must be a path or a hub name, got {path[:80]!r} ({error})") from None
    if is_file and not is_file_name(path):
        raise ProblemsError(
            f"{key}: {path} is there, but its name must end in one of {', '.join(FORMATS)} (also with "
            f"{', '.join(PACKED)}); give it the ending of what is in it, or convert it"
        )
    if is_file or is_folder:
        return there
    if is_file_name(path) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ProblemsError(f"{key}: file must exist, got {path}; {_near(there)}")
    return None


def is_saved(folder: Path) -> bool:
    """Whether datasets' save_to_disk wrote this folder."""
    return any((folder / name).is_file() for name in SAVED)


def read_file(file: Path, split: str | None, args: Mapping[str, Any], size: int | None, names: Names) -> list[Row]:
    """The first `size` rows of a file's split: all of it is `train`, a part is for example `train[:100]`.

    Raises ProblemsError, and of CSV and Parquet whatever the library says.
    """
    split = split or "train"
    if split.partition("[")[0] != "train":
        raise ProblemsError(
            f"{names.split}: the one split of a file is train, or a part of it such as train[:100]; got {split!r}"
        )
    kind = FORMATS[_format(file.name)]
    if kind == "json":
        if args:
            raise ProblemsError(f"data.args: a JSON file takes none, got {', '.join(args)}; leave it out")
        rows = list(islice(_json_rows(file, names), size if split == "train" else None))
        start, stop = _slice(split, {"train": len(rows)}, names)[1:]
        return rows[start:stop][:size]
    if kind == "csv":
        rows = _csv_rows(file, args)
        start, stop = _slice(split, {"train": len(rows)}, names)[1:]
        return rows[start:stop][:size]
    import datasets

    found = datasets.load_dataset(kind, data_files=escape(str(file)), split=split, **args)
    return [dict(row) for row in (found if size is None else found.select(range(min(size, len(found)))))]


def read_saved(folder: Path, split: str | None, args: Mapping[str, Any], size: int | None, names: Names) -> list[Row]:
    """The first `size` rows of one split of a folder of save_to_disk; a data set without splits is `train`.

    Raises ProblemsError.
    """
    import datasets

    if args:
        raise ProblemsError(f"data.args: a folder of save_to_disk takes none, got {', '.join(args)}; leave it out")
    found = datasets.load_from_disk(str(folder))
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    split = split or (names.usual if len(splits) > 1 else next(iter(splits)))
    name, start, stop = _slice(split, {name: len(part) for name, part in splits.items()}, names)
    part = splits[name].select(range(start, stop))
    return [dict(row) for row in (part if size is None else part.select(range(min(size, len(part)))))]


def _slice(split: str, sizes: Mapping[str, int], names: Names) -> tuple[str, int, int]:
    """Name, first and last row of a split written as datasets writes it: name[from:to], in rows or percent."""
    if split in sizes:
        return split, 0, sizes[split]
    import datasets  # slow to import, and few write slices

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(sizes))
    except (ValueError, AssertionError) as error:
        said = " ".join(str(error).split())
        raise ProblemsError(f"{names.split}: {said}; write for example train or train[:100], got {split!r}") from None
    if len(parts) != 1:
        raise ProblemsError(
            f"{names.split}: must be one part of one split, got {split!r}; write for example train[:100]"
        )
    first, last = parts[0].from_ or 0, parts[0].to
    return parts[0].splitname, first, sizes[parts[0].splitname] if last is None else last


def _csv_rows(file: Path, args: Mapping[str, Any]) -> list[Row]:
    """Cells as they are written, but for columns whose type is asked for. What pandas takes for a number or for nothing
    by itself would be other gold answers: 712 for 00712, 2.0 for 2 in a column with an empty cell, nothing for NA."""
    import pandas

    asked = args.get("dtype", {})
    types = defaultdict(lambda: str, asked) if isinstance(asked, Mapping) else asked
    as_written = {"keep_default_na": False, "na_values": [""]}
    table = pandas.read_csv(file, **as_written | dict(args) | {"dtype": types})
    columns = {}
    for name in table.columns:
        column = table[name].astype(object)
        cells = column.where(column.notna(), None).tolist()
        columns[name] = cells if types is asked or name in asked else _values(cells)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _values(cells: list[Any]) -> list[Any]:
    """A column's cells as numbers, or as truth values, if Python writes each such value as its cell has it; else as
    they are."""
    filled = {cell for cell in cells if cell is not None}
    for value_of in (_number, {"True": True, "False": False}.get):
        if all(isinstance(cell, str) and value_of(cell.strip()) is not None for cell in filled):
            return [None if cell is None else value_of(cell.strip()) for cell in cells]
    return cells


def _number(text: str) -> int | float | None:
    """None for what is written as Python would not write it: 007, 1.50, +5, nan."""
    if WHOLE.fullmatch(text):
        return int(text)
    try:
        found = float(text)
    except ValueError:
        return None
    return found if repr(found) == text and isfinite(found) else None


def _json_rows(file: Path, names: Names) -> Iterator[Row]:
    """Read here, line by line: exact whole numbers of any size, a line number for what is wrong, nothing recursive."""
    opener: Callable[..., Any] = PACKED.get(_packing(file.name), open)
    number = 1
    try:
        with opener(file, "rb") as stream:
            if _format(file.name) == ".json" and stream.peek(16).removeprefix(BOM).lstrip()[:1] == b"[":
                for entry, row in enumerate(_loaded(stream.read()), start=1):
                    yield _row(row, f"{names.path}: {file} entry {entry}")
                return
            for number, line in enumerate(stream, start=1):
                if text := line.removeprefix(BOM if number == 1 else b"").strip():
                    yield _row(_loaded(text), f"{names.path}: {file} line {number}")
    except UnicodeDecodeError as error:
        wrong = f"0x{error.object[error.start]:02x}"
        raise ProblemsError(
            f"{names.path}: {file} line {number} must be UTF-8, got the byte {wrong}; save it as UTF-8"
        ) from None
    except RecursionError:
        raise ProblemsError(f"{names.path}: {file} line {number} is nested too deep; take levels out") from None
    except (ValueError, EOFError, OSError) as error:  # OSError: no gzip file, though its name says so
        if isinstance(error, ProblemsError):
            raise
        plain = f"{error.msg} character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        said = " ".join(plain.split())[:200]
        raise ProblemsError(f"{names.path}: {file} line {number} cannot be read: {said}; correct it") from None


def _loaded(text: bytes) -> Any:
    return json.loads(text.decode("utf-8-sig"))


def _row(value: Any, where: str) -> Row:
    """A row, if Arrow, a reward process and a tokenizer can take it."""
    if not isinstance(value, dict):
        raise ProblemsError(f"{where} must be a mapping of columns, got {type(value).__name__}; correct it")
    waiting = [(value, 0)]
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


def _packing(path: str) -> str:
    return suffix if (suffix := Path(path).suffix) in PACKED else ""


def _format(path: str) -> str:
    return Path(Path(path).name.removesuffix(_packing(path))).suffix


def _near(file: Path) -> str:
    try:
        there = sorted(f.name for f in file.parent.iterdir() if is_file_name(f.name))
    except OSError:
        return f"there is no readable folder {file.parent.absolute()}"
    near = get_close_matches(file.name, there, n=1)
    beside = f"in {file.parent.absolute()} there are {', '.join(there[:10]) or 'no such files'}"
    return f"did you mean {near[0]}?" if near else beside
