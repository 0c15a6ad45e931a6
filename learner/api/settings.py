"""The arguments of a call -> the tree of a configuration, and its check: unknown keys, wrong values, rules."""

import hashlib
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from io import BytesIO
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from cluster.errors import WrongInput
from cluster.files import writing
from cluster.reading import check_plain, read_yaml
from learner.api.process import InputError
from learner.config import RunConfig, load
from learner.config.load import place_of
from rewards import functions
from rollout.config import OF_HELD_OUT, OF_ITS_PATH

# Python values -> what a configuration file or a row of JSON lines holds.

BOOLEANS = ("bool", "bool_")  # how numpy calls its own, from 2 on and before

Other = Callable[[Any, str], Any]  # (what no file holds, where it stands) -> what stands for it, or an exception


def plain(value: Any, where: str, other: Other) -> Any:
    """The value with numbers of numpy as Python's, paths as text, tuples as lists; `other` is asked about the rest."""
    if value is None:
        return value
    if is_bool(value):
        return bool(value)
    if isinstance(value, str):
        return str.__str__(value)  # of an Enum that is text its value, not its name
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise InputError(f"{where}: keys must be text, got {wrong[0]!r}; write {str(wrong[0])!r}")
        return {str(key): plain(part, f"{where}.{key}", other) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, f"{where}.{index}", other) for index, part in enumerate(value)]
    return other(value, where)


def is_bool(value: Any) -> bool:
    """Also for numpy's, which is no bool, nor the same as True or False."""
    return isinstance(value, bool) or type(value).__name__ in BOOLEANS


# What a run is given that lies in no file yet: functions and rows. They are put into `inputs/` of the run folder, each
# in a folder named by its content, so that the same call finds the same files.

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
            packed = functions.pack(function)
        except WrongInput as error:
            raise InputError(f"{where}: {error}") from error
        return f"{self._add(packed.digest, f'{packed.name}{functions.SUFFIX}', packed.content)}:{packed.name}"

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


# Of train, evaluate and plan, beside keys of the configuration; what they say of a mistyped one has these, too.
ARGUMENTS = (
    "model", "rewards", "dataset", "eval_dataset", "config", "on_step", "adapter", "run", "samples", "limit",
    "threshold",
)  # fmt: skip


def tree_of(
    config: str | os.PathLike[str] | None,
    model: Any,
    rewards: Any,
    datasets: Mapping[str, Any],
    settings: Mapping[str, Any],
    inputs: Inputs,
) -> dict[str, Any]:
    """What the configuration file of the same run would hold; functions and rows are put into `inputs`.

    Args:
        config: a file whose keys are the base of all others.
        model: a name or folder, or the whole section `model`; None: it is in the file or the settings.
        rewards: a list of functions, names and mappings; None likewise.
        datasets: argument and key (`dataset`: data.path) -> what was given, or None.
        settings: keys of the configuration, whole sections or dotted; the dotted are set last.

    Raises:
        InputError: one line for each mistake.
    """
    if config is not None and not isinstance(config, str | os.PathLike):
        raise InputError(
            f"config: must be the path of a YAML file, got {type(config).__name__}; give keys as arguments: "
            "train(..., **settings)"
        )
    try:
        tree = {} if config is None else read_yaml(Path(config))
        _forget_own_data(tree, _by_key(datasets))
        own = tree.get("model")
        if model is not None and isinstance(own, dict) and own.get("path") != model:
            own.pop("revision", None)  # which says nothing of another model
        dotted = {key: value for key, value in settings.items() if "." in key}
        _check_once(model, datasets, dotted)
        _assign(tree, {key: value for key, value in settings.items() if key not in dotted}, inputs)
        if model is not None:
            load.assign(tree, *_model(model))
        if rewards is not None:
            tree["rewards"] = plain(_rewards(rewards), "rewards", inputs.function)
        for key, (argument, dataset) in _by_key(datasets).items():
            load.assign(tree, key, inputs.rows(dataset, argument, "train" if key == "data.path" else "eval"))
        _assign(tree, dict(sorted(dotted.items(), key=lambda pair: pair[0].count("."))), inputs)
        check_plain(tree)
    except WrongInput as error:
        raise InputError(str(error)) from None
    return tree


def _check_once(model: Any, datasets: Mapping[str, Any], dotted: Collection[str]) -> None:
    given = {key: name for key, (name, _) in _by_key(datasets).items()}
    if model is not None and not isinstance(model, Mapping):
        given["model.path"] = "model"
    for key in given.keys() & set(dotted):
        raise InputError(f"{key}: is what the argument {given[key]} gives as well; leave one of them out")


def _assign(tree: dict[str, Any], settings: Mapping[str, Any], inputs: Inputs) -> None:
    for key, value in settings.items():
        known = key.partition(".")[0] in RunConfig.model_fields
        near = get_close_matches(key, [*RunConfig.model_fields, *ARGUMENTS], n=1)
        if not known and near and near[0] in ARGUMENTS and "." not in key and place_of(key) is None:
            raise InputError(f"{key}: unknown key; did you mean {near[0]}?")
        load.assign(tree, key, plain(value, key, inputs.function if known else _unread))


def _unread(value: Any, where: str) -> str:
    """Of a key that there is not, such as one of TRL's arguments, the name is what is wrong, whatever the value."""
    return type(value).__name__


def checked(tree: Mapping[str, Any]) -> RunConfig:
    """The settings of the run. Raises InputError with the sentences of the command line."""
    try:
        return load.validated(tree)
    except WrongInput as error:
        raise InputError(str(error)) from None


def _forget_own_data(tree: Mapping[str, Any], given: Collection[str]) -> None:
    """Takes from a file's tree what it says of the problems in whose place others are given: how to read them, and its
    held-out ones, which are of another source than these."""
    data = tree.get("data")
    if not given or not isinstance(data, dict):
        return
    if "data.path" in given:
        for name in OF_ITS_PATH:
            data.pop(name, None)
    if isinstance(data.get("eval"), dict):
        for name in OF_HELD_OUT:
            data["eval"].pop(name, None)


def _by_key(datasets: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    keys = {"dataset": "data.path", "eval_dataset": "data.eval.path"}
    return {keys[name]: (name, given) for name, given in datasets.items() if given is not None}


def _model(model: Any) -> tuple[str, Any]:
    """The key that it is, and its value."""
    if isinstance(model, Mapping):
        return "model", plain(model, "model", _no_model)
    if not isinstance(model, str | os.PathLike):
        _no_model(model, "model")
    return "model.path", os.fspath(model)


def _no_model(model: Any, where: str) -> Any:
    raise InputError(
        f"{where}: must be a hub name or a folder, got {type(model).__name__}; the run loads the model in processes of "
        "its own: give the name that you loaded it from, or write it with save_pretrained and give the folder"
    )


def _rewards(rewards: Any) -> list[Any]:
    """Each function or name as the mapping that a file has."""
    if not isinstance(rewards, list | tuple):
        raise InputError(f"rewards: must be a list, got {type(rewards).__name__}; write rewards=[...]")
    return [one if isinstance(one, Mapping) else {"use": one} for one in rewards]
