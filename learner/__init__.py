"""Consumer and composition root: groups in, adapters out. From Python: `from gleaner import train, evaluate, plan`."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.api.calls import TrainResult as TrainResult
    from learner.api.calls import evaluate as evaluate
    from learner.api.calls import plan as plan
    from learner.api.calls import train as train
    from learner.api.process import InputError as InputError
    from learner.api.process import RunFailed as RunFailed
    from learner.api.process import TrainError as TrainError

HOMES = {
    "InputError": "process",
    "RunFailed": "process",
    "TrainError": "process",
    "TrainResult": "calls",
    "evaluate": "calls",
    "plan": "calls",
    "train": "calls",
}


def _import_the_others() -> None:
    """The packages beside this one, before a file rewards.py in the folder of the user's script can come in their
    place. A module of the user's that has one of their names already stays his, and goes by another way from now on
    (cluster.own_path). Raises ImportError where one cannot be found."""
    root = Path(__file__).parents[1]
    names = ("cluster", "rewards", "rollout")
    aside = {name: sys.modules[name] for name in names if name in sys.modules and not _is_ours(sys.modules[name], root)}
    for name in [name for name in sys.modules if name.partition(".")[0] in aside]:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    try:
        others = [import_module(name) for name in names]
    finally:
        sys.path.remove(str(root))
    if wrong := [one.__name__ for one in others if not _is_ours(one, root)]:
        raise ImportError(f"{', '.join(wrong)}: must be gleaner's packages in {root}; install gleaner-rl again")
    from cluster.own_path import ASIDE

    ASIDE.update(aside)


def _is_ours(module: ModuleType, root: Path) -> bool:
    file = module.__file__ or next(iter(module.__path__))  # without a file: of a folder without __init__.py
    return Path(file).resolve() == (root / module.__name__ / "__init__.py").resolve()


_import_the_others()


def __getattr__(name: str) -> Any:
    """What the interface has, imported when it is asked for: every process of a run imports this package."""
    if name not in HOMES:
        from cluster.own_path import of_users

        try:
            return of_users(__name__, name)
        except AttributeError:
            told = f"module {__name__!r} has no attribute {name!r}; it has {', '.join(HOMES)}"
            raise AttributeError(told) from None
    return getattr(import_module(f"learner.api.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *HOMES]
