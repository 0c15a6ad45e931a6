"""Where rows of problems come from: the hub, a JSONL or Parquet file, or a reasoning_gym task."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

Row = dict[str, Any]

GENERATED = "rg:"
GENERATED_SIZE = 1000  # problems of a reasoning_gym task where data.size is not given
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class ProblemsError(ValueError):
    """Problems that cannot be trained on; one line that says which, why, and what to do."""


def read(path: str, split: str, args: Mapping[str, Any], size: int | None, seed: int) -> list[Row]:
    """The first `size` rows of a source. Raises ProblemsError.

    Args:
        path: `rg:<task>`, a .jsonl, .json or .parquet file, or a hub name.
        split: of a hub data set; a file is one split.
        args: keyword arguments of the source: the task's settings, or those of datasets.load_dataset
            (a hub data set with several configurations is chosen with {name: main}).
        size: null = all rows; of a task, how many to make.
        seed: of a task; files and hub data are not shuffled here.
    """
    if path.startswith(GENERATED):
        rows = _generate(path.removeprefix(GENERATED), args, size or GENERATED_SIZE, seed)
    else:
        rows = _read_dataset(path, split, args, size)
    if not rows:
        raise ProblemsError(f"data.path: must hold at least one problem, got none from {path}; check the file or split")
    return rows


def label(path: str, split: str) -> str:
    """What the ids of a source's problems begin with."""
    if path.startswith(GENERATED):
        return path.removeprefix(GENERATED)
    return Path(path).stem if _is_file_name(path) else split


def other_seed(seed: int) -> int:
    """A seed whose generated problems differ: reasoning_gym makes problem i from seed + i, so it must be far away."""
    return (seed + 2**30) % 2**31


def _is_file_name(path: str) -> bool:
    return Path(path).suffix in FILE_FORMATS


def _read_dataset(path: str, split: str, args: Mapping[str, Any], size: int | None) -> list[Row]:
    import datasets
    from huggingface_hub.errors import OfflineModeIsEnabled

    datasets.disable_progress_bars()  # job logs are no terminal
    file = _existing(path) if _is_file_name(path) else None
    try:
        if file is not None:
            found = datasets.load_dataset(FILE_FORMATS[file.suffix], data_files=str(file), split="train", **args)
        else:
            found = datasets.load_dataset(path, split=split, **args)
    except StopIteration:  # how datasets 5 meets a JSONL file without a line
        return []
    except (ConnectionError, OfflineModeIsEnabled) as error:
        raise ProblemsError(
            f"data.path: {path} is neither a .jsonl or .parquet file nor in the hub's cache here, and the hub cannot "
            "be reached; download it where there is a network, or give a file"
        ) from error
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise ProblemsError(
            f"data.path: {path} (split {split}, args {dict(args)}) cannot be read: "
            f"{_first_line(error.__cause__ or error)}; check the name, data.split and data.args"
        ) from error
    if size is not None:
        found = found.select(range(min(size, len(found))))
    return [dict(row) for row in found]


def _existing(path: str) -> Path:
    file = Path(path).expanduser()
    if file.is_file():
        return file
    there = sorted(f.name for f in file.parent.glob("*") if f.suffix in FILE_FORMATS) if file.parent.is_dir() else []
    near = get_close_matches(file.name, there, n=1)
    beside = f"in {file.parent.absolute()} there are {', '.join(there[:10]) or 'no such files'}"
    raise ProblemsError(f"data.path: file must exist, got {path}; {f'did you mean {near[0]}?' if near else beside}")


def _generate(task: str, args: Mapping[str, Any], size: int, seed: int) -> list[Row]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ProblemsError(
            f"data.path: rg:{task} needs reasoning_gym, which cannot be imported ({error}); run make setup, or "
            "pip install 'gleaner[demo]'"
        ) from error
    if task not in DATASETS:
        near = ", ".join(get_close_matches(task, DATASETS, n=3)) or f"{len(DATASETS)} tasks, see reasoning_gym"
        raise ProblemsError(
            f"data.path: rg: must be followed by a task of reasoning_gym, got {task!r}; nearest: {near}"
        )
    try:
        made = reasoning_gym.create_dataset(task, size=size, seed=seed, **args)
    except (TypeError, AssertionError, ValueError) as error:
        raise ProblemsError(
            f"data.args: must be settings of the task {task}, got {dict(args)}: {_first_line(error)}; correct data.args"
        ) from error
    return [
        # Metadata differs in shape from problem to problem and from task to task: one text column holds it all.
        {
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": json.dumps(entry["metadata"], default=str),
        }
        for entry in (made[index] for index in range(size))
    ]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
