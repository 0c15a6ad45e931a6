"""Reads the rows of a data source: the hub, files and folders of this machine, or a reasoning_gym task (`read`)."""

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from cluster.errors import WrongInput
from rewards.built_in import reasoning_gym
from rewards.config import resolved, scrubbed
from rollout.config import EPISODE, OWN
from rollout.data import files
from rollout.data.files import DATA, FORMATS, LINES, Names, cut, is_file_name, packing_of, read_json
from rollout.data.model_files import switched_off
from rollout.data.tables import CsvFile, Packed, Row, Table, csv_rows

PROBE_S = 3.0  # seconds of work from which the duration of the whole work is estimated


class Pace:
    """Tells early whether `total` pieces of work will be done within `seconds`.

    The clock starts behind the first piece, which may take longer since it loads what all pieces need.
    """

    def __init__(self, total: int, seconds: float) -> None:
        self._total, self._seconds = total, seconds
        self._first: tuple[int, float] | None = None  # (pieces done when the clock started, that time)

    def late(self, done: int) -> str:
        """Returns what is wrong if the work will be late, judged after `done` pieces (at least 1, and more at each
        call); else ""."""
        now = time.monotonic()
        before, begin = self._first = self._first or (done, now)
        spent = now - begin
        if spent < min(PROBE_S, self._seconds):
            return ""
        whole = spent / (done - before) * (self._total - before)
        if whole <= self._seconds:
            return ""
        return f"{done} of {self._total} took {spent:.0f} s, so that all would take {whole:.0f} s of {self._seconds:g}"


# Folders, data sets of the hub, and files named in data.args are found by Hugging Face's datasets. If they hold JSON or
# CSV, the files are read by rollout.data.tables, as a single file is: datasets would turn texts that look like dates
# into dates, 007 into a number, and NA into a missing value.

log = logging.getLogger("rollout")

# Arguments of load_dataset that say how a data set is loaded, not which data set.
OF_LOADING = ("verification_mode", "keep_in_memory", "save_infos", "num_proc", "trust_remote_code", "streaming")
# Settings of datasets' JSON reader that have no meaning here: how much it reads at once, and how it converts types.
OF_ITS_READER = ("use_threads", "block_size", "chunksize", "newlines_in_values", "on_mixed_types", "parse_agent_traces")
OF_ANY_BUILDER = ("name", "version", "data_dir", "data_files", "description")


class _Raw(NamedTuple):
    """What datasets has found.

    kind: "json" or "csv". files: split -> its files. options: settings of the reader, by pandas' names, or `field`.
    builder: datasets' builder.
    """

    kind: str
    files: Mapping[str, Sequence[str]]
    options: dict[str, Any]
    builder: Any


def read_data_set(path: str, split: str, args: Mapping[str, Any], size: int | None, names: Names) -> Sequence[Row]:
    """The first `size` rows of a split, or of a part of it. Raises datasets' own errors, and WrongInput for a file that
    cannot be read."""
    import datasets

    datasets.disable_progress_bars()  # progress bars would fill job logs
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
    """The files of a data set; None if they are neither JSON nor CSV, or need settings that only datasets has."""
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
    """Warns of files that no split of a folder without a README.md contains. datasets takes the files with a split
    (train, test) in their names, else those of the most frequent format, and silently leaves out the others."""
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
    """The settings of a reader that differ from datasets' defaults."""
    names = config.__dataclass_fields__.keys() - {*without, *OF_ANY_BUILDER, "features"}
    found = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(usual, name)}
    if found.get("sep") == found.get("delimiter"):
        found.pop("delimiter", None)
    return found


def _downloaded(path: str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns (path, args), in which the hub's name is replaced by the folder in its cache if the hub is switched off.
    datasets itself would then use the rows as it converted them when it read them last."""
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
    """Returns (place on this machine, packing, name) of each file of a split. All splits are downloaded, so that later
    runs can read any of them without the hub."""
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


__all__ = ["GENERATED", "Row", "first_rows", "is_made", "label", "other_seed", "read"]


GENERATED = "rg:"
GENERATED_SIZE = 1000  # how many problems a reasoning_gym task makes if data.size is null
DEADLINE_S = 600.0  # seconds for making the problems of a task


def read(
    path: str,
    split: str | None,
    args: Mapping[str, Any],
    size: int | None,
    seed: int,
    names: Names = DATA,
    deadline_s: float = DEADLINE_S,
) -> Sequence[Row]:
    """The first `size` rows of a source, as a sequence. Raises WrongInput.

    Args:
        path: `rg:<task>`, `env:own`, a file (files.FORMATS), a pattern of files, a folder, or a hub name.
        split: a split of a hub data set or a folder, or for example `train[:100]` of a file; None: names.usual, or the
            only split.
        args: keyword arguments of the source: the task's settings, or those of datasets.load_dataset
            (for example {name: main} chooses a configuration of a hub data set).
        size: None for all rows; for a task, how many problems to make.
        seed: seed of a task; files and hub data are not shuffled here.
        names: the configuration keys, for error messages.
        deadline_s: seconds for making the problems of a task.
    """
    args = resolved(args, "data.args")
    rows: Sequence[Row]
    if path == OWN:
        rows = _episodes(split, args, size or GENERATED_SIZE, names)
    elif path.startswith(GENERATED):
        if split not in (None, "train"):
            raise WrongInput(f"{names.split}: a reasoning_gym task has no splits, got {split!r}; leave it out")
        rows = _generate(path.removeprefix(GENERATED), args, size or GENERATED_SIZE, seed, names, deadline_s)
    else:
        rows = _read_dataset(path, split, args, size, names)
    if not rows:
        raise WrongInput(f"{names.path}: must hold at least one problem, got none from {path}; check the file or split")
    return rows


def first_rows(
    path: str, split: str | None, args: Mapping[str, Any], size: int | None, names: Names = DATA
) -> files.Beginning:
    """A few first rows of files on this machine, if they can be read quickly; none for the hub, a folder or a task.

    size: as in `read`. Raises WrongInput if a file does not exist or cannot be read.
    """
    if is_made(path):
        return files.Beginning()
    several = files.matching(path, names.path) if files.is_pattern(path) else []
    local = None if several else files.find(path, names.path)
    found = several or ([local] if local is not None and local.is_file() else [])
    try:
        return files.beginning(found, split, resolved(args, "data.args"), size, names) if found else files.Beginning()
    except WrongInput:
        raise
    except Exception as error:  # `read` will report this error
        log.debug("%s: no first rows of %s (%r)", names.path, path, error)
        return files.Beginning()


def label(path: str, split: str) -> str:
    """The prefix of the ids of a source's problems."""
    if is_made(path):
        return "env" if path == OWN else path.removeprefix(GENERATED)
    return files.plain_name(path) if files.is_file_name(path) and not files.is_pattern(path) else split


def is_made(path: str) -> bool:
    """Whether the source makes its problems by code, as many as are asked for."""
    return path == OWN or path.startswith(GENERATED)


def other_seed(seed: int) -> int:
    """A seed whose generated problems differ: reasoning_gym makes problem i from seed + i, so it must be far away."""
    return (seed + 2**30) % 2**31


def _read_dataset(
    path: str, split: str | None, args: Mapping[str, Any], size: int | None, names: Names
) -> Sequence[Row]:
    several = files.matching(path, names.path) if files.is_pattern(path) else []
    local = None if several else files.find(path, names.path)
    try:
        if several or (local is not None and local.is_file()):
            return files.read_files(several or [Path(str(local))], split, args, size, names)
        if local is not None and files.is_saved(local):
            return files.read_saved(local, split, args, size, names)
        return read_data_set(path if local is None else str(local), split or names.usual, args, size, names)
    except WrongInput:
        raise
    except StopIteration:  # datasets 5 raises it for an empty file
        return []
    except ConnectionError as error:  # huggingface_hub's OfflineModeIsEnabled is a subclass
        raise WrongInput(
            f"{names.path}: {path} is neither a file or folder here nor in the hub's cache, and the hub cannot be "
            "reached; download it where there is a network, or give a file"
        ) from error
    except Exception as error:  # readers raise errors of many types for malformed files
        said = scrubbed(_first_line(error.__cause__ or error), args)
        raise WrongInput(
            f"{names.path}: {path} (split {split or names.usual}{_named(args)}) cannot be read: {said}; check the "
            f"name, {names.split}{names.others}"
        ) from error


def _named(args: Mapping[str, Any]) -> str:
    """The names of arguments for an error message. Values may be secrets."""
    return f", args {', '.join(args)}" if args else ""


def _generate(task: str, args: Mapping[str, Any], size: int, seed: int, names: Names, deadline_s: float) -> list[Row]:
    try:
        factory = reasoning_gym.task_factory(task)
    except ImportError as error:
        raise WrongInput(
            f"data.path: rg:{task} needs reasoning_gym, which cannot be imported ({error}); run make setup, or "
            "pip install 'gleaner-rl[demo]'"
        ) from error
    if task not in factory.DATASETS:
        tasks = factory.DATASETS
        near = ", ".join(get_close_matches(task, tasks, n=3)) or f"{len(tasks)} tasks, see reasoning_gym"
        raise WrongInput(f"data.path: rg: must be followed by a task of reasoning_gym, got {task!r}; nearest: {near}")
    try:
        made = factory.create_dataset(task, size=size, seed=seed, **args)
    except Exception as error:  # a task raises errors of many types for values that it does not expect
        raise WrongInput(
            f"data.args: must be settings of the task {task}, got {', '.join(args) or 'none'}: "
            f"{scrubbed(_first_line(error), args)}; "
            "correct data.args"
        ) from error
    rows: list[Row] = []
    pace = Pace(size, deadline_s)
    for index in range(size):
        rows.append(_generated(made[index]))
        if late := pace.late(index + 1):
            raise WrongInput(f"{names.size}: {late} (cluster.patience); lower {names.size}")
    return rows


def _episodes(split: str | None, args: Mapping[str, Any], size: int, names: Names) -> list[Row]:
    """Rows that hold only a number, for an environment that makes its own problems; the held-out numbers differ."""
    if split not in (None, "train"):
        raise WrongInput(f"{names.split}: an environment's own problems have no splits, got {split!r}; leave it out")
    if args:
        raise WrongInput(f"data.args: env:own takes none, got {', '.join(args)}; set env.args")
    first = 0 if names is DATA else other_seed(0)
    return [{EPISODE: first + number} for number in range(size)]


def _generated(entry: Mapping[str, Any]) -> Row:
    # Metadata differ in shape between problems and between tasks, so they become one column of text.
    metadata = json.dumps(entry["metadata"], default=str)
    return {"question": entry["question"], "answer": entry["answer"], "metadata": metadata}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
