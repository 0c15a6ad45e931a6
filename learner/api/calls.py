"""The functions train(), evaluate() and plan(), with which a script or a notebook does what the commands do."""

import inspect
import json
import math
import numbers
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.reading import dump, json_value, lines, opened
from cluster.telemetry import METRICS_FILE
from learner.api.process import InputError, RunProcess, TrainError
from learner.api.settings import Inputs, is_bool
from learner.driver import process as called_from
from learner.driver.checkpoint import learned_in
from learner.model.adapter_config import MODEL

if TYPE_CHECKING:
    from learner.config import RunConfig
    from learner.tools.evaluation import Evaluated

# Reading metrics.jsonl while a run writes it.


Metrics = dict[str, float | None]  # the metrics of one step; None stands for a number that is not finite


class MetricsLines:
    """Gives the lines that a run adds to metrics.jsonl, each once. A resumed run replaces the file by one without the
    steps that it repeats, so lines that were seen already are skipped."""

    def __init__(self, path: Path) -> None:
        """Marks the lines that exist already as seen: they are not of the run that is about to start."""
        self._path = path
        self._seen: set[bytes] = set()
        self._inode, self._offset = -1, 0
        self.new()

    def new(self) -> list[Metrics]:
        """The lines that were added since the last call. A line that is not complete is left for the next call."""
        try:
            with opened(self._path) as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        added = [line for line in whole.splitlines() if line not in self._seen]
        self._seen.update(added)
        return [json_value(line, str(self._path)) for line in added]


def rows_of(path: Path) -> list[Metrics]:
    """The metrics of every line of the file; empty where there is no file."""
    return [json_value(line, str(path)) for _, line in lines(path)] if path.exists() else []


# The result of `train`.

HELD_OUT = "eval/"


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run that is done, or was stopped with a checkpoint."""

    run_dir: Path
    adapter: Path | None  # folder of the adapter in PEFT's format; None after full fine-tuning
    model: Path | None  # folder of the whole model after full fine-tuning, else None
    metrics: list[Metrics] = field(repr=False)
    """The metrics of each step of the whole run, with the key `step`; docs/metrics.md explains them."""

    @property
    def before(self) -> Metrics:
        """The metrics of the first evaluation, such as `eval/accuracy`; empty where no problems were held out."""
        return next(self._held_out(), {})

    @property
    def after(self) -> Metrics:
        """The metrics of the newest evaluation."""
        return list(self._held_out())[-1] if self.before else {}

    def _repr_html_(self) -> str:
        """What a notebook shows: held-out scores and the reward, before and after, as numbers and curves, the folder of
        the result, and the best completion of the first and of the last step."""
        from learner.api import shown

        steps = [row for row in self.metrics if "reward/mean" in row]
        after = self.after
        found = [(name, value, after.get(name)) for name, value in self.before.items() if name != "step"]
        if steps:
            found.insert(0, ("reward/mean", steps[0]["reward/mean"], steps[-1]["reward/mean"]))
        rows = [
            [name, f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}"]
            for name, first, last in found
            if first is not None and last is not None
        ]
        head = f"{self.run_dir.name}: {len(steps)} steps; {self.adapter or self.model or 'nothing published'}"
        told = shown.table([["", "first", "last", "change"], *rows])
        return f"<p>{escape(head)}</p>{told}{shown.curves(self.metrics)}{shown.examples(self.run_dir)}"

    @property
    def advice(self) -> list[str]:
        """The sentences that are printed at the end of a run whose reward has parted from a watch, or without a
        training signal: in its last steps nearly all completions were cut off, no token was trained on, or all
        completions had the same reward. Empty where there is none, or where the run folder no longer exists."""
        from learner.config import load
        from learner.driver.metrics import RewardWatch, SignalWatch

        file = self.run_dir / "config.yaml"
        if not file.is_file():
            return []
        config = load.load_config(str(file), [])
        watch = SignalWatch(config)
        for row in self.metrics:
            if row["step"]:
                watch.add(row)
            else:
                watch.evaluated(row)
        return [*RewardWatch(config.rewards, self.run_dir).advice(), *watch.advice()]

    def _held_out(self) -> Iterator[Metrics]:
        for row in self.metrics:
            scores = {name: value for name, value in row.items() if name.startswith(HELD_OUT)}
            if scores:
                yield {"step": row["step"], **scores}


def result_of(run_dir: Path, rows: list[Metrics]) -> TrainResult:
    """The result of the run in a folder. rows: its metrics."""
    learned = learned_in(run_dir)
    whole = learned == run_dir / MODEL
    return TrainResult(run_dir, None if whole else learned, learned if whole else None, rows)


# train().

OnStep = Callable[[Metrics], bool | None]
CHILD = "learner.api.child"
WORDS = ("interrupted: finishing the step and writing a checkpoint", "stopping at once")
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
    """Trains a model on rewards, as `gleaner train` does, in a process of its own; returns when the run has ended.

    The same call resumes a run that was stopped, and does nothing if the run is done.

    Args:
        model: hub name or folder, or a mapping with the keys of the section `model`.
        rewards: a list of reward functions (rewards.base has their signature, which is TRL's), of names as in a
            configuration file (`number`, `my_rewards.py:accuracy`), or of mappings with the keys of a reward, in which
            `use` is such a function or name.
        dataset: the training problems: a datasets.Dataset, a list of mappings, a path, or a hub name.
        eval_dataset: held-out problems, given in the same way; None: a part of `dataset` is held out.
        config: a YAML file with settings; the arguments replace those of the same keys.
        on_step: called with the metrics of each step, `step` among its keys, when the run writes them. If it returns
            False, the run stops with a checkpoint; the next step may have begun, and is finished first. An exception
            stops the run in the same way, and is raised from here.
        settings: any key of the configuration (docs/keys.md), as a section or dotted:
            `steps=200, rollout={"num_generations": 8}, **{"learner.lora.rank": 32}`. Where a file names a function or
            a class, the function or class itself may be given.

    Raises:
        InputError: settings or inputs are wrong; the text has a line for each mistake, as on the command line.
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
    lines = MetricsLines(run_dir / METRICS_FILE)
    given = _written(inputs, run_dir / "inputs", tree)
    with RunProcess(CHILD, ["train", "--config", "/dev/stdin"], given) as process:
        _follow(process, lines, on_step)
        _check(process, inputs)
    return result_of(run_dir, rows_of(run_dir / METRICS_FILE))


def _placed(config: "RunConfig") -> Path:
    """The run folder. Raises InputError if it cannot be written."""
    from cluster.errors import WrongInput
    from learner.driver.preflight import place_output

    try:
        return place_output(config).run_dir
    except WrongInput as error:
        raise InputError(str(error)) from None


def _written(inputs: Inputs, folder: Path, tree: Mapping[str, Any]) -> str:
    """Writes the functions and rows that the configuration names, and returns the configuration as YAML."""
    try:
        return dump(inputs.write(folder, tree))
    except OSError as error:
        raise InputError(f"output_dir: what the run is given cannot be written: {error}") from error


def _follow(process: RunProcess, lines: MetricsLines, on_step: OnStep | None) -> None:
    """Waits for the end of the run; meanwhile prints its output, and calls `on_step` with its metrics. When the run has
    ended, raises what `on_step` raised, or KeyboardInterrupt after a Ctrl-C."""
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
    """Raises the failure of a run that has ended, if it failed; removes its files first if its inputs were wrong."""
    if (failure := process.failure()) is not None:
        if isinstance(failure, InputError):
            inputs.withdraw()
        raise failure


def _where(failure: TrainError | None) -> str:
    return f": {failure}" if failure is not None else " with a checkpoint, from which the same call goes on"


class _Steps:
    """Calls the user's function with each step's metrics, and stops the run if it returns False or raises.

    error: the exception that it raised, or None.
    """

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
        except BaseException as error:  # sys.exit() in the function is to stop the run, too
            self.error, stop = error, True
        if stop:
            self._process.interrupt(1)


# sweep().


@dataclass(frozen=True, slots=True)
class SweepRun(TrainResult):
    """One run of a sweep: a TrainResult, with what has become of it.

    given: its own settings, as text. state: done, stopped or dropped, each with a checkpoint, or failed, for the reason
    `error`.
    """

    given: Mapping[str, str]
    state: str
    error: str


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep. folder: holds those of the runs. runs: by name."""

    folder: Path
    runs: dict[str, SweepRun]

    def _repr_html_(self) -> str:
        """What a notebook shows: a line for each run, with held-out accuracy before and after."""
        from learner.api import shown

        rows = [["run", "state", "eval/accuracy first", "last"]]
        for name, run in self.runs.items():
            scores = [one.get("eval/accuracy") for one in (run.before, run.after)]
            rows.append([name, run.state, *("" if score is None else f"{score:.3f}" for score in scores)])
        return shown.table(rows)


def sweep(
    values: Mapping[str, Sequence[Any]],
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    rewards: Sequence[Callable[..., Any] | str | Mapping[str, Any]] | None = None,
    dataset: Any = None,
    *,
    eval_dataset: Any = None,
    config: str | os.PathLike[str] | None = None,
    zipped: bool = False,
    keep: int | None = None,
    **settings: Any,
) -> SweepResult:
    """Trains several runs side by side on one generator and one learner, as `gleaner sweep` does, in a process of its
    own; returns when all have ended. The same call goes on with runs that were stopped.

    Args:
        values: dotted key -> the values that it has in different runs, plain ones as a file would hold them.
        zipped: whether the first values of all keys make a run, the second ones the next, and so on, instead of all
            combinations.
        keep: stop early by successive halving, until so many runs are left; None: all go on to their ends.
        model, rewards, dataset, eval_dataset, config, settings: what all runs have, as in `train`.

    Raises:
        InputError, KeyboardInterrupt: as `train`. RunFailed: the sweep failed as a whole; a run that fails by itself is
            in the result.
    """
    if wrong := called_from.hidden_package():
        raise InputError(wrong)
    from learner.api.settings import checked, tree_of
    from learner.tools.sweep import FILE

    words = [f"{key}={','.join(map(_as_word, _several(key, given)))}" for key, given in values.items()]
    words += ["--zip"] * zipped + ([] if keep is None else [f"--keep={keep}"])
    inputs = Inputs()
    tree = tree_of(config, model, rewards, {"dataset": dataset, "eval_dataset": eval_dataset}, settings, inputs)
    folder = checked(tree).sweep_dir
    with tempfile.TemporaryDirectory(prefix="gleaner-sweep-") as made:
        file = Path(made) / "config.yaml"
        file.write_text(_written(inputs, folder / "inputs", tree))
        with RunProcess(CHILD, ["sweep", str(file), *words], "") as process:
            if process.follow(lambda: None, WORDS):
                raise KeyboardInterrupt(f"the runs have stopped{_where(process.failure())}")
            failure = process.failure()
    found: dict[str, Any] = {"ended": False}
    if (folder / FILE).exists():
        found = json_value((folder / FILE).read_bytes(), FILE)
    if isinstance(failure, InputError):
        inputs.withdraw()
    if failure is not None and (isinstance(failure, InputError) or not found["ended"]):
        raise failure  # else runs of it have failed, and the sweep has come to its end
    return SweepResult(folder, {name: _swept(folder / name, found["runs"][name]) for name in found["newest"]})


def _several(key: str, given: Any) -> Sequence[Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
        raise InputError(f"values: {key}: must be a list of values, got {given!r:.80}")
    return given


def _as_word(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        kind = type(value).__name__
        raise InputError(f"values: must be plain values, as a file would hold them, got {kind}") from None


def _swept(run_dir: Path, told: Mapping[str, Any]) -> SweepRun:
    found = result_of(run_dir, rows_of(run_dir / METRICS_FILE))
    state = {"given": told["given"], "state": told["state"], "error": told.get("error", "")}
    return SweepRun(found.run_dir, found.adapter, found.model, found.metrics, **state)


# evaluate().

EVALUATION_WORDS = ("interrupted: the evaluation ends", "stopping at once")


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
    """Scores a model or an adapter on data, as `gleaner eval` does, with generators and reward functions as in a run,
    in a process of its own.

    Args:
        model, rewards, config, settings: as in `train`.
        dataset: the problems, given as in `train`, all of which are used; None: those that a run with these settings
            holds out.
        adapter: folder of an adapter in PEFT's format.
        run: what `train` returned, or a run's folder, from which the configuration and the adapter or model are taken.
            If `model` is given, it is scored instead.
        samples: number of completions of each problem beside the greedy one, sampled at rollout.temperature.
        limit: number of problems to use, the first ones; None: all.
        threshold: least score of a completion that counts as correct for pass@k.

    Returns:
        An Evaluated (learner.tools.evaluation): `metrics` by name (greedy, mean@K, pass@k, majority@K), each with its
        mean `value` over `problems` problems and the bounds `low` and `high` of its 95 % interval; `rows`, an Arrow
        table of the completions; and more.

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
    """Runs the evaluation in a process of its own, which writes its result into `folder`. Raises as `evaluate`."""
    with RunProcess(CHILD, ["evaluate", str(folder)], json.dumps(given)) as process:
        if process.follow(lambda: None, EVALUATION_WORDS):
            raise KeyboardInterrupt("the evaluation was stopped")
        if (failure := process.failure()) is not None:
            raise failure
    import pyarrow.parquet as pq

    from learner.api.child import RESULT, ROWS
    from learner.tools.evaluation import Estimate, Evaluated

    told = json.loads((folder / RESULT).read_text())
    metrics = {name: Estimate(**one) for name, one in told.pop("metrics").items()}
    return Evaluated(**told, metrics=metrics, rows=pq.read_table(folder / ROWS))


def _whole(settings: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    """The settings, with data.size for all of the dataset or its first `limit` rows, unless they contain data.size
    already: that of a configuration file is meant for the file's own data."""
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
    """The configuration file in a run's folder. Raises InputError if there is none, or if `config` was given, too."""
    if given is not None:
        raise InputError("run: does not go with config, which it has in its folder; give one of them")
    file = folder / "config.yaml"
    if not file.is_file():
        raise InputError(f"run: must be what train returned, or a run folder such as runs/run, got {folder}; check it")
    return file


def _learned(folder: Path, adapter: str | os.PathLike[str] | None) -> tuple[Path | None, str | os.PathLike[str] | None]:
    """Model and adapter of a run; `adapter` replaces the run's if given. Raises InputError if there is neither."""
    found = result_of(folder, [])
    adapter = found.adapter if adapter is None else adapter
    if found.model is None and adapter is None:
        raise InputError(
            f"run: {folder} has neither adapter/ nor model/, so it has no checkpoint yet; for its base give "
            "config= and its config.yaml"
        )
    return found.model, adapter


# plan().

# Required settings that do not affect memory, for a configuration that leaves them out.
STAND_INS = {"data": {"path": "rg:chain_sum"}, "rewards": [{"use": "number"}]}
SLICES = {"generator": 0.5, "learner": 0.5}


def plan(model: str | os.PathLike[str] | Mapping[str, Any], gpu: str | float, **settings: Any) -> list[dict[str, Any]]:
    """Plans the memory of a model on a card, as `gleaner plan` does.

    Args:
        model: a name of the planner's table or a folder with a config.json, or a mapping with the keys of the section
            `model`.
        gpu: a card or its size: "rtx4090", 24 (GB as sold), "24GiB". On a card without bfloat16 the plan is for
            float16.
        settings: keys of the configuration as in `train`; those that do not affect memory may be left out. Without
            `cluster.gpus`, generator and learner are two slices of the card.

    Returns:
        A row for what the planner chooses, and a row with the least memory that each way of training needs. Their keys
        are `model`, `params`, `method` ("chosen" in the first row), `fits`, and the numbers of `gleaner plan --json`,
        in bytes. If the choice does not fit, it has `needs` and `advice` instead of the numbers.

    Raises:
        InputError: the model, the card or a setting is wrong.
    """
    from cluster.memory.search import least
    from learner.api import shown
    from learner.api.settings import Inputs, checked, tree_of
    from learner.driver import memory
    from learner.tools.plan import able, asked_for, dtype_of, methods, no_bfloat16, shape_at, to_dict

    try:
        card = memory.card_size(f"{float(gpu):g}" if isinstance(gpu, numbers.Real) else str(gpu))
    except ValueError as error:
        raise InputError(f"gpu: {error}") from None
    old = no_bfloat16(card)
    config = checked(_with_defaults(tree_of(None, model, None, {}, {**STAND_INS, **settings}, Inputs()), old=old))
    try:
        [shape] = able([shape_at(config.model.path)], card)
    except (ValueError, OSError) as error:
        raise InputError(str(error).removeprefix("--")) from None
    found = memory.planned(config, shape, card.bytes, card.card)
    work = memory.workload(config, config.rollout.sequences)
    wish = memory.wish_of(config, memory.layouts(config))
    rows = {"chosen": to_dict(found[0] if isinstance(found, tuple) else found)}
    for name, method in methods(shape, ppo=config.learner.algorithm == "ppo", old=old).items():
        own = asked_for(wish, method, dtype_of(method, wish.dtype, old=old))
        if own.base == "none" or own.dtype != "float32":  # a base in 4 or 8 bits needs a 16-bit type
            rows[name] = to_dict(least(shape, card.bytes, work, own))
    each = ({"model": shape.name, "params": shape.params, "method": name, **row} for name, row in rows.items())
    return shown.PlanRows(each)


def _with_defaults(tree: dict[str, Any], *, old: bool) -> dict[str, Any]:
    """Sets the defaults of `plan`: both roles on one card, and another dtype on a card without bfloat16 (`old`)."""
    if isinstance(cluster := tree.setdefault("cluster", {}), dict):
        cluster.setdefault("gpus", SLICES)
    if old:
        learner = tree.get("learner")
        whole = isinstance(learner, dict) and learner.get("mode") == "full"
        tree["model"].setdefault("dtype", "float32" if whole else "float16")  # learner.mode=full refuses float16
    return tree
