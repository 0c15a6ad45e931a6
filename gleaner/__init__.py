"""What `learner` has for Python (train, sweep, evaluate, plan, errors and results), by the name that people look for.

It finds the packages of this project beside itself, whatever learner.py or rewards.py lies in the folder of the script.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner import InputError as InputError
    from learner import RunFailed as RunFailed
    from learner import SweepResult as SweepResult
    from learner import TrainError as TrainError
    from learner import TrainResult as TrainResult
    from learner import evaluate as evaluate
    from learner import plan as plan
    from learner import sweep as sweep
    from learner import train as train

    __version__: str

_ROOT = Path(__file__).parents[1]
_theirs = sys.modules.get("learner")  # a module of the user's, perhaps
if _theirs is not None and Path(_theirs.__file__ or "").resolve() != (_ROOT / "learner" / "__init__.py").resolve():
    for _name in [name for name in sys.modules if name.partition(".")[0] == "learner"]:
        del sys.modules[_name]
else:
    _theirs = None
sys.path.insert(0, str(_ROOT))
try:
    _learner = import_module("learner")
finally:
    sys.path.remove(str(_ROOT))
if _theirs is not None:
    import_module("cluster.own_path").ASIDE["learner"] = _theirs


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from cluster.machine import version_of

        return version_of("gleaner-rl") or "not installed"
    if name not in _learner.HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_learner.HOMES)}")
    return getattr(_learner, name)


def __dir__() -> list[str]:
    return [*globals(), "__version__", *_learner.HOMES]
