"""Paths of a configuration made absolute: the processes of the run have working directories of their own, and who reads
the configuration in the run folder may stand elsewhere. And model.revision becomes a commit: what a branch or tag
stands for may be another one on another node, or by the time that a process is started again."""

from pathlib import Path
from typing import Any

from learner.config import ModelConfig, RunConfig
from rewards.base import ADAPTER
from rewards.config import RewardConfig, classifier_of
from rewards.pickled import SUFFIX
from rollout.data.chat_error import ChatError
from rollout.data.hub import commit_of
from rollout.data.model_files import hub_file
from rollout.env.config import EnvConfig
from rollout.env.loader import NAMES, PATHS


def absolute(config: RunConfig) -> RunConfig:
    """The configuration with whole paths to the model, its adapters, the data, and the files of the user's functions,
    where these exist here, and with the commit that model.revision stands for; what does not exist is left for the
    check of that setting to say."""
    model = config.model.model_copy(
        update={name: _whole(getattr(config.model, name)) for name in ("path", "adapter", "reference")}
        | {"revision": _commit(config.model)}
    )
    held_out = config.data.eval.model_copy(update={"path": _whole(config.data.eval.path)})
    data = config.data.model_copy(update={"path": _whole(config.data.path), "eval": held_out})
    rewards = [
        reward.model_copy(update={"use": _function(reward.use), "args": _arguments(reward)})
        for reward in config.rewards
    ]
    loss = config.learner.loss.model_copy(update={"ratio": _function(config.learner.loss.ratio)})
    value = config.learner.value.model_copy(update={"start": _whole(config.learner.value.start)})
    learner = config.learner.model_copy(update={"loss": loss, "value": value})
    env = config.env if config.env.use is None else config.env.model_copy(update=_environment(config.env))
    return config.model_copy(update={"model": model, "data": data, "rewards": rewards, "learner": learner, "env": env})


def _commit(model: ModelConfig) -> str | None:
    if model.revision is None:
        return None
    try:
        file = hub_file(model.source, "config.json")
    except ChatError:
        file = None
    return (commit_of(file.parent) if file is not None else None) or model.revision


def _environment(env: EnvConfig) -> dict[str, Any]:
    """What names it, and those of its arguments that name code or paths."""
    use, args = str(env.use), dict(env.args)
    for name in args.keys() & {*NAMES.get(use, ())}:
        args[name] = _code(args[name])
    for name in args.keys() & {*PATHS.get(use, ())}:
        args[name] = _whole(args[name]) if isinstance(args[name], str) else args[name]
    return {"use": _function(use), "args": args}


def _code(given: Any) -> Any:
    """A name of code, or several in a list or mapping."""
    if isinstance(given, list | tuple):
        return [_code(one) for one in given]
    if isinstance(given, dict):
        return {key: _code(one) for key, one in given.items()}
    return _function(given) if isinstance(given, str) else given


def _function(use: str) -> str:
    """`path/file.py:function`, or of a pickled one, and `adapter:folder` with the whole path; any other name as it
    is."""
    if use.startswith(ADAPTER):
        return f"{ADAPTER}{_whole(use.removeprefix(ADAPTER))}"
    file, colon, function = use.rpartition(":")
    return f"{_whole(file)}{colon}{function}" if file.endswith((".py", SUFFIX)) else use


def _arguments(reward: RewardConfig) -> dict[str, Any]:
    """Those that name the model of a built-in function, with its whole path."""
    if classifier_of(reward) is None:
        return reward.args
    return {**reward.args, "model": _whole(classifier_of(reward))}


def _whole(text: str | None) -> str | None:
    try:
        path = Path(text).expanduser() if text is not None else None
        if path is None or not path.exists():
            return text
        return str(path.resolve() if ".." in path.parts else path.absolute())
    except (OSError, RuntimeError):  # of what is no path
        return text
