"""Consumer and composition root: groups in, adapters out. From Python: `from learner import train, evaluate, plan`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.api.errors import InputError as InputError
    from learner.api.errors import RunFailed as RunFailed
    from learner.api.errors import TrainError as TrainError
    from learner.api.evaluating import evaluate as evaluate
    from learner.api.planning import plan as plan
    from learner.api.result import TrainResult as TrainResult
    from learner.api.training import train as train

_HOMES = {
    "InputError": "errors",
    "RunFailed": "errors",
    "TrainError": "errors",
    "TrainResult": "result",
    "evaluate": "evaluating",
    "plan": "planning",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    """What the interface has, imported when it is asked for: every process of a run imports this package."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(f"learner.api.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
