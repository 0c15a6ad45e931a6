"""metrics.jsonl as it lies on the disk: which steps it has and where, known without reading what each line says.

A long run's has hundreds of megabytes, and to parse them takes half a minute and gigabytes. The beginning of a line,
as cluster.telemetry writes it, says its step and its time; the rest is parsed for the steps that are asked for.
"""

import math
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.reading import LONGEST, Unreadable, json_value, lines, opened

MOST_STEP = 2**53  # beyond which a browser's numbers are no longer exact
MOST_BAD = 100_000  # lines: a file with more is none of a run's
_BEGIN = re.compile(rb'\{"step": (\d{1,15}), "at": (\d{1,12}(?:\.\d{1,9})?)[,}]')
_SECONDS = re.compile(rb"(\d{1,12}(?:\.\d{1,20})?(?:e-\d\d)?)[,}]")
STEP_TIME = b'"time/step": '
EVALUATED = b'"eval/'


class MetricsFile:
    """The lines of a file that are of a step; of two of one step the later one counts.

    Attributes:
        steps: ascending. total, bad: lines in all, and those that are of no step. first_bad: number of the first.
    """

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, and Unreadable where it is no file of metrics."""
        self._path = path
        self.steps: list[int] = []
        self.total = self.bad = self.first_bad = 0
        steps, places, lengths = array("q"), array("q"), array("q")
        times, spent, evaluated = array("d"), array("d"), bytearray()
        for begins, line in lines(path):
            self.total += 1
            found = _beginning(line)
            if found is None:
                self._count_bad()
                continue
            steps.append(found[0])
            times.append(found[1])
            places.append(begins)
            lengths.append(len(line))
            spent.append(_seconds(line))
            evaluated.append(EVALUATED in line)
        self._times, self._spent, self._evaluated = times, spent, evaluated
        self._places, self._lengths = places, lengths
        self._lines = {step: line for line, step in enumerate(steps)}
        self.steps = sorted(self._lines)

    def _count_bad(self) -> None:
        self.bad += 1
        self.first_bad = self.first_bad or self.total
        if self.bad > MOST_BAD:
            raise Unreadable(f"{self._path} must hold a line of JSON for each step, and {MOST_BAD:,} lines are none")

    def __contains__(self, step: object) -> bool:
        return step in self._lines

    def evaluated(self) -> list[int]:
        """The steps with metrics of an evaluation, ascending."""
        return [step for step in self.steps if self._evaluated[self._lines[step]]]

    def seconds(self, up_to: int = MOST_STEP) -> float:
        """That the steps up to that one took together, by time/step."""
        return math.fsum(self._spent[line] for step, line in self._lines.items() if step <= up_to)

    def time(self, step: int) -> float:
        """When its line was written, in seconds since 1970; nan where the line does not say."""
        return self._times[self._lines[step]]

    def rows(self, steps: list[int]) -> Iterator[dict[str, Any]]:
        """The lines of these steps, as they are in the file; {} for one that is no JSON after all, or has changed."""
        with opened(self._path) as file:
            for step in steps:
                line = self._lines[step]
                file.seek(self._places[line])
                yield _row(file.read(self._lengths[line]), step)

    def whole(self, up_to: int) -> Iterator[bytes]:
        """The lines of steps up to that one, each once, in their order in the file and with their end."""
        kept = sorted(line for step, line in self._lines.items() if step <= up_to)
        with opened(self._path) as file:
            for line in kept:
                file.seek(self._places[line])
                yield file.read(self._lengths[line]) + b"\n"


def _beginning(line: bytes) -> tuple[int, float] | None:
    """Step and time of a line; None if it is of no step. One that is not as cluster.telemetry writes it is parsed."""
    if len(line) <= LONGEST and (found := _BEGIN.match(line)) is not None and line.endswith(b"}"):
        return int(found[1]), float(found[2])
    try:
        row = json_value(line, "line")
    except Unreadable:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    if type(step) is not int or not 0 <= step < MOST_STEP:
        return None
    at = number(row.get("at"))
    return step, math.nan if at is None else at


def _seconds(line: bytes) -> float:
    place = line.rfind(STEP_TIME)  # from behind, which it is nearer to
    found = _SECONDS.match(line, place + len(STEP_TIME)) if place >= 0 else None
    return float(found[1]) if found is not None else 0.0


def _row(line: bytes, step: int) -> dict[str, Any]:
    try:
        row = json_value(line, "line")
    except Unreadable:
        return {}
    return row if isinstance(row, dict) and row.get("step") == step else {}


def number(value: Any) -> float | None:
    """A finite number, as it is; None for everything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond what a float holds
        return None
