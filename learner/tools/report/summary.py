"""What a run folder says of its run, and what a page says of one or two runs besides completions: headline, curves,
memory, time, settings that differ."""

import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from cluster import files
from cluster.errors import WrongInput
from cluster.reading import check_plain, json_value, mapping_of, read_text
from cluster.telemetry import METRICS_FILE, MetricsFile, number
from cluster.trackers import dotted
from learner.config.load import since_moved
from learner.driver import console
from rollout import ledger

# What a run folder says of its run, also while the run still writes to it: metrics, configuration, plan, rollouts.

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
    return (folder / METRICS_FILE).exists() or bool(ledger.steps(folder / "rollouts"))


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
    file = _file(folder / METRICS_FILE, remarks)
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
    except WrongInput as error:
        remarks.append(f"{console.PHASES_FILE} cannot be read: {error}.")
        return []


def _config(file: Path, remarks: list[str]) -> dict[str, Any]:
    """With the keys of today, by which an older run is compared with others."""
    found = _mapping(file, remarks)
    try:
        return since_moved(found)
    except WrongInput as error:
        remarks.append(f"{file.name} has a setting that cannot be read ({error}).")
        return found


def _mapping(file: Path, remarks: list[str]) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping, as JSON may have it."""
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


# Which curves a report draws, and from which metrics (docs/metrics.md says what each means).


class Figure(NamedTuple):
    """One chart: its title, what a reader should know, its metrics (a * at the end: all that begin so), its scale."""

    title: str
    hint: str
    metrics: tuple[str, ...]
    log: bool = False


NO_SCORE = ("failed", "ms", "std", "unscored", "zero_variance_groups", "zeroed")  # behind reward/ or eval/
FIGURES = (
    Figure("Held-out", "one greedy completion a problem, on problems that are not trained on", ("eval/*",)),
    Figure("Reward", "weighted sum, and each function's own number", ("reward/mean", "reward/*")),
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
    """Those that these metrics are enough for, with the metrics that are there."""
    known = sorted(names)
    drawn = [(figure, _found(figure.metrics, known)) for figure in FIGURES]
    return [{"title": f.title, "hint": f.hint, "metrics": metrics, "log": f.log} for f, metrics in drawn if metrics]


def _found(wanted: tuple[str, ...], known: list[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in wanted:
        start = name.removesuffix("*")
        same = [one for one in known if one == name or (start != name and one.startswith(start) and is_score(one))]
        played = {one for one in same if f"env/{one.removeprefix(start)}" in known}  # turns, calls: of the environment
        found |= dict.fromkeys(one for one in same if one not in played)
    return list(found)


def is_score(name: str) -> bool:
    """Whether a metric under reward/ or eval/ is a number that a function gave."""
    own = name.partition("/")[2]
    return own not in NO_SCORE and not own.startswith("status_")


# The starts of a run that came to their end: which steps each took, and where its time went.


class Start(NamedTuple):
    """One start. steps: what it took, `steps 5 to 8`. phases: name -> seconds, in the order in which they count."""

    steps: str
    phases: dict[str, float]


def starts_of(run: Run) -> list[Start]:
    """Oldest first."""
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


PLACE = ("name", "output_dir")  # of a replay, which nobody has set
CHANGE = {"eval/accuracy": "held-out accuracy", "reward/mean": "reward", "rollout/completion_length": "length"}


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Of the run itself, and behind it the one that it is compared with."""
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
        "steps": run.steps, "metrics": run.metrics, "memory": _memory(run.plan), "remarks": run.remarks,
        "config": _flat(run.config), "starts": [start._asdict() for start in starts_of(run)],
    }  # fmt: skip


def _change(run: Run, name: str, label: str) -> dict[str, Any] | None:
    """First and last value of a metric, and the steps that they are of."""
    known = [
        (step, value) for step, value in zip(run.steps, run.metrics.get(name, ()), strict=False) if value is not None
    ]
    if not known:
        return None
    (first, before), (last, after) = known[0], known[-1]
    return {"label": label, "first": first, "before": before, "last": last, "after": after}


def _memory(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Bytes that were planned for each role, by part, and its measured peak."""
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
    """A folder's own name; a hub model keeps its owner's."""
    return None if path is None else str(path).rpartition("/")[2] if str(path).startswith("/") else str(path)


def _flat(tree: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> value as the configuration has it; of each reward function, one key and what is set."""
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
