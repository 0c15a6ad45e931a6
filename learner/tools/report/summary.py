"""What a page says of one or two runs besides completions: headline, curves, memory, time, settings that differ."""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from cluster.dotted import dotted
from cluster.metrics_file import number
from learner.tools.report.figures import figures
from learner.tools.report.run_folder import Run
from learner.tools.report.starts import starts_of

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
