"""What a run is given that lies in no file yet: functions and rows. They are put into `inputs/` of the run folder, each
in a folder named by its content, so that the same call finds the same files."""

import hashlib
import json
import os
import re
import sys
import uuid
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from cluster.files import writing
from learner.api.errors import InputError
from learner.api.plain import plain
from rewards import pickled
from rewards.base import RewardLoadError

HERE = "<inputs>/"  # stands for the folder until it is known where that is
SHORT = 12  # letters of a digest in a name
FUNCTIONS = re.compile(r"rewards\.\d+\.use|learner\.loss\.ratio|env\.use|env\.args\..+")  # keys that take one


class Inputs:
    """Contents by their path in the folder, until `write`."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        self._new: list[Path] = []  # files that were not there before

    def _add(self, digest: str, name: str, content: bytes) -> str:
        path = f"{digest[:SHORT]}/{name}"
        self._contents[path] = content
        return f"{HERE}{path}"

    def function(self, function: Any, where: str) -> str:
        """The `use` of a function or class; InputError for any other thing, and for one that cannot be pickled."""
        if not callable(function):
            raise InputError(
                f"{where}: must be what a configuration file can hold (a number, text, a list, a mapping) or a "
                f"function, got {_type(function)}; convert it"
            )
        if where.startswith("rewards.") and ".args." in where:
            key = where.partition(".args.")[2].partition(".")[0]
            raise InputError(
                f"{where}: args are values that a configuration file can hold, got {_type(function)}; bind it: "
                f"functools.partial(..., {key}=...) in the place of the function whose args these are"
            )
        if not FUNCTIONS.fullmatch(where):
            raise InputError(
                f"{where}: takes no function, got {_type(function)}; functions stand in rewards, learner.loss.ratio, "
                "env.use and env.args"
            )
        try:
            packed = pickled.pack(function)
        except RewardLoadError as error:
            raise InputError(f"{where}: {error}") from error
        return f"{self._add(packed.digest, f'{packed.name}{pickled.SUFFIX}', packed.content)}:{packed.name}"

    def rows(self, dataset: Any, key: str, name: str) -> str:
        """The path of a dataset: a datasets.Dataset becomes Parquet, a list of mappings JSON lines; a path or hub name
        stays what it is. Raises InputError, with the name of the argument (`key`)."""
        if isinstance(dataset, str | os.PathLike):
            return os.fspath(dataset)
        library = sys.modules.get("datasets")  # without it nobody has made one of its objects
        if library is not None and isinstance(dataset, library.Dataset):
            if dataset.format["type"] == "custom":
                raise InputError(f"{key}: has a transform (set_transform), which is not written; give {key}.map(...)")
            stream = BytesIO()
            dataset.to_parquet(stream)
            return self._file(f"{name}.parquet", stream.getvalue())
        if library is not None and isinstance(dataset, library.DatasetDict):
            splits = list(dataset)
            raise InputError(
                f"{key}: must be one split, got a DatasetDict of {', '.join(splits)}; give {key}[{splits[0]!r}]"
            )
        if not isinstance(dataset, list | tuple) or not all(isinstance(row, Mapping) for row in dataset):
            raise InputError(
                f"{key}: must be a path, a hub name, a datasets.Dataset or a list of mappings, got {_type(dataset)}; "
                "convert it, for example with list(...), frame.to_dict('records') or datasets.Dataset.from_generator"
            )
        lines = [json.dumps(plain(row, f"{key}.{index}", _no_json)) for index, row in enumerate(dataset)]
        return self._file(f"{name}.jsonl", "".join(f"{line}\n" for line in lines).encode())

    def _file(self, name: str, content: bytes) -> str:
        return self._add(hashlib.sha256(content).hexdigest(), name, content)

    def write(self, folder: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Writes everything, and returns the tree of the configuration, in which HERE has become the folder.

        A file is there whole or not at all. Raises OSError, with the path in it.
        """
        for path, content in self._contents.items():
            file = folder / path
            self._new += [] if file.exists() else [file]
            partial = file.with_name(f".{file.name}-{uuid.uuid4().hex[:8]}")
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                partial.write_bytes(content)
                os.replace(partial, file)
        settled: dict[str, Any] = _with_folder(tree, str(folder))
        return settled

    def withdraw(self) -> None:
        """Removes what `write` has added, and the folders that are empty then, up to the run's: nothing was begun."""
        for file in self._new:
            file.unlink()
            for folder in file.parents[:3]:
                if any(folder.iterdir()):
                    break
                folder.rmdir()


def _with_folder(value: Any, folder: str) -> Any:
    if isinstance(value, str) and value.startswith(HERE):
        return f"{folder}/{value.removeprefix(HERE)}"
    if isinstance(value, dict):
        return {key: _with_folder(part, folder) for key, part in value.items()}
    return [_with_folder(part, folder) for part in value] if isinstance(value, list) else value


def _no_json(value: Any, where: str) -> Any:
    raise InputError(
        f"{where}: must be what JSON holds (text, a number, true, false, null, a list or a mapping of them), got "
        f"{_type(value)}; convert it, or give a datasets.Dataset"
    )


def _type(value: Any) -> str:
    return type(value).__name__
