"""Where rows of problems come from: the hub, files and folders of this machine, or a reasoning_gym task."""

import json
import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rewards import gym_tasks
from rewards.secret_values import SecretError, resolved, scrubbed
from rollout.config import EPISODE, OWN
from rollout.data import files
from rollout.data.files import DATA, Names, ProblemsError, Row
from rollout.data.pace import Pace
from rollout.data.tables.data_sets import read_data_set

__all__ = ["GENERATED", "ProblemsError", "Row", "first_rows", "is_made", "label", "other_seed", "read"]

log = logging.getLogger("rollout")

GENERATED = "rg:"
GENERATED_SIZE = 1000  # problems of a reasoning_gym task where data.size is not given
DEADLINE_S = 600.0  # for making problems


def read(
    path: str,
    split: str | None,
    args: Mapping[str, Any],
    size: int | None,
    seed: int,
    names: Names = DATA,
    deadline_s: float = DEADLINE_S,
) -> Sequence[Row]:
    """The first `size` rows of a source, which are read by their positions. Raises ProblemsError.

    Args:
        path: `rg:<task>`, `env:own`, a file (files.FORMATS), a pattern of files, a folder, or a hub name.
        split: of a hub data set or a folder, or `train[:100]` of a file; null: names.usual, and of what has one split
            only, all of it.
        args: keyword arguments of the source: the task's settings, or those of datasets.load_dataset
            (a hub data set with several configurations is chosen with {name: main}).
        size: null = all rows; of a task, how many to make.
        seed: of a task; files and hub data are not shuffled here.
        names: what messages call them.
        deadline_s: seconds for making the problems of a task.
    """
    try:
        args = resolved(args, "data.args")
    except SecretError as error:
        raise ProblemsError(str(error)) from None
    rows: Sequence[Row]
    if path == OWN:
        rows = _episodes(split, args, size or GENERATED_SIZE, names)
    elif path.startswith(GENERATED):
        if split not in (None, "train"):
            raise ProblemsError(f"{names.split}: a reasoning_gym task has no splits, got {split!r}; leave it out")
        rows = _generate(path.removeprefix(GENERATED), args, size or GENERATED_SIZE, seed, names, deadline_s)
    else:
        rows = _read_dataset(path, split, args, size, names)
    if not rows:
        raise ProblemsError(
            f"{names.path}: must hold at least one problem, got none from {path}; check the file or split"
        )
    return rows


def first_rows(
    path: str, split: str | None, args: Mapping[str, Any], size: int | None, names: Names = DATA
) -> files.Beginning:
    """A few rows from the beginning of files that are here, if they can be told soon, however long these are; none of
    the hub, of a folder or of a task. size: as of read. Raises ProblemsError of what is there no file, or cannot be
    read."""
    if is_made(path):
        return files.Beginning()
    several = files.matching(path, names.path) if files.is_pattern(path) else []
    local = None if several else files.find(path, names.path)
    found = several or ([local] if local is not None and local.is_file() else [])
    try:
        return files.beginning(found, split, resolved(args, "data.args"), size, names) if found else files.Beginning()
    except SecretError as error:
        raise ProblemsError(str(error)) from None
    except ProblemsError:
        raise
    except Exception as error:  # what `read` will say of it
        log.debug("%s: no first rows of %s (%r)", names.path, path, error)
        return files.Beginning()


def label(path: str, split: str) -> str:
    """What the ids of a source's problems begin with."""
    if is_made(path):
        return "env" if path == OWN else path.removeprefix(GENERATED)
    return files.plain_name(path) if files.is_file_name(path) and not files.is_pattern(path) else split


def is_made(path: str) -> bool:
    """Whether the problems are made by code, as many as are asked for, rather than read."""
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
    except ProblemsError:
        raise
    except StopIteration:  # how datasets 5 meets a file without a line
        return []
    except ConnectionError as error:  # huggingface_hub's OfflineModeIsEnabled is one
        raise ProblemsError(
            f"{names.path}: {path} is neither a file or folder here nor in the hub's cache, and the hub cannot be "
            "reached; download it where there is a network, or give a file"
        ) from error
    except Exception as error:  # readers of files that anybody may have written raise what they like
        said = scrubbed(_first_line(error.__cause__ or error), args)
        raise ProblemsError(
            f"{names.path}: {path} (split {split or names.usual}{_named(args)}) cannot be read: {said}; check the "
            f"name, {names.split}{names.others}"
        ) from error


def _named(args: Mapping[str, Any]) -> str:
    """The names alone: values may be secrets."""
    return f", args {', '.join(args)}" if args else ""


def _generate(task: str, args: Mapping[str, Any], size: int, seed: int, names: Names, deadline_s: float) -> list[Row]:
    try:
        factory = gym_tasks.factory(task)
    except ImportError as error:
        raise ProblemsError(
            f"data.path: rg:{task} needs reasoning_gym, which cannot be imported ({error}); run make setup, or "
            "pip install 'gleaner-rl[demo]'"
        ) from error
    if task not in factory.DATASETS:
        tasks = factory.DATASETS
        near = ", ".join(get_close_matches(task, tasks, n=3)) or f"{len(tasks)} tasks, see reasoning_gym"
        raise ProblemsError(
            f"data.path: rg: must be followed by a task of reasoning_gym, got {task!r}; nearest: {near}"
        )
    try:
        made = factory.create_dataset(task, size=size, seed=seed, **args)
    except Exception as error:  # the task's own, about values that it did not expect
        raise ProblemsError(
            f"data.args: must be settings of the task {task}, got {', '.join(args) or 'none'}: "
            f"{scrubbed(_first_line(error), args)}; "
            "correct data.args"
        ) from error
    rows: list[Row] = []
    pace = Pace(size, deadline_s)
    for index in range(size):
        rows.append(_generated(made[index]))
        if late := pace.late(index + 1):
            raise ProblemsError(f"{names.size}: {late} (cluster.deadlines.start); lower {names.size}")
    return rows


def _episodes(split: str | None, args: Mapping[str, Any], size: int, names: Names) -> list[Row]:
    """Numbers alone; those of evaluation are others."""
    if split not in (None, "train"):
        raise ProblemsError(f"{names.split}: an environment's own problems have no splits, got {split!r}; leave it out")
    if args:
        raise ProblemsError(f"data.args: env:own takes none, got {', '.join(args)}; set env.args")
    first = 0 if names is DATA else other_seed(0)
    return [{EPISODE: first + number} for number in range(size)]


def _generated(entry: Mapping[str, Any]) -> Row:
    # Metadata differs in shape from problem to problem and from task to task: one text column holds it all.
    metadata = json.dumps(entry["metadata"], default=str)
    return {"question": entry["question"], "answer": entry["answer"], "metadata": metadata}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
