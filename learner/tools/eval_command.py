"""What the command line of gleaner eval means, and what is printed."""

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from cluster.files import writing
from cluster.reading import read_yaml
from learner.config import RunConfig, load
from learner.driver.checkpoint import ADAPTER, learned_in
from learner.driver.console import duration
from learner.model.adapter_config import MODEL
from learner.tools.evaluation import Evaluated, evaluate
from learner.tools.reported import reported
from rollout.config import OF_ITS_PATH, DataConfig
from rollout.data import hub

# --data names other problems than a configuration does, which says nothing of how to read them.


def of_other_data() -> list[str]:
    """Settings that undo what the configuration says of its own data; those that the user gives come after them."""
    defaults = {name: DataConfig.model_fields[name].get_default(call_default_factory=True) for name in OF_ITS_PATH}
    return [f"data.{name}={json.dumps(default)}" for name, default in defaults.items()]


# How far an evaluation is: a bar on a terminal, else a line now and then. On standard error, which holds no result.

EVERY_S = 10.0  # seconds between two lines


class EvalProgress:
    """Context manager; `note` prints a line, `done` counts completions."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._count = 0
        self._began = self._told = 0.0  # seconds of time.monotonic

    def __enter__(self) -> "EvalProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def done(self, more: int, total: int) -> None:
        """So many more completions are there, of so many in all; 0 as their generation begins."""
        now = time.monotonic()
        if more == 0:
            self._begin(now, total)
        self._count += more
        if self._bar is not None:
            self._bar.update(self._task, advance=more)
        elif more and now - self._told >= EVERY_S:
            self._told = now
            left = duration((now - self._began) * (total - self._count) / self._count)
            self.note(f"completions {self._count} of {total}, {left} left")

    def _begin(self, now: float, total: int) -> None:
        self._began = self._told = now
        if self._console.is_terminal:
            columns = TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()


NO_REVISION = "model.revision=null"  # that of a configuration says nothing of another model


@dataclass(frozen=True, slots=True)
class Asked:
    """What learner.tools.commands.eval takes, under its names."""

    overrides: list[str] | None
    config: str | None
    run_folder: Path | None
    model: str | None
    adapter: str | None
    data: str | None
    split: str | None
    prompt: str | None
    reward: list[str] | None
    samples: int
    temperature: float | None
    limit: int | None
    threshold: float
    as_json: bool
    save: Path | None


def run(asked: Asked) -> int:
    """Exit code: as of `reported`."""
    return reported(lambda: _evaluate(asked))


def _evaluate(asked: Asked) -> None:
    config, adapter = _meant(asked)
    _check_save(asked.save)
    if not math.isfinite(asked.threshold):
        raise load.ConfigError(f"--threshold: must be a number, got {asked.threshold}")
    hub.settle([config.model.path, config.data.path, config.data.eval.path])
    with EvalProgress() as progress:
        result = evaluate(
            config, adapter=adapter, held_out=asked.data is None, samples=asked.samples, limit=asked.limit,
            threshold=asked.threshold, note=progress.note, done=progress.done,
        )  # fmt: skip
    if asked.as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show(result)
    if asked.save is not None:
        with writing(asked.save):
            pq.write_table(result.rows, asked.save)


def _check_save(file: Path | None) -> None:
    """Before anything is generated. Raises ConfigError."""
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise load.ConfigError(f"--save: must be a file in a folder that is there and writable, got {file}")
    if file.suffix != ".parquet":
        raise load.ConfigError(f"--save: writes Parquet, got {file}; give a name that ends in .parquet")


def show(result: Evaluated) -> None:
    """The table of a person."""
    table = Table("metric", "value", "95 % interval", "by", "problems")
    for name, one in result.metrics.items():
        table.add_row(name, f"{one.value:.3f}", one.between(" .. "), one.method, str(one.problems))
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True)
    on = f" with {result.adapter}" if result.adapter else ""
    console.print(f"{result.model}{on}, {result.data} ({result.part}), problems: {result.problems}", markup=False)
    console.print(f"score: {result.reward or 'the rewards of the environment'}, {result.seconds:.0f} s", markup=False)
    console.print(table)
    console.print(f"cut off at rollout.max_completion_length: {result.truncated:.1%} of the completions")
    for note in result.notes:
        console.print(note, markup=False)
    if result.unscored:
        console.print(
            f"{result.unscored} problems have a completion without a score, which counts nowhere: each metric is over "
            "the problems with scores enough for it"
        )
    if result.failed:
        console.print(
            f"a reward function failed on {result.failed} completions; where it is the score, they count as 0"
        )


def _meant(asked: Asked) -> tuple[RunConfig, str | None]:
    """The configuration, and the adapter on its model. Raises ConfigError."""
    if asked.run_folder is not None and asked.config is not None:
        raise load.ConfigError("--run: does not go with --config, which it has in its folder; give one of them")
    if asked.split is not None and asked.data is None:
        raise load.ConfigError(
            "--split: is of --data; name the source with --data as well, or for other held-out problems of a "
            f"configuration give data.eval.split={asked.split}"
        )
    folder, file, changed, adapter = asked.run_folder, asked.config, _overrides(asked), asked.adapter
    if folder is not None:
        file = str(folder / "config.yaml")
        if not Path(file).exists():
            raise load.ConfigError(f"--run: must be a run folder such as runs/demo-seed0, got {folder}; check the path")
        learned = learned_in(folder)
        if asked.model is None and learned == folder / MODEL:
            changed[:0] = [f"model.path={learned}", NO_REVISION]
        elif asked.model is None and adapter is None:
            adapter = _adapter(learned, folder)
    if file is None:
        _check_named(asked)
    elif asked.model is not None and not _names(file, asked.model):
        changed[:0] = [NO_REVISION]
    return load.load_config(file, changed, of_a_run=folder is not None), adapter


def _names(file: str | Path, model: str) -> bool:
    """Whether that is the model of a configuration."""
    own = read_yaml(Path(file)).get("model")
    return isinstance(own, dict) and own.get("path") == model


def _check_named(asked: Asked) -> None:
    """Whether all is named that no file names."""
    wanted = {"--model": ("model", asked.model), "--data": ("data", asked.data), "--reward": ("rewards", asked.reward)}
    keys = {override.removeprefix("--").replace("=", ".").partition(".")[0] for override in asked.overrides or []}
    if missing := [name for name, (key, value) in wanted.items() if not value and key not in keys]:
        raise load.ConfigError(
            f"{', '.join(missing)}: required where no configuration names it; give one with --config FILE or --run DIR"
        )


def _adapter(learned: Path | None, folder: Path) -> str:
    if learned is None:
        raise load.ConfigError(
            f"--run: {folder} has neither {ADAPTER}/ nor {MODEL}/, so it has no checkpoint yet; for its base give "
            f"--config {folder / 'config.yaml'}"
        )
    return str(learned)


def _overrides(asked: Asked) -> list[str]:
    """The options as settings, behind them those that were given as such."""
    given = {
        "model.path": asked.model, "data.path": asked.data, "data.split": asked.split, "data.prompt": asked.prompt,
        "rollout.temperature": asked.temperature,
    }  # fmt: skip
    changed = [f"{key}={value}" for key, value in given.items() if value is not None]
    if asked.reward:
        changed.append(f"rewards={json.dumps([{'use': use} for use in asked.reward])}")
    if asked.data is not None:
        changed = [*of_other_data(), f"data.size={asked.limit or 'null'}", *changed]
    return [*changed, *(asked.overrides or [])]
