"""Records a run: Metrics writes metrics.jsonl and passes metrics on to trackers, Timeline writes the spans of every
role as a trace; the module also measures peak memory. MetricsFile reads metrics.jsonl for reports and for a resumed
run.
"""

import itertools
import json
import logging
import math
import os
import re
import resource
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cluster.errors import WrongInput
from cluster.files import writing
from cluster.reading import LONGEST, json_value, lines, opened
from cluster.trackers import TRACKERS, Background, Sample, tracked

METRICS_FILE = "metrics.jsonl"

# The metrics.jsonl of a long run has hundreds of megabytes; parsing them would take half a minute and gigabytes of
# memory. The beginning of a line, as Metrics writes it, has the step and the time. So MetricsFile reads the beginnings,
# and parses a whole line only when its step is asked for.

MOST_STEP = 2**53  # the numbers of a browser are exact up to here
MOST_BAD = 100_000  # a file with more invalid lines is refused
_BEGIN = re.compile(rb'\{"step": (\d{1,15}), "at": (\d{1,12}(?:\.\d{1,9})?)[,}]')
_SECONDS = re.compile(rb"(\d{1,12}(?:\.\d{1,20})?(?:e-\d\d)?)[,}]")
STEP_TIME = b'"time/step": '
EVALUATED = b'"eval/'


class MetricsFile:
    """The lines of a metrics.jsonl by step; if two lines have the same step, the later one counts.

    Attributes:
        steps: the steps that have a line, ascending. total: number of lines. bad: number of lines without a step.
            first_bad: line number of the first of these, from 1; 0 if there is none.
    """

    def __init__(self, path: Path) -> None:
        """Indexes the file. Raises FileNotFoundError, and WrongInput if it is not a file of metrics."""
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
            raise WrongInput(f"{self._path} must hold a line of JSON for each step, and {MOST_BAD:,} lines are none")

    def __contains__(self, step: object) -> bool:
        return step in self._lines

    def evaluated(self) -> list[int]:
        """The steps with metrics of an evaluation, ascending."""
        return [step for step in self.steps if self._evaluated[self._lines[step]]]

    def seconds(self, up_to: int = MOST_STEP) -> float:
        """Seconds that the steps up to `up_to` took together, by their metric time/step."""
        return math.fsum(self._spent[line] for step, line in self._lines.items() if step <= up_to)

    def time(self, step: int) -> float:
        """When the step's line was written, in seconds since 1970; nan if the line has no time."""
        return self._times[self._lines[step]]

    def rows(self, steps: list[int]) -> Iterator[dict[str, Any]]:
        """The parsed lines of these steps; {} for a line that is not valid JSON, or was changed since the indexing."""
        with opened(self._path) as file:
            for step in steps:
                line = self._lines[step]
                file.seek(self._places[line])
                yield _row(file.read(self._lengths[line]), step)

    def whole(self, up_to: int) -> Iterator[bytes]:
        """The lines of the steps up to `up_to`, with line ends and in the order of the file, one line per step."""
        kept = sorted(line for step, line in self._lines.items() if step <= up_to)
        with opened(self._path) as file:
            for line in kept:
                file.seek(self._places[line])
                yield file.read(self._lengths[line]) + b"\n"


def _beginning(line: bytes) -> tuple[int, float] | None:
    """(step, time) of a line; None if it has no step. A line that does not begin as Metrics writes it is parsed."""
    if len(line) <= LONGEST and (found := _BEGIN.match(line)) is not None and line.endswith(b"}"):
        return int(found[1]), float(found[2])
    try:
        row = json_value(line, "line")
    except WrongInput:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    if type(step) is not int or not 0 <= step < MOST_STEP:
        return None
    at = number(row.get("at"))
    return step, math.nan if at is None else at


def _seconds(line: bytes) -> float:
    place = line.rfind(STEP_TIME)  # keys are sorted, so it is nearer to the end
    found = _SECONDS.match(line, place + len(STEP_TIME)) if place >= 0 else None
    return float(found[1]) if found is not None else 0.0


def _row(line: bytes, step: int) -> dict[str, Any]:
    try:
        row = json_value(line, "line")
    except WrongInput:
        return {}
    return row if isinstance(row, dict) and row.get("step") == step else {}


def number(value: Any) -> float | None:
    """The value if it is a finite int or float, else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an int too large for a float
        return None


Interval = tuple[float, float]  # start and end, in seconds of time.perf_counter
EVENT_END = b"},\n"  # the end of an event in a trace
LONGEST_EVENT = 2**20  # bytes of an event, at most

log = logging.getLogger(__name__)


class FolderGone(FileNotFoundError):
    """The run folder was deleted or replaced; learner.driver.failure tells the text without a traceback."""


class Metrics:
    """Writes a line per step to metrics.jsonl, and gives the same numbers to each tracker.

    Args: trackers: names of cluster.trackers.TRACKERS. resume_step: the step from which the run goes on; 0: a new run.
    """

    def __init__(self, run_dir: Path, trackers: Sequence[str], resume_step: int) -> None:
        self._path = run_dir / METRICS_FILE
        self._forget_after(resume_step)
        with writing(self._path):
            self._file = self._path.open("a", buffering=1)
        self._folder = os.stat(run_dir)
        self._trackers: list[Background] = []
        if trackers:
            run = tracked(run_dir, resume_step)
            self._trackers = [Background(name, TRACKERS[name], run) for name in trackers]

    def _forget_after(self, step: int) -> None:
        """Drops the lines of steps after `step`, which a resumed run will repeat (from step 0 on all lines), so that
        each step has one line. Lines that a kill or a full disk has cut short are dropped too, with one warning.
        """
        try:
            file = MetricsFile(self._path)
        except FileNotFoundError:
            return
        if file.bad:
            log.warning(
                "%s: dropped %d lines that are none of a step (first: line %d)", self._path, file.bad, file.first_bad
            )
        self._rewrite(file.whole(step) if step else ())

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        partial = self._path.with_suffix(".partial")
        with writing(partial):
            with partial.open("wb") as file:
                file.writelines(lines)
            os.replace(partial, self._path)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Adds metrics to the line of the newest step, and gives them to the trackers. Raises what `log` raises."""
        file = MetricsFile(self._path)
        if not file.steps or file.steps[-1] != step:
            self.log(step, values)
            return
        (row,) = file.rows([step])
        self._file.close()
        newest = json.dumps(row | _finite_or_null(values)) + "\n"
        self._rewrite(itertools.chain(file.whole(step - 1), [newest.encode()]))
        self._file = self._path.open("a", buffering=1)
        self._tell(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of one step. A number that is not finite is written as null, since JSON has no NaN.

        Raises WriteFailed if the line cannot be written, and FolderGone if the run folder was deleted or replaced since
        the run began, so that the record would be lost.
        """
        with writing(self._path):
            self._file.write(json.dumps({"step": step, "at": round(time.time(), 3), **_finite_or_null(values)}) + "\n")
        self.check_folder(step)
        self._tell(step, values)

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        finite = {key: value for key, value in _finite_or_null(values).items() if value is not None}
        for tracker in self._trackers:
            tracker.log(step, finite)

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """Gives a few completions of held-out problems to the trackers."""
        for tracker in self._trackers:
            tracker.completions(step, samples)

    def check_folder(self, step: int) -> None:
        """Raises FolderGone if the run folder was deleted or replaced since the run began."""
        try:
            there = os.path.samestat(self._folder, os.stat(self._path.parent))
        except FileNotFoundError:
            there = False
        if not there:
            raise FolderGone(
                f"{self._path.parent}: the run folder was deleted or replaced while the run was writing to it (step "
                f"{step}); what it held is lost. Start the run again, or give it another name="
            )

    def close(self) -> None:
        """Flushes and closes the file and every tracker."""
        with writing(self._path):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _finite_or_null(values: Mapping[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in sorted(values.items())}


class _Span(NamedTuple):
    what: str
    role: str
    start: float  # seconds of time.perf_counter
    end: float


class Timeline:
    """Records what each role is doing and when, in spans. They are kept for metrics of overlap, and written as a Chrome
    trace with wall-clock times (open it in ui.perfetto.dev). A resumed run continues the file.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self._path = path
        if resume_step > 0 and path.exists():
            os.truncate(path, _whole(path))  # removes the closing bracket, or a line that a kill has cut short
        self._file = path.open("a" if resume_step > 0 else "w")
        if self._file.tell() == 0:
            self._file.write("[\n")  # viewers need no closing bracket, so the trace of a killed run can be read
        self._spans: list[_Span] = []
        self._open: dict[object, tuple[str, str, float]] = {}
        self._epoch = time.time() - time.perf_counter()
        self._ids = itertools.count(time.time_ns())

    @contextmanager
    def span(self, what: str, role: str, concurrent: bool = False, **details: Any) -> Iterator[None]:
        """Records when the body ran. what: the kind of span. concurrent: whether spans of this kind can overlap within
        the role. details: shown with the span in the trace."""
        start, mark = time.perf_counter(), object()
        self._open[mark] = (what, role, start)
        try:
            yield
        except BaseException:
            with suppress(OSError):  # the exception of the body is more important
                self._end(mark, concurrent, details)
            raise
        self._end(mark, concurrent, details)

    def _end(self, mark: object, concurrent: bool, details: Mapping[str, Any]) -> None:
        end = time.perf_counter()
        what, role, start = self._open.pop(mark)
        self._spans.append(_Span(what, role, start, end))
        common = {"name": what, "cat": what, "pid": 0, "tid": role, "args": details}
        begin, stop = (round((moment + self._epoch) * 1e6) for moment in (start, end))
        if concurrent:  # complete events ("X") must nest within their track, asynchronous ones need not
            common["id"] = str(next(self._ids))  # text, since JavaScript's numbers cannot hold it exactly
            events = [common | {"ph": "b", "ts": begin}, common | {"ph": "e", "ts": stop}]
        else:
            events = [common | {"ph": "X", "ts": begin, "dur": stop - begin}]
        with writing(self._path):
            self._file.write("".join(json.dumps(event) + ",\n" for event in events))

    def busy(self, what: str, start: float, end: float) -> list[Interval]:
        """The intervals inside [start, end], in seconds of time.perf_counter, in which at least one role had a span of
        kind `what`. A span that is still open counts up to `end`."""
        return union(itertools.chain.from_iterable(self.busy_by_role(what, start, end).values()))

    def busy_by_role(self, what: str, start: float, end: float) -> dict[str, list[Interval]]:
        """The intervals of `busy` for each role that has such spans."""
        still = (_Span(name, role, begin, end) for name, role, begin in self._open.values())
        spans: dict[str, list[Interval]] = {}
        for span in itertools.chain(self._spans, still):
            if span.what == what and span.end > start and span.start < end:
                spans.setdefault(span.role, []).append((max(span.start, start), min(span.end, end)))
        return {role: union(own) for role, own in spans.items()}

    def forget_before(self, moment: float) -> None:
        """Flushes the file, and drops spans that ended before `moment`, so that memory does not grow with the run.

        A killed run loses the spans since the last flush. Flushing after each span would double the cost of a span.
        """
        with writing(self._path):
            self._file.flush()
        self._spans = [span for span in self._spans if span.end >= moment]

    def close(self) -> None:
        """Ends the trace, which is valid JSON then, and closes the file."""
        with writing(self._path):
            last = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "run"}}  # no comma follows it
            self._file.write(json.dumps(last) + "\n]\n")
            self._file.close()


def _whole(path: Path) -> int:
    """Bytes of a trace up to the end of its last complete event; 0 if it has none in its last LONGEST_EVENT bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(size - LONGEST_EVENT, 0)
        file.seek(begin)
        place = file.read(LONGEST_EVENT).rfind(EVENT_END)
    return 0 if place < 0 else begin + place + len(EVENT_END)


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Merges intervals into disjoint ones, in order."""
    merged: list[Interval] = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def seconds(spans: Sequence[Interval]) -> float:
    """Total length of disjoint intervals, in seconds."""
    return sum(b - a for a, b in spans)


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds that lie both in an interval of `one` and in an interval of `other`."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in one for c, d in other)


def peak_memory() -> float:
    """Peak bytes of this process: of torch's CUDA allocator if CUDA is in use, else of the resident set."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated())
    return float(peak_resident())


def peak_resident() -> int:
    """Peak bytes of this process's resident set since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
