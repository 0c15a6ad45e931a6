"""Turns the arguments of `train`, `evaluate` and `plan` into the tree of a configuration, and checks it as a file is
checked."""

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
from cluster.reading import check_plain
from learner.api.process import InputError
from learner.config import RunConfig, load
from learner.config.load import place_of
from rewards import functions
from rollout.config import OF_HELD_OUT, OF_ITS_PATH

# Python values as a configuration file or a row of JSON lines holds them.

BOOLEANS = ("bool", "bool_")  # names of numpy's boolean type, from version 2 on and before

Other = Callable[[Any, str], Any]  # (value that no file can hold, its key) -> what a file holds instead; may raise


def plain(value: Any, where: str, other: Other) -> Any:
    """The value, with numpy's numbers as Python's, paths as text, tuples as lists. other: called for any other kind."""
    if value is None:
        return value
    if is_bool(value):
        return bool(value)
    if isinstance(value, str):
        return str.__str__(value)  # the value of a text Enum, whose str() may be its name
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
    """Whether the value is a boolean of Python or numpy; numpy's is neither a bool nor identical to True or False."""
    return isinstance(value, bool) or type(value).__name__ in BOOLEANS


# Functions and rows that a call is given are written into `inputs/` of the run folder. Each has a folder named by a
# digest of its content, so that the same call finds the same files.

HERE = "<inputs>/"  # stands for that folder until its place is known
SHORT = 12  # number of characters of a digest in a folder's name
FUNCTIONS = re.compile(r"rewards\.\d+\.use|learner\.loss\.ratio|env\.use|env\.args\..+")  # keys that take a function


class Inputs:
    """Collects functions and rows, and gives each the path under which `write` puts it."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}  # path below the folder -> content of the file
        self._new: list[Path] = []  # files that `write` has added

    def _add(self, digest: str, name: str, content: bytes) -> str:
        path = f"{digest[:SHORT]}/{name}"
        self._contents[path] = content
        return f"{HERE}{path}"

    def function(self, function: Any, where: str) -> str:
        """Takes a function or class, and returns the `use` that names it. where: the key that it was given for. Raises
        InputError for any other object, for a key that takes no function, and if it cannot be pickled."""
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
        """Takes a dataset, and returns its path: a datasets.Dataset becomes a Parquet file, a list of mappings JSON
        lines; a path or hub name is returned as it is. key: name of the argument, for InputError. name: of the file."""
        if isinstance(dataset, str | os.PathLike):
            return os.fspath(dataset)
        library = sys.modules.get("datasets")  # if it was not imported, the dataset cannot be one of its objects
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
        """Writes all files into the folder, and returns the configuration's tree with the folder in place of HERE.

        Each file is written under another name and renamed, so that it is complete or missing. Raises OSError, which
        names the path.
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
        """Removes the files that `write` has added, if the run did not begin; also folders that become empty, up to the
        run folder."""
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


# Arguments of train, evaluate and plan that are no keys of the configuration. Errors suggest them for a mistyped name.
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
    """The tree of the configuration: what the configuration file of the same run would hold. Functions and rows are
    added to `inputs`.

    Args:
        config: a file with settings; the other arguments replace those of the same keys.
        model: a name or folder, or the whole section `model`; None: the file or the settings have it.
        rewards: a list of functions, names and mappings; None: the file or the settings have them.
        datasets: name of an argument (`dataset`, `eval_dataset`) -> the dataset that was given, or None.
        settings: keys of the configuration, whole sections or dotted; dotted keys are set last.

    Raises:
        InputError: the text has a line for each mistake.
    """
    if config is not None and not isinstance(config, str | os.PathLike):
        raise InputError(
            f"config: must be the path of a YAML file, got {type(config).__name__}; give keys as arguments: "
            "train(..., **settings)"
        )
    try:
        tree = {} if config is None else load.settings_in(Path(config))
        _forget_own_data(tree, _by_key(datasets))
        own = tree.get("model")
        if model is not None and isinstance(own, dict) and own.get("path") != model:
            own.pop("revision", None)  # a revision belongs to the file's model and not to the one given
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
    """Stands for a value that no file can hold, of an unknown key: the error is then about the key."""
    return type(value).__name__


def checked(tree: Mapping[str, Any]) -> RunConfig:
    """The validated configuration. Raises InputError with the sentences of the command line."""
    try:
        return load.validated(tree)
    except WrongInput as error:
        raise InputError(str(error)) from None


def _forget_own_data(tree: Mapping[str, Any], given: Collection[str]) -> None:
    """Removes from a file's tree, if a dataset is given in place of the file's, the settings of how to read the file's
    data, and its held-out problems, which come from another source. given: the keys that are given."""
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
    """The key that the argument `model` sets (`model` or `model.path`), and its value."""
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
    """The rewards, each as a mapping like that of a configuration file."""
    if not isinstance(rewards, list | tuple):
        raise InputError(f"rewards: must be a list, got {type(rewards).__name__}; write rewards=[...]")
    return [one if isinstance(one, Mapping) else {"use": one} for one in rewards]
