"""train(): a run from a script or a notebook."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.yaml_tree import dump
from learner.api.errors import InputError, TrainError
from learner.api.inputs import Inputs
from learner.api.metrics_lines import Metrics, MetricsLines, rows_of
from learner.api.plain import is_bool
from learner.api.process import RunProcess
from learner.api.result import TrainResult, result_of
from learner.driver import process as called_from

if TYPE_CHECKING:
    from learner.config import RunConfig

OnStep = Callable[[Metrics], bool | None]
CHILD = "learner.api.child"
WORDS = ("interrupted: finishing the step and writing a checkpoint", "stopping at once")
METRICS = "metrics.jsonl"
NO_COROUTINE = "on_step: must be a plain function of the metrics of a step; run coroutines inside of it"


def train(
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    rewards: Sequence[Callable[..., Any] | str | Mapping[str, Any]] | None = None,
    dataset: Any = None,
    *,
    eval_dataset: Any = None,
    config: str | os.PathLike[str] | None = None,
    on_step: OnStep | None = None,
    **settings: Any,
) -> TrainResult:
    """Trains a model on rewards, as `python -m learner.main` does, in a process of its own; returns when it is done.

    The same call goes on where the run stopped, and does nothing where it is done.

    Args:
        model: hub name or folder, or the whole section `model` of the configuration.
        rewards: reward functions (rewards.base has the convention, which is TRL's), names as in a configuration file
            (`number`, `my_rewards.py:accuracy`), or mappings with the keys of a reward, whose `use` is one of those.
        dataset: the training problems: a datasets.Dataset, a list of mappings, a path, or a hub name.
        eval_dataset: held-out problems, likewise; None: a part of `dataset`.
        config: a YAML file whose keys are the base of all others.
        on_step: called with each line of metrics.jsonl as it is written, `step` among its keys. False asks the run to
            stop with a checkpoint; the step after it may have begun, and is finished. An exception does the same and
            is raised from here.
        settings: any key of the configuration (docs/configuration.md), as sections or dotted:
            `steps=200, rollout={"num_generations": 8}, **{"learner.lora.rank": 32}`. Where a file names a function or
            a class, that itself may stand.

    Raises:
        InputError: settings or inputs are wrong; one line for each mistake, those of the command line.
        RunFailed: the run failed after it had begun.
        KeyboardInterrupt: the first Ctrl-C finishes the step and writes a checkpoint, the second ends the run at once.
    """
    if wrong := called_from.hidden_package():
        raise InputError(wrong)
    if on_step is not None and (not callable(on_step) or inspect.iscoroutinefunction(on_step)):
        raise InputError(NO_COROUTINE)
    from learner.api.settings import checked, tree_of

    inputs = Inputs()
    datasets = {"dataset": dataset, "eval_dataset": eval_dataset}
    tree = tree_of(config, model, rewards, datasets, settings, inputs)
    run_dir = _placed(checked(tree))
    lines = MetricsLines(run_dir / METRICS)
    given = _written(inputs, run_dir / "inputs", tree)
    with RunProcess(CHILD, ["--config", "/dev/stdin"], given) as process:
        _follow(process, lines, on_step)
        _check(process, inputs)
    return result_of(run_dir, rows_of(run_dir / METRICS))


def _placed(config: "RunConfig") -> Path:
    """The run folder. Raises InputError if it cannot be written."""
    from learner.driver.failure import PreflightError
    from learner.driver.preflight import place_output

    try:
        return place_output(config).run_dir
    except PreflightError as error:
        raise InputError(str(error)) from None


def _written(inputs: Inputs, folder: Path, tree: Mapping[str, Any]) -> str:
    """The configuration as YAML, once what it names is there."""
    try:
        return dump(inputs.write(folder, tree))
    except OSError as error:
        raise InputError(f"output_dir: what the run is given cannot be written: {error}") from error


def _follow(process: RunProcess, lines: MetricsLines, on_step: OnStep | None) -> None:
    """Waits for the end of the run; meanwhile hands its output and metrics on. Raises what `on_step` raised, and
    KeyboardInterrupt after a Ctrl-C, once the run has ended."""
    steps = _Steps(on_step, process)

    def look() -> None:
        for line in lines.new():
            steps.take(line)

    interrupts = process.follow(look, WORDS)
    if steps.error is not None:
        steps.error.add_note(f"on_step raised it; the run has stopped{_where(process.failure())}")
        raise steps.error
    if interrupts == 1:
        raise KeyboardInterrupt(f"the run has stopped{_where(process.failure())}")
    if interrupts:
        raise KeyboardInterrupt("the run was stopped at once; the same call goes on from its last checkpoint")


def _check(process: RunProcess, inputs: Inputs) -> None:
    """Raises what the run that has ended says of its failure; of one that was refused nothing is left."""
    if (failure := process.failure()) is not None:
        if isinstance(failure, InputError):
            inputs.withdraw()
        raise failure


def _where(failure: TrainError | None) -> str:
    return f": {failure}" if failure is not None else " with a checkpoint, from which the same call goes on"


class _Steps:
    """Hands each step's metrics to the user's function; what that says or raises asks the run to stop."""

    def __init__(self, on_step: OnStep | None, process: RunProcess) -> None:
        self.error: BaseException | None = None
        self._on_step, self._process = on_step, process

    def take(self, line: Metrics) -> None:
        if self._on_step is None or self.error is not None:
            return
        try:
            answer = self._on_step(line)
            if inspect.iscoroutine(answer):
                answer.close()
                raise InputError(NO_COROUTINE)
            stop = is_bool(answer) and not answer
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() in it is its author's wish to leave, too
            self.error, stop = error, True
        if stop:
            self._process.interrupt(1)
