"""Reads a run folder, and summarises one or two runs for a report: headline, curves, memory, time and differing
settings, all but the completions."""

import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from pydantic import ValidationError

from cluster import files
from cluster.errors import WrongInput
from cluster.reading import check_plain, json_value, mapping_of, read_text
from cluster.telemetry import METRICS_FILE, MetricsFile, number
from cluster.trackers import dotted
from learner.config.load import since_moved
from learner.driver import console
from rewards.config import RewardConfig
from rewards.watch import Series, findings, sentence
from rollout import ledger

# Reading a run folder, also while the run still writes to it.

REPLAY = "replay.json"  # file in the folder of a replay
MOST = 2**19  # most bytes of config.yaml, plan.json and replay.json
SHOWN = 2000  # most steps of a curve: more than a screen has columns
Column = list[float | None]


@dataclass(frozen=True, slots=True)
class Run:
    """What could be read of a run folder. Letters: S steps that are shown.

    Attributes:
        name: name of the folder; with folders above it if another run of the report has the same name.
        file: all steps of metrics.jsonl; None if there is no such file.
        steps: [S] ascending: all steps, or for a long run evenly spread ones, with the first and the last.
        metrics: name -> [S] values; None if a step has no value, or one that is not finite. `at`: seconds since 1970.
        config, plan, replay: contents of config.yaml, plan.json and replay.json; empty if missing or not whole.
        rollouts: the step files, oldest first.
        phases: for each start of the run that has ended, seconds of each phase (learner.driver.console.read_phases).
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
        """The last step that is planned; None if it is not known, as for a run by epochs."""
        of = self.replay.get("to", self.config.get("steps"))
        return of if type(of) is int else None


def begun(folder: Path) -> bool:
    """Whether the folder has anything to report on."""
    return (folder / METRICS_FILE).exists() or bool(ledger.steps(folder / "rollouts"))


def read_runs(folder: Path, against: Path | None) -> list[Run]:
    """Returns a run, and the run that it is compared with, under different names. Raises WrongInput."""
    folders = [folder] if against is None else [folder, against]
    runs = [read_run(one) for one in folders]
    parts = [one.resolve().parts for one in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [str(Path(*one[-depth:])) for one in parts]
        if len({*names}) == len(runs):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return runs  # a run is compared with itself


def read_run(folder: Path, *, every: bool = False) -> Run:
    """Reads a run folder. every: whether all steps are shown, however many. Raises WrongInput if the folder is not that
    of a run that has begun."""
    if not folder.is_dir():
        raise WrongInput(f"run: must be a run folder such as runs/demo-seed0, got {folder}; check the path")
    if not begun(folder):
        raise WrongInput(
            f"run: {folder} has neither metrics.jsonl nor rollouts/; give a run folder, or wait for its first step"
        )
    remarks: list[str] = []
    rollouts = ledger.steps(folder / "rollouts")
    file = _file(folder / METRICS_FILE, remarks)
    steps, metrics = ([], {}) if file is None else _curves(file, remarks, every=every)
    replayed = (folder / REPLAY).exists()
    config, replay = _config(folder / "config.yaml", remarks), _mapping(folder / REPLAY, remarks) if replayed else {}
    plan = {} if replayed else _mapping(folder / "plan.json", remarks)  # a replay has no plan
    spent = _phases(folder, remarks)
    run = Run(folder.resolve().name, file, steps, metrics, config, plan, replay, rollouts, spent, remarks)
    if replayed:
        remarks.append(_replayed(run))
    elif not files.is_locked(folder):
        remarks.extend(_early(run))
    return run


def _replayed(run: Run) -> str:
    """Returns a remark on a replay. Whether it still goes on or was stopped cannot be known."""
    done = run.steps[-1] if run.steps else 0
    of = run.replay.get("of", "a run")
    return f"This is a replay of {of}, at step {done} of {run.of}. The completions are that run's."


def _early(run: Run) -> list[str]:
    """Returns a remark if a run, which is no longer going on, ended before its last step."""
    done, of = run.steps[-1] if run.steps else 0, run.of
    if of is None or done >= of:
        return []
    where = f"at step {done} of {of}" if done else "before its first step"
    how = "The same command goes on from its newest checkpoint, or begins again where there is none."
    return [f"The run ended {where}: it failed or was stopped, which its last lines in the terminal told. {how}"]


def _file(path: Path, remarks: list[str]) -> MetricsFile | None:
    """Opens metrics.jsonl, with a remark on lines that hold no whole step, such as a last line that is being
    written."""
    try:
        file = MetricsFile(path)
    except FileNotFoundError:
        remarks.append(f"{path.name} is missing: no curves.")
        return None
    except WrongInput as error:
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
    """Returns at most about SHOWN of the steps, and as many of the steps with an evaluation, each with the first two
    and the last, ascending. Except for the last, the choice changes only when the distance between steps doubles."""
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
    except WrongInput as error:
        remarks.append(f"{console.PHASES_FILE} cannot be read: {error}.")
        return []


def _config(file: Path, remarks: list[str]) -> dict[str, Any]:
    """Returns the configuration, with old keys translated to present ones, so that an older run can be compared."""
    found = _mapping(file, remarks)
    try:
        return since_moved(found)
    except WrongInput as error:
        remarks.append(f"{file.name} has a setting that cannot be read ({error}).")
        return found


def _mapping(file: Path, remarks: list[str]) -> dict[str, Any]:
    """Returns the mapping of a YAML or JSON file, with values that JSON can hold."""
    try:
        text = read_text(file, MOST)
        found = json_value(text, file.name) if file.suffix == ".json" else mapping_of(text)
        if not isinstance(found, dict):
            raise WrongInput(f"it must hold a mapping, got {type(found).__name__}")
        check_plain(found)
    except FileNotFoundError:
        remarks.append(f"{file.name} is missing.")
        return {}
    except WrongInput as error:
        remarks.append(f"{file.name} cannot be read; it may be half written ({error}).")
        return {}
    shown: dict[str, Any] = _shown(found)
    return shown


def _shown(value: Any) -> Any:
    """Converts a value for JSON: keys, numbers that are not finite, and YAML's own types such as dates become text."""
    if isinstance(value, Mapping):
        return {str(key): _shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return f".{value}".replace(".-", "-.")  # as YAML writes it
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


# The charts of a report; docs/metrics.md says what each metric means.


class Figure(NamedTuple):
    """A chart."""

    title: str
    hint: str  # what a reader should know
    metrics: tuple[str, ...]  # names; a * at the end stands for all scores that begin so
    log: bool = False  # whether the scale is logarithmic


NO_SCORE = ("failed", "ms", "std", "unscored", "zero_variance_groups", "zeroed")  # no scores under reward/ or eval/
FIGURES = (
    Figure("Held-out", "one greedy completion a problem, on problems that are not trained on", ("eval/*",)),
    Figure("Reward", "weighted sum, and each function's own number", ("reward/mean", "reward/*")),
    Figure(
        "Reward less watch",
        "mean difference; that it rises says more than how large it is, unless both are on one scale",
        ("watch/gap_*",),
    ),
    Figure(
        "Reward with watch and length, within groups",
        "correlation: -1 to 1; where it falls, what is paid is no longer what the watch passes",
        ("watch/correlation_*", "watch/length_correlation"),
    ),
    Figure("Failed watches", "share of completions", ("watch/failed_*",)),
    Figure("Logged by reward functions", "log_metric, mean over groups", ("log/*",)),
    Figure("Completion length", "tokens", ("rollout/completion_length", "rollout/completion_length_max")),
    Figure("Cut at the limit", "share of completions", ("rollout/truncated",)),
    Figure("Entropy", "nats a token; learning stops where it falls to 0", ("policy/entropy",)),
    Figure("KL to the reference", "nats a token", ("policy/kl",)),
    Figure(
        "Mismatch of learner and sampler",
        "largest difference of a logprob, in nats; float32 stays below 1e-3",
        ("policy/mismatch_max", "policy/mismatch_max_current", "policy/mismatch_k3"),
        log=True,
    ),
    Figure("Staleness", "policy versions", ("policy/staleness_mean", "policy/staleness_max")),
    Figure(
        "Time of a step",
        "seconds; generating and training may overlap",
        ("time/step", "time/generate", "time/train", "time/wait", "time/push", "time/evaluate", "time/checkpoint"),
    ),
    Figure("Gradient norm", "before clipping", ("loss/grad_norm", "value/grad_norm")),
    Figure("Clipped or masked tokens", "share", ("policy/clip_fraction", "policy/masked_fraction")),
    Figure(
        "Groups without a signal",
        "all completions of it scored alike",
        ("reward/zero_variance_groups",),
    ),
    Figure("Failed rewards", "share of completions", ("reward/failed",)),
    Figure(
        "Failed completions by kind",
        "how many; what failed stands above the completions, in words",
        tuple(f"reward/status_{kind}" for kind in ("error", "timeout", "nan", "environment")),
    ),
    Figure("Turns and calls", "of a trajectory", ("env/turns", "env/calls", "env/malformed", "env/errors")),
    Figure("Value function", "PPO", ("value/explained_variance", "value/loss")),
)


def figures(names: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the charts for which there are metrics, with the metrics that are there."""
    known = sorted(names)
    drawn = [(figure, _found(figure.metrics, known)) for figure in FIGURES]
    return [{"title": f.title, "hint": f.hint, "metrics": metrics, "log": f.log} for f, metrics in drawn if metrics]


def _found(wanted: tuple[str, ...], known: list[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in wanted:
        start = name.removesuffix("*")
        same = [one for one in known if one == name or (start != name and one.startswith(start) and is_score(one))]
        played = {one for one in same if f"env/{one.removeprefix(start)}" in known}  # the environment's metrics
        found |= dict.fromkeys(one for one in same if one not in played)
    return list(found)


def is_score(name: str) -> bool:
    """Whether a metric under reward/ or eval/ is a number that a function gave."""
    own = name.partition("/")[2]
    return own not in NO_SCORE and not own.startswith("status_")


class Start(NamedTuple):
    """A start of a run that has ended: a new run or a resumed one."""

    steps: str  # its steps in words, such as `steps 5 to 8`
    phases: dict[str, float]  # name -> seconds


def starts_of(run: Run) -> list[Start]:
    """Returns the starts of a run that have ended, oldest first."""
    ends = [] if run.file is None else [(step, run.file.time(step)) for step in run.file.steps if step]
    found = []
    for line in run.phases:
        begun = line["at"] - line["wall"]
        steps = [step for step, at in ends if begun <= at <= line["at"]]
        phases = {name: round(spent, 3) for name, spent in line.items() if name not in ("at", "wall")}
        found.append(Start(_told(steps), phases))
    return found


def _told(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


PLACE = ("name", "output_dir")  # settings of a replay that its user has not set
CHANGE = {"eval/accuracy": "held-out accuracy", "reward/mean": "reward", "rollout/completion_length": "length"}


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the summary of a run, and of the run that it is compared with if there are two."""
    return {
        "runs": [_run(run) for run in runs],
        "figures": figures({name for run in runs for name in run.metrics}),
        "differences": _differences(*runs) if len(runs) == 2 else [],
    }


def _run(run: Run) -> dict[str, Any]:
    model, learner = _part(run.config, "model"), _part(run.config, "learner")
    seconds = 0.0 if run.file is None else run.file.seconds()
    facts = {
        "model": _last_part(model.get("path")),
        "algorithm": learner.get("algorithm"),
        "mode": learner.get("mode"),
        "seed": run.config.get("seed"),
        "training": f"{seconds:.0f} s" if seconds else None,
    }
    return {
        "name": run.name, "done": run.steps[-1] if run.steps else 0, "of": run.of,
        "facts": [[name, str(value)] for name, value in facts.items() if value is not None],
        "changes": [found for name, label in CHANGE.items() if (found := _change(run, name, label))],
        "steps": run.steps, "metrics": run.metrics, "memory": _memory(run.plan),
        "remarks": [*_parted(run), *run.remarks],
        "config": _flat(run.config), "starts": [start._asdict() for start in starts_of(run)],
    }  # fmt: skip


def _parted(run: Run) -> list[str]:
    """Returns a remark for each watch that has parted from the reward. A configuration whose rewards cannot be read has
    none: they are of another version of gleaner."""
    given = run.config.get("rewards")
    try:
        rewards = [RewardConfig.model_validate(one) for one in given] if isinstance(given, list) else []
    except ValidationError:
        return []
    trained = [i for i, step in enumerate(run.steps) if step]
    columns = {name: [column[i] for i in trained] for name, column in run.metrics.items()}
    series = Series.of(rewards, [run.steps[i] for i in trained], columns)
    return [f"Advice: {sentence(one)}." for one in findings(series)]


def _change(run: Run, name: str, label: str) -> dict[str, Any] | None:
    """Returns first and last value of a metric, and their steps; None if there is no value."""
    known = [
        (step, value) for step, value in zip(run.steps, run.metrics.get(name, ()), strict=False) if value is not None
    ]
    if not known:
        return None
    (first, before), (last, after) = known[0], known[-1]
    return {"label": label, "first": first, "before": before, "last": last, "after": after}


def _memory(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns for each role the planned bytes, by part, and the measured peak."""
    found = []
    for name in ("learner", "generator"):
        role = _part(plan, name)
        planned, measured = number(role.get("planned")), number(role.get("measured"))
        parts = {part: size for part, value in _part(role, "parts").items() if (size := number(value)) is not None}
        if planned or measured:
            found.append({"role": name, "planned": planned, "measured": measured, "parts": parts or None})
    return found


def _part(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def _last_part(path: Any) -> str | None:
    """Returns the last part of a folder's path; the name of a hub model stays as it is."""
    return None if path is None else str(path).rpartition("/")[2] if str(path).startswith("/") else str(path)


def _flat(tree: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings by dotted key, as text; each reward function is one key with its settings."""
    flat: dict[str, str] = {}
    for key, value in dotted(tree).items():
        if isinstance(value, list) and value and all(isinstance(one, dict) and "use" in one for one in value):
            for i, one in enumerate(value):
                name = f"{key}.{one.get('name') or PurePath(str(one['use']).rpartition(':')[2]).name}"
                flat[f"{name}.{i}" if name in flat else name] = ", ".join(_settings(one))
        else:
            flat[key] = _written(value)
    return flat


def _settings(of: Mapping[str, Any]) -> list[str]:
    return [f"{key} {_written(value)}" for key, value in dotted(of).items() if value not in (None, {}, [])]


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _differences(one: Run, other: Run) -> list[list[str]]:
    here, there = _flat(one.config), _flat(other.config)
    names = sorted({*here, *there} - {*(PLACE if one.replay or other.replay else ())})
    return [[n, here.get(n, "—"), there.get(n, "—")] for n in names if here.get(n) != there.get(n)]
