"""Faults for a run of gleaner, each at a process of it that is alive: what is done, and to which."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from threading import Timer
from typing import NamedTuple


class Kind(NamedTuple):
    """often: beside the other kinds. signal: None, where no process gets one. command: what the command line of the
    process holds. damaging: the newest checkpoint, before. paused: seconds after which it goes on. filling: the disk
    of the run folder, for as long."""

    often: int
    signal: Signals | None
    command: str
    damaging: bool = False
    paused: float | None = None
    filling: bool = False


PAUSE_S = 5.0  # a third of what a process may be silent for
SMALL = 2**30  # bytes of a disk that may be filled
GENERATOR, RANK, REWARDS, DRIVER = "ray::generator-", "ray::learner-", "ray::rewards-", "-m learner.main"
ENVIRONMENT, DISK = "kill environment process", "fill disk"
KINDS = {
    "kill generator": Kind(4, SIGKILL, GENERATOR),
    "stop generator": Kind(2, SIGSTOP, GENERATOR),
    "kill rank": Kind(4, SIGKILL, RANK),
    "stop rank": Kind(2, SIGSTOP, RANK),
    "kill reward process": Kind(2, SIGKILL, "multiprocessing.spawn import spawn_main"),
    "kill reward server": Kind(2, SIGKILL, REWARDS),
    "stop reward server": Kind(1, SIGSTOP, REWARDS),
    "kill driver": Kind(2, SIGKILL, DRIVER),
    "kill driver, newest checkpoint damaged": Kind(1, SIGKILL, DRIVER, damaging=True),
    "kill raylet": Kind(1, SIGKILL, "/raylet/raylet "),
    "pause generator": Kind(2, SIGSTOP, GENERATOR, paused=PAUSE_S),
    "pause rank": Kind(2, SIGSTOP, RANK, paused=PAUSE_S),
    "pause driver": Kind(1, SIGSTOP, DRIVER, paused=PAUSE_S),
    ENVIRONMENT: Kind(4, SIGKILL, "rollout.env.preload"),  # or the one that they are forked from
    DISK: Kind(2, None, DRIVER, paused=PAUSE_S, filling=True),
}


class Fault(NamedTuple):
    """at: seconds since the benchmark began. pid: of the process that it was done to."""

    at: float
    kind: str
    pid: int


def possible(folder: Path, *, environments: bool) -> list[str]:
    """Kinds of faults of a run in this folder: its disk is filled only if it is small, hence made for it."""
    no_disk = shutil.disk_usage(folder).total > SMALL
    return [name for name in KINDS if not (name == ENVIRONMENT and not environments) and not (name == DISK and no_disk)]


def drawn(rng: random.Random, names: Sequence[str]) -> str:
    """The name of the next fault's kind, one of these."""
    (name,) = rng.choices(names, [KINDS[name].often for name in names])
    return name


def inject(name: str, rng: random.Random, at: float, processes: Mapping[int, str], run_dir: Path) -> Fault | None:
    """A fault of this kind; None if what it needs is not there (yet)."""
    kind = KINDS[name]
    pids = [pid for pid, command in processes.items() if kind.command in command]
    if not pids or (kind.damaging and not _damage(rng, run_dir)):
        return None
    pid = rng.choice(pids)
    if kind.filling:
        _fill(run_dir.parent / "filler", PAUSE_S)
    elif kind.signal is not None:
        try:
            os.kill(pid, kind.signal)
        except ProcessLookupError:
            return None
        if kind.paused is not None:
            Timer(kind.paused, _go_on, [pid]).start()
    return Fault(at, name, pid)


def _fill(file: Path, seconds: float) -> None:
    """Leaves no byte free for so long."""
    with suppress(OSError), file.open("ab", buffering=0) as stream:
        while True:
            stream.write(bytes(2**20))
    Timer(seconds, file.unlink).start()


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):  # it was killed meanwhile, as one that hangs
        os.kill(pid, SIGCONT)


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
