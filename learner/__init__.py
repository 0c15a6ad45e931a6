"""The learner's side of gleaner, and the driver that connects all parts: configuration, driver, trainer, model,
algorithms, commands. The Python interface is `from gleaner import train, sweep, evaluate, plan`.

Importing this package imports gleaner's other packages first, so that no file of the user's is taken for one of them.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.api.calls import SweepResult as SweepResult
    from learner.api.calls import TrainResult as TrainResult
    from learner.api.calls import evaluate as evaluate
    from learner.api.calls import plan as plan
    from learner.api.calls import sweep as sweep
    from learner.api.calls import train as train
    from learner.api.process import InputError as InputError
    from learner.api.process import RunFailed as RunFailed
    from learner.api.process import TrainError as TrainError

HOMES = {
    "InputError": "process",
    "RunFailed": "process",
    "SweepResult": "calls",
    "TrainError": "process",
    "TrainResult": "calls",
    "evaluate": "calls",
    "plan": "calls",
    "sweep": "calls",
    "train": "calls",
}


def _import_the_others() -> None:
    """Imports the packages beside this one, before a file such as rewards.py in the folder of the user's script can be
    imported in their place. A user's module that has such a name and is imported already is kept in
    cluster.own_path.ASIDE, where its attributes are still found. Raises ImportError for a package that is missing."""
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
    file = module.__file__ or next(iter(module.__path__))  # a folder without __init__.py has no __file__
    return Path(file).resolve() == (root / module.__name__ / "__init__.py").resolve()


_import_the_others()


def __getattr__(name: str) -> Any:
    """Imports a name of the Python interface when it is first used: every process of a run imports this package."""
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
