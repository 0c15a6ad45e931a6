"""Consumer and composition root: groups in, adapters out. From Python: `from gleaner import train, evaluate, plan`."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.api.errors import InputError as InputError
    from learner.api.errors import RunFailed as RunFailed
    from learner.api.errors import TrainError as TrainError
    from learner.api.evaluating import evaluate as evaluate
    from learner.api.planning import plan as plan
    from learner.api.result import TrainResult as TrainResult
    from learner.api.training import train as train

HOMES = {
    "InputError": "errors",
    "RunFailed": "errors",
    "TrainError": "errors",
    "TrainResult": "result",
    "evaluate": "evaluating",
    "plan": "planning",
    "train": "training",
}


def _import_the_others() -> None:
    """The packages beside this one, before a file rewards.py in the folder of the user's script can come in their
    place. Raises ImportError where one has: it may be in use, and there is one module of a name."""
    root = Path(__file__).parents[1]
    sys.path.insert(0, str(root))
    try:
        others = [import_module(name) for name in ("cluster", "rewards", "rollout")]
    finally:
        sys.path.remove(str(root))
    for module in others:
        file = module.__file__ or next(iter(module.__path__))  # without a file: of a folder without __init__.py
        if Path(file).resolve() != (root / module.__name__ / "__init__.py").resolve():
            raise ImportError(
                f"{module.__name__}: must be gleaner's package in {root}, but {file} was imported by this name before; "
                f"rename it, or import nothing of it and name functions by the file: '{module.__name__}.py:function'"
            )


_import_the_others()


def __getattr__(name: str) -> Any:
    """What the interface has, imported when it is asked for: every process of a run imports this package."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(HOMES)}")
    return getattr(import_module(f"learner.api.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *HOMES]
