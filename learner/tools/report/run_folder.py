"""What a run folder says of its run, also while the run still writes to it: metrics, configuration, plan, rollouts."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from learner.driver import phases, run_lock
from rollout import ledger

REPLAY = "replay.json"  # in the folder of a replay
Column = list[float | None]


class ReportError(ValueError):
    """There is nothing to report on, or it cannot be read."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder, as far as it can be read. Letters: S steps in metrics.jsonl.

    Attributes:
        name: of the folder, behind those above it where another run of the report has the same.
        steps: [S] ascending, each once.
        metrics: name -> [S] values, None where a step has none or it was not finite. `at` is seconds since 1970.
        config: config.yaml; plan: plan.json; replay: replay.json. Empty where the file is missing or not whole.
        rollouts: the step files, oldest first.
        phases: of each start of the run that came to its end, seconds of each phase (learner.driver.phases.read).
        remarks: sentences on what is missing or was left out.
    """

    name: str
    steps: list[int]
    metrics: dict[str, Column]
    config: dict[str, Any]
    plan: dict[str, Any]
    replay: dict[str, Any]
    rollouts: list[Path]
    phases: list[dict[str, float]]
    remarks: list[str]

    @property
    def of(self) -> Any:
        """Its last step, as far as one knows before: a run by epochs does not say."""
        return self.replay.get("to", self.config.get("steps"))


def begun(folder: Path) -> bool:
    """Whether a run has left anything there to report on."""
    return (folder / "metrics.jsonl").exists() or bool(ledger.steps(folder / "rollouts"))


def read_runs(folder: Path, against: Path | None) -> list[Run]:
    """A run, and the one that it is compared with, told apart by their names. Raises ReportError."""
    folders = [folder] if against is None else [folder, against]
    runs = [read_run(one) for one in folders]
    parts = [one.resolve().parts for one in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [str(Path(*one[-depth:])) for one in parts]
        if len({*names}) == len(runs):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return runs  # one run against itself


def read_run(folder: Path) -> Run:
    """Raises ReportError if the folder is not one of a run that has begun."""
    if not folder.is_dir():
        raise ReportError(f"run: must be a run folder such as runs/demo-seed0, got {folder}; check the path")
    if not begun(folder):
        raise ReportError(
            f"run: {folder} has neither metrics.jsonl nor rollouts/; give a run folder, or wait for its first step"
        )
    remarks: list[str] = []
    rollouts = ledger.steps(folder / "rollouts")
    rows = _rows(folder / "metrics.jsonl", remarks)
    steps = sorted(rows)
    names = sorted({name for row in rows.values() for name in row} - {"step"})
    metrics = {name: [_number(rows[step].get(name)) for step in steps] for name in names}
    replayed = (folder / REPLAY).exists()
    config, replay = _mapping(folder / "config.yaml", remarks), _mapping(folder / REPLAY, remarks) if replayed else {}
    plan = {} if replayed else _mapping(folder / "plan.json", remarks)  # a replay makes none
    run = Run(folder.resolve().name, steps, metrics, config, plan, replay, rollouts, phases.read(folder), remarks)
    if replayed:
        remarks.append(_replayed(run))
    elif not run_lock.is_held(folder):
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
    if not isinstance(of, int) or done >= of:
        return []
    where = f"at step {done} of {of}" if done else "before its first step"
    how = "The same command goes on from its newest checkpoint, or begins again where there is none."
    return [f"The run ended {where}: it failed or was stopped, which its last lines in the terminal told. {how}"]


def _rows(file: Path, remarks: list[str]) -> dict[int, dict[str, Any]]:
    """Step -> its line. A line that is none of a step (the last one, while it is being written) is left out."""
    if not file.exists():
        remarks.append(f"{file.name} is missing: no curves.")
        return {}
    rows: dict[int, dict[str, Any]] = {}
    bad = []
    lines = file.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and type(found.get("step")) is int:
            rows[found["step"]] = found
        else:
            bad.append(number)
    if bad:
        remarks.append(f"{file.name}: {len(bad)} of {len(lines)} lines hold no whole step (first: line {bad[0]}).")
    return rows


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _mapping(file: Path, remarks: list[str]) -> dict[str, Any]:
    """A YAML or JSON file (which is YAML, too) that holds a mapping."""
    if not file.exists():
        remarks.append(f"{file.name} is missing.")
        return {}
    try:
        text = file.read_text()
        found = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict):
        remarks.append(f"{file.name} cannot be read; it may be half written.")
        return {}
    return found
