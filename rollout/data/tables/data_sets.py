"""Folders, data sets of the hub, and files that data.args names, which Hugging Face's library finds. Where they hold
JSON or CSV, the files that it has found are read here, as one that is named by itself: the library would make dates of
texts that look like some, numbers of 007, and nothing of NA."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollout.data.files import FORMATS, LINES, Names, cut, is_file_name, packing_of, read_json
from rollout.data.hub import switched_off
from rollout.data.tables.csv_rows import CsvFile, csv_rows
from rollout.data.tables.rows import Packed, Row, Table

log = logging.getLogger("rollout")

# Arguments of load_dataset that say how a data set is loaded, not which.
OF_LOADING = ("verification_mode", "keep_in_memory", "save_infos", "num_proc", "trust_remote_code", "streaming")
# Settings of datasets' reader of JSON without a meaning here: how much it reads at once, and what it makes of types.
OF_ITS_READER = ("use_threads", "block_size", "chunksize", "newlines_in_values", "on_mixed_types", "parse_agent_traces")
OF_ANY_BUILDER = ("name", "version", "data_dir", "data_files", "description")


class _Raw(NamedTuple):
    """What the library has found. files: of each split. options: of the reader, by pandas' names, or `field`."""

    kind: str
    files: Mapping[str, Sequence[str]]
    options: dict[str, Any]
    builder: Any


def read_data_set(path: str, split: str, args: Mapping[str, Any], size: int | None, names: Names) -> Sequence[Row]:
    """The first `size` rows of a split, or of a part of it. Raises whatever the library says, and ProblemsError of a
    file that cannot be read."""
    import datasets

    datasets.disable_progress_bars()  # job logs are no terminal
    raw = None if args.get("streaming") else _raw(path, args, names)
    if raw is None:
        return Table(datasets.load_dataset(path, split=split, **args), size)
    mentioned = [part.partition("[")[0].strip() for part in split.split("+")]
    for name in mentioned:
        if name not in raw.files:
            raise ValueError(f"Unknown split {name!r}. Should be one of {[*raw.files]}")
    rows = {name: _rows(raw, name, names) for name in dict.fromkeys(mentioned)}
    if split in rows:
        return cut(rows[split], 0, len(rows[split]), size)
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(own) for name, own in rows.items()})
    chosen = [cut(rows[one.splitname], one.from_ or 0, _end(one, rows[one.splitname]), None) for one in parts]
    return chosen[0] if len(chosen) == 1 and size is None else _joined(chosen, size)


def _end(part: Any, rows: Sequence[Row]) -> int:
    return len(rows) if part.to is None else int(part.to)


def _joined(parts: Sequence[Sequence[Row]], size: int | None) -> Sequence[Row]:
    rows = [row for part in parts for row in part][:size]
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def _raw(path: str, args: Mapping[str, Any], names: Names) -> _Raw | None:
    """None of what is neither JSON nor CSV, or is to be read with settings that only the library has."""
    import datasets
    from datasets.packaged_modules.csv.csv import Csv, CsvConfig
    from datasets.packaged_modules.json.json import Json, JsonConfig

    given = {name: value for name, value in args.items() if name not in OF_LOADING}
    path, given = _downloaded(path, given)
    builder: Any = datasets.load_dataset_builder(path, **given)
    files = builder.config.data_files
    if not files:
        return None
    splits = {str(name): [str(file) for file in own] for name, own in files.items()}
    if not {"data_files", "data_dir"} & given.keys():
        _tell_of_others(Path(path), splits, names)
    if getattr(builder.config, "features", None) is not None:
        return None
    if isinstance(builder, Json):
        options = _changed(builder.config, JsonConfig(), OF_ITS_READER)
        return _Raw("json", splits, options, builder) if options.keys() <= {"field"} else None
    if isinstance(builder, Csv):
        return _Raw("csv", splits, _changed(builder.config, CsvConfig(), ("chunksize", "column_names")), builder)
    return None


def _tell_of_others(folder: Path, splits: Mapping[str, Sequence[str]], names: Names) -> None:
    """Which files of a folder without a card are read in no split. The library takes those whose names have a split in
    them (train, test), else those of the kind of which there are most, and says nothing of the others."""
    from datasets.data_files import FILES_TO_IGNORE

    if not folder.is_dir() or (folder / "README.md").is_file():
        return
    taken = {Path(file).resolve() for own in splits.values() for file in own}
    others = [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if is_file_name(file.name) and file.name not in FILES_TO_IGNORE and file.resolve() not in taken
    ]
    if others:
        log.warning(
            "%s: the folder %s is read as %s, without %s; to read others name a file, or a pattern such as %s/*%s",
            names.path, folder, ", ".join(splits), ", ".join(others[:3]) + (", ..." if len(others) > 3 else ""), folder,
            Path(others[0]).suffix,
        )  # fmt: skip


def _changed(config: Any, usual: Any, without: Sequence[str]) -> dict[str, Any]:
    """The settings of a reader that are not those of the library."""
    names = config.__dataclass_fields__.keys() - {*without, *OF_ANY_BUILDER, "features"}
    found = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(usual, name)}
    if found.get("sep") == found.get("delimiter"):
        found.pop("delimiter", None)
    return found


def _downloaded(path: str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where the hub cannot be asked, the folder that its cache has of a data set, in the place of its name: the library
    itself would go by what it made of the rows when it read them last."""
    if not switched_off() or path in ("json", "csv") or Path(path).exists():
        return path, args
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(path, repo_type="dataset", revision=args.get("revision"), local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return path, args
    if not any(FORMATS.get(file.suffix) in ("json", "csv") for file in Path(folder).rglob("*")):
        return path, args
    return folder, {name: value for name, value in args.items() if name not in ("revision", "token")}


def _rows(raw: _Raw, split: str, names: Names) -> Packed | list[Row]:
    found = list(_files(raw, split))
    if raw.kind == "json":
        files = ((file, packing, _suffix(name) in LINES) for file, packing, name in found)
        return read_json(files, names, None, raw.options.get("field"))
    of_csv = [CsvFile(file, packing, f"{names.path}: {name}", _suffix(name) == ".tsv") for file, packing, name in found]
    return csv_rows(of_csv, raw.options)


def _files(raw: _Raw, split: str) -> Iterator[tuple[Path, str, str]]:
    """Each file of a split: where it lies here, how it is packed, and its name. All splits are brought, so that the
    others can be read without the hub, too."""
    import datasets

    config = datasets.DownloadConfig(token=getattr(raw.builder, "token", None))
    manager = datasets.DownloadManager(dataset_name=raw.builder.dataset_name, download_config=config)
    here = manager.download({name: list(files) for name, files in raw.files.items()})
    for name, place in zip(raw.files[split], here[split], strict=True):
        packing = packing_of(name)
        if packing or not ARCHIVE.search(name):
            yield Path(place), packing, name
            continue
        for inner in manager.iter_files(manager.extract(place)):
            yield Path(inner), "", f"{name}: {Path(inner).name}"


ARCHIVE = re.compile(r"\.(zip|tar|tgz|tar\.[a-z0-9]+|zst|lz4|rar|7z)$")


def _suffix(name: str) -> str:
    return Path(name.removesuffix(packing_of(name))).suffix
