"""The processes of a run or of a cluster, whoever started them: all inherit a mark in their environment, whose variable
begins with XDG_, since reward processes keep those (rewards/environment.py). And what one command takes."""

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

# VmHWM: ru_maxrss would be this process's, which the child has been until it became another.
_COMMAND = (
    "import re, sys, time\nfrom importlib import import_module\n"
    "code = import_module(sys.argv[1]).main(sys.argv[2:])\n"
    "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
    "print('spent', time.process_time(), peak)\nsys.exit(code)\n"
)


class Spent(NamedTuple):
    """Seconds of CPU and of wall time, imports included, and the greatest resident memory, of a process alone."""

    cpu_s: float
    wall_s: float
    peak_bytes: int


def spent(module: str, *words: str) -> Spent:
    """By `main` of a module, given these words, in a process of its own. Raises RuntimeError if it fails."""
    begun = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", _COMMAND, module, *words], capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - begun
    if ran.returncode != 0:
        raise RuntimeError(ran.stdout + ran.stderr)
    cpu, peak = ran.stdout.rpartition("spent ")[2].split()
    return Spent(float(cpu), wall_s, int(peak) * 1024)


def marked(mark: str) -> dict[int, str]:
    """Living processes in whose environment the mark is: pid -> command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked
    return found
