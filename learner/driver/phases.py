"""Where the wall time of a run goes: each second is of one phase, so the phases add up to the whole."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.files import writing
from cluster.metrics_file import number
from cluster.reading import MIB, Unreadable, json_value, read_bytes
from cluster.telemetry import Timeline, seconds, union

FILE = "phases.jsonl"
MOST = MIB  # bytes of it: a line for each start
STARTING = ("preflight", "Ray", "processes")
# Of what goes on at once, the first one counts: with max_staleness above 0, generation is what training waited for.
KINDS = {
    "evaluation": ("evaluate",),
    "checkpoints": ("checkpoint",),
    "training": ("train", "policy"),
    "generation": ("generate",),
    "weight sync": ("push",),
}


class Phases:
    """seconds: of each phase so far. began: in seconds of time.perf_counter; without it, when this process did."""

    def __init__(self, began: float | None = None) -> None:
        self._began = self._counted = time.perf_counter() - age() if began is None else began
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def until_now(self, name: str) -> None:
        """What has not been counted yet is of this phase."""
        now = time.perf_counter()
        self.seconds[name] += now - self._counted
        self._counted = now

    def split(self, timeline: Timeline, name: str) -> None:
        """What has not been counted yet is of what the timeline says; of that phase, where it says nothing."""
        now, known, spans = time.perf_counter(), 0.0, list[tuple[float, float]]()
        for phase, kinds in KINDS.items():
            for kind in kinds:
                spans = union([*spans, *timeline.busy(kind, self._counted, now)])
            self.seconds[phase] += seconds(spans) - known
            known = seconds(spans)
        self.seconds[name] += now - self._counted - known
        self._counted = now

    @property
    def wall(self) -> float:
        """Seconds that have been counted, which is the sum of all phases."""
        return self._counted - self._began

    def record(self, run_dir: Path, resumed: bool) -> None:
        """Writes a line to the run's folder; a resumed run has another for each time that it was started."""
        line = {"at": round(time.time(), 3), "wall": self.wall, **self.seconds}
        with writing(run_dir / FILE), (run_dir / FILE).open("a" if resumed else "w") as file:
            file.write(json.dumps(line) + "\n")


def read(run_dir: Path) -> list[dict[str, float]]:
    """The lines of a run's folder, oldest first. Without the file, none; one that is being written is left out. Raises
    Unreadable."""
    try:
        text = read_bytes(run_dir / FILE, MOST)
    except FileNotFoundError:
        return []
    return [line for line in map(_line, text.splitlines()) if line is not None]


def _line(text: bytes) -> dict[str, float] | None:
    try:
        found = json_value(text, "line")
    except Unreadable:
        return None
    if not isinstance(found, dict) or not {"at", "wall"} <= found.keys():
        return None
    return found if all(map(_is_time, found.values())) else None


def _is_time(value: Any) -> bool:
    return (known := number(value)) is not None and known >= 0


def sentence(seconds: Mapping[str, float]) -> str:
    """Of each phase -> `65.4 s: start-up 15.2 (preflight 3.9, Ray 2.5, processes 8.8), evaluation 8.1, ...`."""
    starting = [seconds.get(name, 0.0) for name in STARTING]
    parts = ", ".join(f"{name} {spent:.1f}" for name, spent in zip(STARTING, starting, strict=True))
    others = [f"{name} {spent:.1f}" for name, spent in seconds.items() if name not in STARTING]
    return f"{sum(seconds.values()):.1f} s: " + ", ".join([f"start-up {sum(starting):.1f} ({parts})", *others])


def age() -> float:
    """Seconds since this process began. Linux."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])  # since the machine's start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
