"""Reads rows from files on this machine: JSON lines, JSON, CSV, Parquet, and folders written by datasets'
save_to_disk."""

import glob
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cluster.errors import WrongInput
from rollout.data.tables import PACKED, CsvFile, Packed, Row, Table, csv_rows, json_rows

__all__ = ["DATA", "EVAL", "Names", "Row"]

FORMATS = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".tsv": "csv", ".ndjson": "json",
}  # fmt: skip
LINES = (".jsonl", ".ndjson")  # formats with one object on each line
FEW = 3  # rows that `beginning` returns
SMALL = 8 * 2**20  # bytes of files that `beginning` reads whole
UNPACKED = 8  # about how many times larger a packed file is when it is unpacked
SAVED = ("dataset_dict.json", "state.json")  # a folder of save_to_disk contains one of these files


class Names(NamedTuple):
    """The configuration keys of a source, for error messages, and its default split.

    path, split, size: the keys. usual: the split that is read if none is named and there are several. others: further
    keys that may be wrong when a source cannot be read.
    """

    path: str
    split: str
    usual: str = "train"
    others: str = " and data.args"
    size: str = "data.size"


DATA = Names("data.path", "data.split")
EVAL = Names("data.eval.path", "data.eval.split", usual="test", size="data.eval.size")


def is_file_name(path: str) -> bool:
    """Whether a name has the ending of a format that can be read here."""
    return _format(path) in FORMATS


def is_pattern(path: str) -> bool:
    """Whether a name is a pattern such as data/*.jsonl, and not the name of an existing file."""
    return glob.has_magic(path) and not _exists(path)


def plain_name(path: str) -> str:
    """A file's or folder's name without the endings."""
    return Path(path).name.removesuffix(packing_of(path)).removesuffix(_format(path))


def find(path: str, key: str) -> Path | None:
    """The file or folder at `path`; None if the path can only be a hub name. Raises WrongInput.

    key: the configuration key, for the error message.
    """
    try:
        there = Path(path).expanduser()
        is_file, is_folder = there.is_file(), there.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise WrongInput(f"{key}: must be a path or a hub name, got {path[:80]!r} ({error})") from None
    if is_file and not is_file_name(path):
        raise WrongInput(
            f"{key}: {path} is there, but its name must end in one of {', '.join(FORMATS)} (also with "
            f"{', '.join(PACKED)}); give it the ending of what is in it, or convert it"
        )
    if is_file or is_folder:
        return there
    if is_file_name(path) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise WrongInput(f"{key}: file must exist, got {path}; {_near(there)}")
    return None


def matching(pattern: str, key: str) -> list[Path]:
    """The files that match a pattern such as data/*.jsonl, sorted. Raises WrongInput if there are none, or if some
    cannot be read here."""
    there = sorted(Path(name) for name in glob.glob(str(Path(pattern).expanduser()), recursive=True))
    found = [file for file in there if file.is_file()]
    if not found:
        raise WrongInput(f"{key}: must fit at least one file, and none fits {pattern}; correct it")
    others = [file.name for file in found if not is_file_name(file.name)]
    if others:
        raise WrongInput(
            f"{key}: {pattern} must fit files that end in one of {', '.join(FORMATS)}, and fits {others[0]}, too; "
            "write the ending into it"
        )
    return found


def is_saved(folder: Path) -> bool:
    """Whether datasets' save_to_disk wrote this folder."""
    return any((folder / name).is_file() for name in SAVED)


def read_files(
    files: Sequence[Path], split: str | None, args: Mapping[str, Any], size: int | None, names: Names
) -> Sequence[Row]:
    """The first `size` rows of a split of files of one format. The only split is `train`, or a part of it such as
    `train[:100]`.

    Raises WrongInput, and for CSV and Parquet the library's own errors.
    """
    split = split or "train"
    if split.partition("[")[0] != "train":
        raise WrongInput(
            f"{names.split}: the one split of a file is train, or a part of it such as train[:100]; got {split!r}"
        )
    kinds = {FORMATS[_format(file.name)]: file.name for file in files}
    if len(kinds) > 1:
        raise WrongInput(
            f"{names.path}: files that are read together must be of one kind, got {' and '.join(kinds.values())}; name "
            "one of them, or one kind"
        )
    if "json" in kinds:
        if args:
            raise WrongInput(f"data.args: a JSON file takes none, got {', '.join(args)}; leave it out")
        found = ((file, packing_of(file.name), _format(file.name) in LINES) for file in files)
        return part_of(read_json(found, names, size if split == "train" else None), split, size, names)
    if "csv" in kinds:
        return part_of(csv_rows([_csv_file(file, names) for file in files], args), split, size, names)
    import datasets

    data_files = [glob.escape(str(file)) for file in files]
    return Table(datasets.load_dataset("parquet", data_files=data_files, split=split, **args), size)


class Beginning(NamedTuple):
    """The first rows of a source.

    whole: whether the rows are exactly those of a run. If not, only the column names are: what a cell means may depend
    on the cells of all rows, or on the library that reads them.
    """

    rows: Sequence[Row] = ()
    whole: bool = False


def beginning(
    files: Sequence[Path], split: str | None, args: Mapping[str, Any], size: int | None, names: Names
) -> Beginning:
    """The first rows of files that are small, or whose columns stand at a known place; else no rows. Raises as
    read_files."""
    kind, packing = FORMATS[_format(files[0].name)], packing_of(files[0].name)
    if sum(file.stat().st_size for file in files) * (UNPACKED if packing else 1) <= SMALL and kind != "parquet":
        return Beginning(read_files(files, split, args, size, names)[:FEW], whole=True)
    if split is not None and split.partition("[")[0] != "train":
        return Beginning()
    if kind == "parquet" and not args:
        from pyarrow.parquet import ParquetFile

        with ParquetFile(files[0]) as found:
            return Beginning(next(found.iter_batches(FEW)).to_pylist() if found.metadata.num_rows else [])
    if kind == "csv":
        return Beginning(csv_rows([_csv_file(files[0], names)], {"nrows": FEW, **args})[:FEW])
    return Beginning()


def _csv_file(file: Path, names: Names) -> CsvFile:
    return CsvFile(file, packing_of(file.name), f"{names.path}: {file}", _format(file.name) == ".tsv")


def read_json(
    files: Iterable[tuple[Path, str, bool]], names: Names, size: int | None, field: str | None = None
) -> Packed:
    """The first `size` rows of JSON files. Each file is given as (file, packing, whether each line is an object)."""
    rows = (
        row
        for file, packing, lines in files
        for row in json_rows(file, packing, f"{names.path}: {file}", lines=lines, field=field)
    )
    found = Packed()
    for row in islice(rows, size):
        found.add(row)
    return found


def part_of(rows: Packed | list[Row], split: str, size: int | None, names: Names) -> Sequence[Row]:
    """The first `size` of the rows that belong to a split, `train` or a part of it."""
    start, stop = slice_of(split, {"train": len(rows)}, names)[1:]
    return cut(rows, start, stop, size)


def cut(rows: Packed | list[Row], start: int, stop: int, size: int | None) -> Sequence[Row]:
    """The rows from position `start` up to `stop`, at most `size` of them."""
    stop = stop if size is None else min(stop, start + size)
    if (start, stop) == (0, len(rows)):
        return rows
    return rows.part(start, stop) if isinstance(rows, Packed) else rows[start:stop]


def read_saved(
    folder: Path, split: str | None, args: Mapping[str, Any], size: int | None, names: Names
) -> Sequence[Row]:
    """The first `size` rows of a split in a folder of save_to_disk. A data set without splits is `train`.

    Raises WrongInput.
    """
    import datasets

    if args:
        raise WrongInput(f"data.args: a folder of save_to_disk takes none, got {', '.join(args)}; leave it out")
    found = datasets.load_from_disk(str(folder))
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    split = split or (names.usual if len(splits) > 1 else next(iter(splits)))
    name, start, stop = slice_of(split, {name: len(part) for name, part in splits.items()}, names)
    return Table(splits[name].select(range(start, stop)), size)


def slice_of(split: str, sizes: Mapping[str, int], names: Names) -> tuple[str, int, int]:
    """Returns (name, first row, end) of a split in datasets' notation name[from:to], in rows or percent."""
    if split in sizes:
        return split, 0, sizes[split]
    import datasets  # imported here, since the import is slow and slices are rare

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(sizes))
    except (ValueError, AssertionError) as error:
        said = " ".join(str(error).split())
        raise WrongInput(f"{names.split}: {said}; write for example train or train[:100], got {split!r}") from None
    if len(parts) != 1:
        raise WrongInput(f"{names.split}: must be one part of one split, got {split!r}; write for example train[:100]")
    first, last = parts[0].from_ or 0, parts[0].to
    return parts[0].splitname, first, sizes[parts[0].splitname] if last is None else last


def packing_of(path: str) -> str:
    """The ending of a packed file's name, a key of PACKED; "" for a file that is not packed."""
    return suffix if (suffix := Path(path).suffix) in PACKED else ""


def _format(path: str) -> str:
    return Path(Path(path).name.removesuffix(packing_of(path))).suffix


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _near(file: Path) -> str:
    try:
        there = sorted(f.name for f in file.parent.iterdir() if is_file_name(f.name))
    except OSError:
        return f"there is no readable folder {file.parent.absolute()}"
    near = get_close_matches(file.name, there, n=1)
    beside = f"in {file.parent.absolute()} there are {', '.join(there[:10]) or 'no such files'}"
    return f"did you mean {near[0]}?" if near else beside
