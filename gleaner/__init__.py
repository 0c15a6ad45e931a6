"""What `learner` has for Python (train, evaluate, plan, their errors and results), by the name that people look for.

It finds the packages of this project beside itself, whatever learner.py or rewards.py lies in the folder of the script.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner import InputError as InputError
    from learner import RunFailed as RunFailed
    from learner import TrainError as TrainError
    from learner import TrainResult as TrainResult
    from learner import evaluate as evaluate
    from learner import plan as plan
    from learner import train as train

    __version__: str

_ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, _ROOT)
try:
    _learner = import_module("learner")
finally:
    sys.path.remove(_ROOT)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from cluster.installed import version_of

        return version_of("gleaner-rl") or "not installed"
    if name not in _learner.HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_learner.HOMES)}")
    return getattr(_learner, name)


def __dir__() -> list[str]:
    return [*globals(), "__version__", *_learner.HOMES]
