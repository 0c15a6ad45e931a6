"""What a run folder says of its run, also while the run still writes to it: metrics, configuration, plan, rollouts."""

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster import files
from cluster.errors import WrongInput
from cluster.reading import ConfigError, Unreadable, check_plain, json_value, mapping_of, read_text
from cluster.telemetry import MetricsFile, number
from learner.config.load import since_moved
from learner.driver import console
from rollout import ledger

REPLAY = "replay.json"  # in the folder of a replay
MOST = 2**19  # bytes of config.yaml, plan.json and replay.json
SHOWN = 2000  # steps of a curve: more than a screen has columns
Column = list[float | None]


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder, as far as it can be read. Letters: S steps that are shown.

    Attributes:
        name: of the folder, behind those above it where another run of the report has the same.
        file: all steps of metrics.jsonl; None where there is no such file.
        steps: [S] ascending, each once: all of them, or of a long run some that lie evenly, with first and last.
        metrics: name -> [S] values, None where a step has none or it was not finite. `at` is seconds since 1970.
        config: config.yaml; plan: plan.json; replay: replay.json. Empty where the file is missing or not whole.
        rollouts: the step files, oldest first.
        phases: of each start of the run that came to its end, seconds of each phase (learner.driver.console.read).
        remarks: sentences on what is missing or was left out.
    """

    name: str
    file: MetricsFile | None
    steps: list[int]
    metrics: dict[str, Column]
    config: dict[str, Any]
    plan: dict[str, Any]
    replay: dict[str, Any]
    rollouts: list[Path]
    phases: list[dict[str, float]]
    remarks: list[str]

    @property
    def of(self) -> int | None:
        """Its last step, as far as one knows before: a run by epochs does not say."""
        of = self.replay.get("to", self.config.get("steps"))
        return of if type(of) is int else None


def begun(folder: Path) -> bool:
    """Whether a run has left anything there to report on."""
    return (folder / "metrics.jsonl").exists() or bool(ledger.steps(folder / "rollouts"))


def read_runs(folder: Path, against: Path | None) -> list[Run]:
    """A run, and the one that it is compared with, told apart by their names. Raises WrongInput."""
    folders = [folder] if against is None else [folder, against]
    runs = [read_run(one) for one in folders]
    parts = [one.resolve().parts for one in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [str(Path(*one[-depth:])) for one in parts]
        if len({*names}) == len(runs):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return runs  # one run against itself


def read_run(folder: Path, *, every: bool = False) -> Run:
    """every: each step counts as shown, however many they are. Raises WrongInput if the folder is not one of a run
    that has begun."""
    if not folder.is_dir():
        raise WrongInput(f"run: must be a run folder such as runs/demo-seed0, got {folder}; check the path")
    if not begun(folder):
        raise WrongInput(
            f"run: {folder} has neither metrics.jsonl nor rollouts/; give a run folder, or wait for its first step"
        )
    remarks: list[str] = []
    rollouts = ledger.steps(folder / "rollouts")
    file = _file(folder / "metrics.jsonl", remarks)
    steps, metrics = ([], {}) if file is None else _curves(file, remarks, every=every)
    replayed = (folder / REPLAY).exists()
    config, replay = _config(folder / "config.yaml", remarks), _mapping(folder / REPLAY, remarks) if replayed else {}
    plan = {} if replayed else _mapping(folder / "plan.json", remarks)  # a replay makes none
    spent = _phases(folder, remarks)
    run = Run(folder.resolve().name, file, steps, metrics, config, plan, replay, rollouts, spent, remarks)
    if replayed:
        remarks.append(_replayed(run))
    elif not files.is_locked(folder):
        remarks.extend(_early(run))
    return run


def _replayed(run: Run) -> str:
    """Nothing tells a replay that goes on from one that was stopped."""
    done = run.steps[-1] if run.steps else 0
    of = run.replay.get("of", "a run")
    return f"This is a replay of {of}, at step {done} of {run.of}. The completions are that run's."


def _early(run: Run) -> list[str]:
    """Of a run that goes on no longer."""
    done, of = run.steps[-1] if run.steps else 0, run.of
    if of is None or done >= of:
        return []
    where = f"at step {done} of {of}" if done else "before its first step"
    how = "The same command goes on from its newest checkpoint, or begins again where there is none."
    return [f"The run ended {where}: it failed or was stopped, which its last lines in the terminal told. {how}"]


def _file(path: Path, remarks: list[str]) -> MetricsFile | None:
    """Lines that are none of a step (the last one, while it is being written) are counted."""
    try:
        file = MetricsFile(path)
    except FileNotFoundError:
        remarks.append(f"{path.name} is missing: no curves.")
        return None
    except Unreadable as error:
        remarks.append(f"{path.name} cannot be read: {error}.")
        return None
    if file.bad:
        told = f"{file.bad} of {file.total} lines hold no whole step (first: line {file.first_bad})"
        remarks.append(f"{path.name}: {told}.")
    return file


def _curves(file: MetricsFile, remarks: list[str], *, every: bool) -> tuple[list[int], dict[str, Column]]:
    chosen = file.steps if every else _evenly(file.steps, file.evaluated())
    steps, metrics = list[int](), dict[str, Column]()
    for step, row in zip(chosen, file.rows(chosen), strict=True):
        if not row:
            continue
        for name in row.keys() - metrics.keys() - {"step"}:
            metrics[name] = [None] * len(steps)
        steps.append(step)
        for name, column in metrics.items():
            column.append(number(row.get(name)))
    if len(chosen) < len(file.steps):
        told = f"{len(chosen):,} of {len(file.steps):,} steps are drawn, evenly spread"
        remarks.append(f"{told}; metrics.jsonl has them all.")
    if len(steps) < len(chosen):
        remarks.append(f"metrics.jsonl: {len(chosen) - len(steps)} of {len(chosen)} lines cannot be read.")
    return steps, dict(sorted(metrics.items()))


def _evenly(steps: list[int], evaluated: list[int]) -> list[int]:
    """At most about SHOWN of the steps, and as many of those with an evaluation, with the first two and the last of
    each, ascending. Which ones goes by their own numbers, so that a page stays as it is while its run goes on."""
    chosen = set()
    for some in (steps, evaluated):
        every = 1
        while len(some) > SHOWN * every:
            every *= 2
        chosen |= {*some[:2], *some[-1:], *some[::every]}
    return sorted(chosen)


def _phases(folder: Path, remarks: list[str]) -> list[dict[str, float]]:
    try:
        return console.read_phases(folder)
    except Unreadable as error:
        remarks.append(f"{console.PHASES_FILE} cannot be read: {error}.")
        return []


def _config(file: Path, remarks: list[str]) -> dict[str, Any]:
    """With the keys of today, by which an older run is compared with others."""
    found = _mapping(file, remarks)
    try:
        return since_moved(found)
    except ConfigError as error:
        remarks.append(f"{file.name} has a setting that cannot be read ({error}).")
        return found


def _mapping(file: Path, remarks: list[str]) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping, as JSON may have it."""
    try:
        text = read_text(file, MOST)
        found = json_value(text, file.name) if file.suffix == ".json" else mapping_of(text)
        if not isinstance(found, dict):
            raise Unreadable(f"it must hold a mapping, got {type(found).__name__}")
        check_plain(found)
    except FileNotFoundError:
        remarks.append(f"{file.name} is missing.")
        return {}
    except (Unreadable, ConfigError) as error:
        remarks.append(f"{file.name} cannot be read; it may be half written ({error}).")
        return {}
    shown: dict[str, Any] = _shown(found)
    return shown


def _shown(value: Any) -> Any:
    """As JSON may have it: keys are text, and so is what is no finite number, or is of YAML alone, such as a date."""
    if isinstance(value, Mapping):
        return {str(key): _shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return f".{value}".replace(".-", "-.")  # as YAML writes it
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
