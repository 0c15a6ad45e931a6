"""evaluate(): a model or an adapter on data, as `gleaner eval` does it."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.api.errors import InputError
from learner.api.inputs import Inputs
from learner.api.process import RunProcess
from learner.api.result import TrainResult, result_of
from learner.driver import process as called_from

if TYPE_CHECKING:
    from learner.tools.evaluation import Evaluated

CHILD = "learner.api.eval_child"
WORDS = ("interrupted: the evaluation ends", "stopping at once")


def evaluate(
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    rewards: Sequence[Callable[..., Any] | str | Mapping[str, Any]] | None = None,
    dataset: Any = None,
    *,
    adapter: str | os.PathLike[str] | None = None,
    run: TrainResult | str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    samples: int = 0,
    limit: int | None = None,
    threshold: float = 1.0,
    **settings: Any,
) -> "Evaluated":
    """Scores a model on data by the generators and reward functions of a run, in a process of its own.

    Args:
        model, rewards, config, settings: as in `train`.
        dataset: the problems, as in `train`, all of them; None: those that such a run holds out.
        adapter: folder in PEFT's format.
        run: what `train` returned, or a run's folder: its configuration, and what it has learned; with `model` that
            one is scored in its place.
        samples: completions of each problem beside the greedy one, at rollout.temperature.
        limit: the first so many problems.
        threshold: the score from which on a completion is correct for pass@k.

    Returns:
        `metrics` by name (greedy, mean@K, pass@k, majority@K), each with `value`, the mean over so many `problems`, and
        `low` and `high`, its 95 % interval; `rows`, an Arrow table; and what learner.tools.evaluation.Evaluated says.

    Raises:
        InputError, RunFailed, KeyboardInterrupt: as `train`.
    """
    if wrong := called_from.hidden_package():
        raise InputError(wrong)
    from learner.api.settings import checked, tree_of

    _check_given(samples, limit, threshold, None if isinstance(run, TrainResult) else run, adapter)
    if run is not None:
        folder = run.run_dir if isinstance(run, TrainResult) else Path(run)
        config = _configuration(folder, config)
        if model is None:
            model, adapter = _learned(folder, adapter)
    inputs = Inputs()
    given = settings if dataset is None else _whole(settings, limit)
    tree = tree_of(config, model, rewards, {"dataset": dataset}, given, inputs)
    checked(tree)
    path = None if adapter is None else os.fspath(adapter)
    asked = {"adapter": path, "held_out": dataset is None, "samples": samples, "limit": limit, "threshold": threshold}
    with tempfile.TemporaryDirectory(prefix="gleaner-eval-") as made:
        return _evaluated(Path(made), {"config": inputs.write(Path(made), tree), **asked})


def _evaluated(folder: Path, given: Mapping[str, Any]) -> "Evaluated":
    """Raises what `evaluate` does."""
    with RunProcess(CHILD, [str(folder)], json.dumps(given)) as process:
        if process.follow(lambda: None, WORDS):
            raise KeyboardInterrupt("the evaluation was stopped")
        if (failure := process.failure()) is not None:
            raise failure
    import pyarrow.parquet as pq

    from learner.api.eval_child import RESULT, ROWS
    from learner.tools.eval_scores import Estimate
    from learner.tools.evaluation import Evaluated

    told = json.loads((folder / RESULT).read_text())
    metrics = {name: Estimate(**one) for name, one in told.pop("metrics").items()}
    return Evaluated(**told, metrics=metrics, rows=pq.read_table(folder / ROWS))


def _whole(settings: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    """With all of the data set, however much of its own a run's file takes, unless the settings say how much."""
    section = settings.get("data")
    said = isinstance(section, Mapping) and "size" in section
    return dict(settings) if said else {"data.size": limit, **settings}


def _check_given(samples: int, limit: int | None, threshold: float, run: Any, adapter: Any) -> None:
    for name, value in (("run", run), ("adapter", adapter)):
        if value is not None and not isinstance(value, str | os.PathLike):
            raise InputError(f"{name}: must be a folder, got {type(value).__name__}")
    if not isinstance(samples, int) or samples < 0:
        raise InputError(f"samples: must be a whole number from 0, got {samples!r}")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise InputError(f"limit: must be a whole number from 1, or None for all, got {limit!r}")
    if not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise InputError(f"threshold: must be a number, got {threshold!r}")


def _configuration(folder: Path, given: str | os.PathLike[str] | None) -> Path:
    """The file that a run has written. Raises InputError where there is none, and where another is given beside it."""
    if given is not None:
        raise InputError("run: does not go with config, which it has in its folder; give one of them")
    file = folder / "config.yaml"
    if not file.is_file():
        raise InputError(f"run: must be what train returned, or a run folder such as runs/run, got {folder}; check it")
    return file


def _learned(folder: Path, adapter: str | os.PathLike[str] | None) -> tuple[Path | None, str | os.PathLike[str] | None]:
    """Model and adapter as a run has left them; a given adapter counts. Raises InputError where there is neither."""
    found = result_of(folder, [])
    adapter = found.adapter if adapter is None else adapter
    if found.model is None and adapter is None:
        raise InputError(
            f"run: {folder} has neither adapter/ nor model/, so it has no checkpoint yet; for its base give "
            "config= and its config.yaml"
        )
    return found.model, adapter
