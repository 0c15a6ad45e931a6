"""`env.use` -> an environment. Runs in the environment's process, never in the driver or the generator's."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rewards.base import RewardLoadError, said
from rewards.loader import load_own, no_built_in
from rollout.env.driven import Driven
from rollout.env.processes.wire import BadAnswer
from rollout.env.program import Hosted

BUILT_INS = {
    "number_guessing": "rollout.env.tasks.number_guessing:NumberGuessing",
    "openenv": "rollout.env.adapters.openenv:OpenEnv",
    "second_try": "rollout.env.tasks.second_try:SecondTry",
    "skyrl_gym": "rollout.env.adapters.skyrl_gym:SkyRLGym",
    "tools": "rollout.env.tools.python_tools:PythonTools",
    "trl_environment": "rollout.env.adapters.trl:TrlEnvironment",
    "trl_rollout_func": "rollout.env.adapters.trl_rollout:TrlRolloutFunc",
    "verifiers": "rollout.env.adapters.verifiers:Verifiers",
}
NAMES = {  # arguments that name code of the user's
    "openenv": ("action", "observe"),
    "skyrl_gym": ("env",),
    "tools": ("functions",),
    "trl_environment": ("factory", "rewards"),
    "trl_rollout_func": ("function", "rewards"),
}
PATHS = {"verifiers": ("python", "model")}  # arguments that are paths
METHODS = ("reset", "step", "score", "close")


def code_of(use: str | None, args: Mapping[str, Any]) -> list[str]:
    """What names the code of an environment as `package.module:name` or `path/file.py:name`: the environment, and what
    it is told to use."""
    if use is None:
        return []
    given = [args.get(name) for name in NAMES.get(use, ())]
    names = [name for one in given for name in _each(one)]
    return [BUILT_INS.get(use, use), *(name for name in names if isinstance(name, str) and ":" in name)]


def _each(given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return [*given.values()]
    return [*given] if isinstance(given, list | tuple) else [given]


def found(use: str) -> Any:
    """The class or function that `use` names. Raises RewardLoadError with one sentence."""
    if use in BUILT_INS:
        module, _, name = BUILT_INS[use].partition(":")
        return getattr(import_module(module), name)
    if ":" not in use and not use.endswith(".py"):
        raise RewardLoadError(no_built_in(use, "environment", BUILT_INS, "Class"))
    return load_own(use, "MyEnvironment")


def make(use: str, args: Mapping[str, Any]) -> Hosted:
    """One trajectory's environment or program. Raises RewardLoadError if `use` is not found, BadAnswer if it makes
    neither, and what it raises itself."""
    factory = found(use)
    try:
        env = factory(**args)
    except TypeError as error:
        if _takes(factory, args):  # it is an error inside of it
            raise
        told = _misfit(factory, args) or f"must take {', '.join(args) or 'no arguments'}: {said(error)}"
        raise BadAnswer(f"env.args: {use} {told}") from error
    if callable(getattr(env, "run", None)):
        return Driven(env)
    if missing := [name for name in METHODS if not callable(getattr(env, name, None))]:
        raise BadAnswer(
            f"env.use: {use} must make an environment with the methods {', '.join(METHODS)}, or a program with run; "
            f"{type(env).__name__} lacks {', '.join(missing)}"
        )
    made: Hosted = env
    return made


def _takes(factory: Any, args: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(factory).bind(**args)
    except (TypeError, ValueError):  # ValueError: nothing is known of what it takes
        return False
    return True


def _misfit(factory: Any, args: Mapping[str, Any]) -> str:
    """Which arguments are missing, or too many; '' if that is not known."""
    try:
        has = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return ""
    named = {name: one for name, one in has.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if missing := [name for name, one in named.items() if one.default is one.empty and name not in args]:
        return f"needs {', '.join(missing)}; set env.args.{missing[0]} (got {', '.join(args) or 'no arguments'})"
    if surplus := [name for name in args if name not in named]:
        return f"takes {', '.join(named) or 'no arguments'}, got {', '.join(surplus)}; correct it, or leave it out"
    return ""
