"""Why a process ended: worked out from Ray's report of its exit, its log, and the kernel's count of memory kills."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NO_WORD = "it was killed by a signal (as `kill -9` and the kernel's out-of-memory killer do), or called os._exit"


class Found(NamedTuple):
    """text: for people. reason: equal for equal faults; None if the process may have been killed from outside."""

    text: str
    reason: str | None


class ExitReasons:
    """Explains the exits of one cluster's processes. logs: the folder with their output, if it is on this machine."""

    def __init__(self, logs: Path | None) -> None:
        self._logs = logs
        self._memory_kills = memory_kills()

    def of(self, ray_says: str, pid: int | None) -> Found:
        """What ended the process `pid`; ray_says: the text of Ray's exception."""
        pid = pid or _pid_in(ray_says)
        who = f"pid {pid}: " if pid else ""
        if "OutOfMemory" in ray_says or "OUT_OF_MEMORY" in ray_says:
            return Found(f"{who}Ray's memory monitor ended it, since the machine was nearly out of memory", None)
        code = re.search(r"exit code (\S[^\n]*?)\.?\s*(?:\n|$)", ray_says)
        if code:
            return Found(f"{who}exit code {code[1]}", f"exit code {code[1]}")
        crash = self._crash(pid)
        if crash:
            return Found(f"{who}{crash}", crash)
        kills, self._memory_kills = memory_kills() - self._memory_kills, memory_kills()
        if kills > 0:
            return Found(f"{who}killed, and the kernel's out-of-memory killer struck {kills} times meanwhile", None)
        if "node" in ray_says and "connection error" not in ray_says:
            return Found(f"{who}its node was lost", None)
        return Found(f"{who}{NO_WORD}", None)

    def _crash(self, pid: int | None) -> str | None:
        """The line that a crash leaves at the end of a process's output."""
        if self._logs is None or pid is None:
            return None
        for path in self._logs.glob(f"worker-*-{pid}.err"):
            found = re.findall(
                r"^(Fatal Python error: .*|terminate called .*)$", path.read_text(errors="replace"), re.M
            )
            if found:
                return str(found[-1])
        return None


def memory_kills() -> int:
    """How many processes the kernel has killed for memory: in our control group (version 2 or 1), or, where that does
    not count, on this machine."""
    for path in _counters():
        try:
            text = path.read_text()
        except OSError:  # the other version of control groups, or the root of them
            continue
        found = re.search(r"^oom_kill (\d+)$", text, re.M)
        if found:
            return int(found[1])
    return 0


def _counters() -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, folder = line.split(":", 2)
        if number == "0":
            yield root / folder.lstrip("/") / "memory.events"
        elif controllers == "memory":
            yield root / "memory" / folder.lstrip("/") / "memory.oom_control"
    yield from (root / "memory.events", Path("/proc/vmstat"))


def _pid_in(ray_says: str) -> int | None:
    found = re.search(r"\bpid: (\d+)", ray_says)
    return int(found[1]) if found else None
