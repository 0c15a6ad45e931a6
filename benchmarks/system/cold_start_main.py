"""A run of learner.main that writes down when what happened, in every process of it; see benchmarks.system.cold_start.

Marks are lines `seconds since the epoch <tab> name` in the file named by GLEANER_MARKS. This module imports no more
than learner.main does before the roles' processes start: what came before that would count as the product's.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.prestart.prestarted import Prestarted

VARIABLE = "GLEANER_MARKS"


def mark(name: str, at: float | None = None) -> None:
    """Only the first of a name counts."""
    with open(os.environ[VARIABLE], "a") as file:
        file.write(f"{time.time() if at is None else at:.4f}\t{name}\n")


def born() -> float:
    """When this process was started, in seconds since the epoch (proc(5): starttime)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Arguments: those of learner.main."""
    mark("driver: python is up")
    from learner.driver import prestart
    from learner.main import main as learner_main

    inner = prestart.prestarted

    def prestarted(*args: Any, **named: Any) -> Prestarted:
        started = inner(*args, **named)
        mark("driver: roles begin to import")
        from benchmarks.system.cold_start_run import mark_parts

        mark_parts()
        return started

    prestart.prestarted = prestarted
    code = learner_main(sys.argv[1:])
    mark("driver: run over")
    sys.exit(code)
