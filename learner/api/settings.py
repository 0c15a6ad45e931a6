"""The arguments of a call -> the tree of a configuration, and its check: unknown keys, wrong values, rules."""

import os
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cluster.yaml_tree import ConfigError, check_plain, read_yaml
from learner.api.errors import InputError
from learner.api.inputs import Inputs
from learner.api.plain import plain
from learner.config import RunConfig, load
from learner.config.load import place_of
from rollout.config import OF_HELD_OUT, OF_ITS_PATH

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
    except ConfigError as error:
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
    except ConfigError as error:
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
