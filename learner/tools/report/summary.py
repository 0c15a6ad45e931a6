"""What a page says of one or two runs besides completions: headline, curves, memory, time, settings that differ."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from cluster.telemetry import number
from cluster.trackers import dotted
from learner.tools.report.run_folder import Run

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
