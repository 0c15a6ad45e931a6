"""The report of a sweep, one HTML page: for each setting the mean over its seeds with least and most, as curves and
numbers, and a line for each run. It holds no script and loads nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from cluster.errors import WrongInput
from cluster.files import writing
from cluster.reading import MIB, json_value, read_text
from learner.config.settings import NAME
from learner.tools.report.summary import Run, begun, read_run
from learner.tools.reported import reported
from learner.tools.sweep import FILE

PAGE = "report.html"
MOST = 16 * MIB  # most bytes of sweep.json
ACCURACY, REWARD = "eval/accuracy", "reward/mean"
SMOOTH = 10  # steps over which the last reward is a mean
WIDTH, HEIGHT, EDGE = 640, 240, 34
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")  # Okabe and Ito's
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em;color:#222;background:#fff}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em .2em 0;text-align:left;vertical-align:top}"
    "th{border-bottom:1px solid #999}svg{max-width:100%;height:auto}.key{display:inline-block;width:1.2em;height:.7em}"
    ".remark{color:#666}"
)
Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Member:
    """A run of the sweep. given: its own settings. state, of, error: from sweep.json. run: its folder's content; None
    before its first step."""

    name: str
    given: Mapping[str, str]
    state: str
    of: str
    error: str
    run: Run | None

    def points(self, metric: str) -> Points:
        """(step, value) of a metric."""
        if self.run is None:
            return []
        column = self.run.metrics.get(metric, [])
        return [(step, value) for step, value in zip(self.run.steps, column, strict=False) if value is not None]


def write_report(folder: Path, out: Path | None) -> int:
    """Writes the page of a sweep; returns the exit code: 1 if it cannot be written, 2 if sweep.json is damaged."""

    def work() -> None:
        place = out or folder / PAGE
        text = page(folder.resolve().name, read_members(folder))
        with writing(place):
            place.write_text(text, encoding="utf-8")
        print(place)

    return reported(work)


def read_members(folder: Path) -> list[Member]:
    """The runs of a sweep, also while they go on. Raises WrongInput if sweep.json is not that of a sweep."""
    found = json_value(read_text(folder / FILE, MOST), FILE)
    runs = found.get("runs") if isinstance(found, dict) else None
    if not isinstance(runs, dict) or not all(re.fullmatch(NAME, n) and isinstance(r, dict) for n, r in runs.items()):
        raise WrongInput(f"{folder / FILE}: must hold the runs of a sweep by name; run the same command again")
    return [_member(folder / name, name, one) for name, one in runs.items()]


def _member(folder: Path, name: str, told: Mapping[str, Any]) -> Member:
    given = told.get("given")
    return Member(
        name, {str(key): str(value) for key, value in given.items()} if isinstance(given, dict) else {},
        str(told.get("state", "")), str(told.get("of", "")), str(told.get("error", "")),
        read_run(folder) if begun(folder) else None,
    )  # fmt: skip


def settings_of(members: Sequence[Member]) -> dict[str, list[Member]]:
    """The runs by what they were given but for the seed."""
    found: dict[str, list[Member]] = {}
    for member in members:
        own = ", ".join(f"{key}={value}" for key, value in member.given.items() if key != "seed")
        found.setdefault(own or "all runs", []).append(member)
    return found


def over_seeds(members: Sequence[Member], metric: str) -> list[tuple[int, float, float, float]]:
    """(step, mean, least, most) over the runs, at the steps at which each has a value."""
    columns = [dict(points) for member in members if (points := member.points(metric))]
    if not columns:
        return []
    steps = sorted(set.intersection(*(set(column) for column in columns)))
    values = [[column[step] for column in columns] for step in steps]
    return [(step, mean(each), min(each), max(each)) for step, each in zip(steps, values, strict=True)]


def page(title: str, members: Sequence[Member]) -> str:
    """The whole page."""
    groups = settings_of(members)
    told = f"{len(members)} runs, {len(groups)} settings. Means are over the seeds of a setting; bands: least to most."
    body = "".join(
        [
            f"<h1>{escape(title)}</h1><p>{told}</p>",
            _chart("Held-out accuracy", {name: over_seeds(own, ACCURACY) for name, own in groups.items()}),
            _chart("Mean reward", {name: over_seeds(own, REWARD) for name, own in groups.items()}),
            _table(["setting", "runs", "accuracy first", "accuracy last", f"reward, last {SMOOTH} steps"],
                   _setting_rows(groups)),
            _table(["run", "state", "step", "accuracy first", "accuracy last", ""], _run_rows(members)),
        ]
    )  # fmt: skip
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def _setting_rows(groups: Mapping[str, Sequence[Member]]) -> Iterator[list[str]]:
    for name, own in groups.items():
        scores, rewards = over_seeds(own, ACCURACY), over_seeds(own, REWARD)[-SMOOTH:]
        recent = f"{mean(each[1] for each in rewards):.3f}" if rewards else "-"
        first, last = (_spread(scores[i]) if scores else "-" for i in (0, -1))
        yield [name, str(len(own)), first, last, recent]


def _run_rows(members: Sequence[Member]) -> Iterator[list[str]]:
    for member in members:
        scores = [value for _, value in member.points(ACCURACY)]
        done = member.run.steps[-1] if member.run is not None and member.run.steps else 0
        first, last = (f"{scores[i]:.3f}" if scores else "-" for i in (0, -1))
        yield [member.name, member.state, f"{done} of {member.of}", first, last, member.error]


def _spread(point: tuple[int, float, float, float]) -> str:
    step, middle, least, most = point
    return f"{middle:.3f} [{least:.3f}, {most:.3f}] at step {step}"


def _table(head: Sequence[str], rows: Iterator[list[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _chart(title: str, curves: Mapping[str, Sequence[tuple[int, float, float, float]]]) -> str:
    """A curve with its band for each setting; empty if none has two points."""
    drawn = {name: points for name, points in curves.items() if len(points) > 1}
    if not drawn:
        return ""
    every = [point for points in drawn.values() for point in points]
    low, high = min(point[2] for point in every), max(point[3] for point in every)
    first, last = min(point[0] for point in every), max(point[0] for point in every)
    across, up = (WIDTH - 2 * EDGE) / ((last - first) or 1), (HEIGHT - 2 * EDGE) / ((high - low) or 1.0)

    def place(step: int, value: float) -> str:
        return f"{EDGE + (step - first) * across:.1f},{HEIGHT - EDGE - (value - low) * up:.1f}"

    shapes = [_curve(points, colour, place) for points, colour in zip(drawn.values(), _colours(), strict=False)]
    marks = (
        f'<text x="{EDGE}" y="{HEIGHT - 8}" font-size="12">step {first}</text>'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 8}" font-size="12" text-anchor="end">{last}</text>'
        f'<text x="2" y="{HEIGHT - EDGE}" font-size="12">{low:.2f}</text>'
        f'<text x="2" y="{EDGE}" font-size="12">{high:.2f}</text>'
    )
    keys = " ".join(
        f'<span><span class="key" style="background:{colour}"></span> {escape(name)}</span>'
        for name, colour in zip(drawn, _colours(), strict=False)
    )
    return (
        f'<h2>{escape(title)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(title)}, steps {first} to {last}">{"".join(shapes)}{marks}</svg><p>{keys}</p>'
    )


def _colours() -> Iterator[str]:
    while True:
        yield from COLOURS


def _curve(points: Sequence[tuple[int, float, float, float]], colour: str, place: Callable[[int, float], str]) -> str:
    above = [place(step, most) for step, _, _, most in points]
    below = [place(step, least) for step, _, least, _ in points]
    middle = " ".join(place(step, value) for step, value, _, _ in points)
    return (
        f'<polygon points="{" ".join([*above, *reversed(below)])}" fill="{colour}" opacity="0.18"/>'
        f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="2"/>'
    )
