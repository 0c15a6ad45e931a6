"""What a run says about itself: metrics.jsonl, TensorBoard events, a timeline of every role, and peak memory."""

import itertools
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

Interval = tuple[float, float]  # start and end, in seconds of time.perf_counter


class Metrics:
    """One line a step in metrics.jsonl, and the same numbers to each tracker."""

    def __init__(self, run_dir: Path, trackers: Sequence[str], resume_step: int) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._forget_after(resume_step)
        self._file = self._path.open("a", buffering=1)
        self._board = None
        if "tensorboard" in trackers:
            from tensorboard.summary import Writer  # torch's own writer would load torch into this process

            self._board = Writer(str(run_dir / "tensorboard"))

    def _forget_after(self, step: int) -> None:
        """Lines of steps that a resumed run takes again are dropped, so that each step stands there once.

        A run that starts at 0 takes step 0 again; a line that a kill cut short is none.
        """
        if not self._path.exists():
            return
        whole = (line for line in self._path.read_text().splitlines() if line.endswith("}"))
        kept = [line for line in whole if json.loads(line)["step"] <= step and step > 0]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        os.replace(partial, self._path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one step; what is not finite is written as null, since JSON has no NaN."""
        clean = {key: value if math.isfinite(value) else None for key, value in sorted(values.items())}
        self._file.write(json.dumps({"step": step, "at": round(time.time(), 3), **clean}) + "\n")
        if self._board is not None:
            for key, value in clean.items():
                if value is not None:
                    self._board.add_scalar(key, value, step)

    def close(self) -> None:
        """Flushes and closes every sink."""
        self._file.close()
        if self._board is not None:
            self._board.close()


class _Span(NamedTuple):
    what: str
    role: str
    start: float  # seconds of time.perf_counter
    end: float


class Timeline:
    """Spans of every role: kept for overlap figures, and written as a Chrome trace (open it in ui.perfetto.dev).

    A resumed run goes on in the same file; its times are those of the clock on the wall.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        if resume_step > 0 and path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a line that a kill cut short
        self._file = path.open("a" if resume_step > 0 else "w")
        if self._file.tell() == 0:
            self._file.write("[\n")  # the closing bracket is optional in this format, so a killed run stays readable
        self._spans: list[_Span] = []
        self._open: dict[object, tuple[str, str, float]] = {}
        self._epoch = time.time() - time.perf_counter()
        self._ids = itertools.count(time.time_ns())

    @contextmanager
    def span(self, what: str, role: str, concurrent: bool = False, **details: Any) -> Iterator[None]:
        """Records how long the body took. `concurrent`: spans of this kind overlap within the role."""
        start, mark = time.perf_counter(), object()
        self._open[mark] = (what, role, start)
        try:
            yield
        finally:
            end = time.perf_counter()
            del self._open[mark]
            self._spans.append(_Span(what, role, start, end))
            common = {"name": what, "cat": what, "pid": 0, "tid": role, "args": details}
            begin, stop = (round((moment + self._epoch) * 1e6) for moment in (start, end))
            if concurrent:  # a pair of asynchronous events: complete ones must nest within their track
                common["id"] = str(next(self._ids))  # beyond what JavaScript's numbers hold exactly
                events = [common | {"ph": "b", "ts": begin}, common | {"ph": "e", "ts": stop}]
            else:
                events = [common | {"ph": "X", "ts": begin, "dur": stop - begin}]
            self._file.write("".join(json.dumps(event) + ",\n" for event in events))

    def busy(self, what: str, start: float, end: float) -> list[Interval]:
        """The union of the spans of one kind, of all roles, inside [start, end], in seconds of time.perf_counter; what
        is not over yet counts up to `end`."""
        return _union(itertools.chain.from_iterable(self.busy_by_role(what, start, end).values()))

    def busy_by_role(self, what: str, start: float, end: float) -> dict[str, list[Interval]]:
        """The same of each role that has such spans."""
        still = (_Span(name, role, begin, end) for name, role, begin in self._open.values())
        spans: dict[str, list[Interval]] = {}
        for span in itertools.chain(self._spans, still):
            if span.what == what and span.end > start and span.start < end:
                spans.setdefault(span.role, []).append((max(span.start, start), min(span.end, end)))
        return {role: _union(own) for role, own in spans.items()}

    def forget_before(self, moment: float) -> None:
        """Drops spans that ended before `moment`, so that memory does not grow with the run; and flushes the file.

        A killed run loses the spans after that. To write each at once would cost as much as the rest of it.
        """
        self._file.flush()
        self._spans = [span for span in self._spans if span.end >= moment]

    def close(self) -> None:
        """Closes the trace file."""
        self._file.close()


def _union(spans: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def seconds(spans: Sequence[Interval]) -> float:
    """Total length of disjoint spans."""
    return sum(b - a for a, b in spans)


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds during which both were busy."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in one for c, d in other)


def peak_memory() -> float:
    """Peak bytes of this process: of the CUDA allocator where it is in use, else resident set size."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated())
    return float(peak_resident())


def peak_resident() -> int:
    """Peak bytes of this process in main memory, since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
