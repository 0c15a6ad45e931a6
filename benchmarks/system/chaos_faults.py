"""Faults for a run of gleaner, each at a process of it that is alive: what is done, and to which.

A run's processes are known by a mark in their environment, which they inherit.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

MARK = "GLEANER_CHAOS"
KINDS = {  # kind -> how often beside the others
    "kill generator": 4,
    "stop generator": 2,
    "kill rank": 4,
    "stop rank": 2,
    "kill reward process": 2,
    "kill driver": 2,
    "kill driver, newest checkpoint damaged": 1,
    "kill raylet": 1,
}
NAMES = {
    "generator": "ray::generator-",
    "rank": "ray::learner-",
    "reward": "multiprocessing.spawn import spawn_main",
    "raylet": "/raylet/raylet ",
}


class Fault(NamedTuple):
    """at: seconds since the benchmark began. pid: of the process that it was done to."""

    at: float
    kind: str
    pid: int


def processes_of(mark: str) -> dict[psutil.Process, str]:
    """Living processes of the run, and their command lines. Reward processes, whose environment is taken from them, are
    known by their parents."""
    found: dict[psutil.Process, str] = {}
    for process in psutil.process_iter():
        try:
            if process not in found and process.environ().get(MARK) == mark:
                for one in (process, *process.children(recursive=True)):
                    found[one] = " ".join(one.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # it ended while we looked
    return {one: command for one, command in found.items() if command}  # a dead one that nobody waits for has none


def drawn(rng: random.Random) -> str:
    """The kind of the next fault."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return kind


def inject(
    kind: str, rng: random.Random, at: float, processes: Mapping[psutil.Process, str], driver: int, run_dir: Path
) -> Fault | None:
    """A fault of this kind; None if the process that it needs is not there (yet)."""
    action, what = kind.split(" ")[:2]
    if what.startswith("driver"):
        if "damaged" in kind and not _damage(rng, run_dir):
            return None
        pid = driver
    else:
        pids = [one.pid for one, command in processes.items() if NAMES[what] in command]
        if not pids:
            return None
        pid = rng.choice(pids)
    try:
        os.kill(pid, signal.SIGSTOP if action == "stop" else signal.SIGKILL)
    except ProcessLookupError:
        return None
    return Fault(at, kind, pid)


def _damage(rng: random.Random, run_dir: Path) -> bool:
    """Flips a bit of the newest checkpoint; False where there is none."""
    newest = max((run_dir / "checkpoints").glob("step-*"), default=None)
    files = [] if newest is None else sorted(file for file in newest.rglob("*.pt") if file.stat().st_size)
    if not files:
        return False
    content = bytearray(files[0].read_bytes())
    content[rng.randrange(len(content))] ^= 1
    files[0].write_bytes(content)
    return True
