"""Watches Ray's own processes of a private cluster, which are children of this process.

Ray itself reports their loss late (that of the GCS after 60 s, and then it ends this process), or as something else (an
actor that died, or an actor's owner).
"""

import asyncio
import atexit
import os
import re
import signal
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cluster.actor import ClusterLost
from cluster.ray_private import end_at_once

T = TypeVar("T")

EVERY_S = 1.0
NEEDED = ("gcs_server", "raylet")  # the others only serve the dashboard and the logs
NEXT_STEP = "start the same command again: it goes on from the last checkpoint"


class RayProcesses:
    """Ray's processes on this node. node: Ray's own record of what it has started here."""

    def __init__(self, node: Any, logs: Path) -> None:
        self._node, self._logs = node, logs

    def lost(self) -> str | None:
        """A sentence about the first needed process that has ended, or None if all run."""
        for kind, process in self._node.dead_processes():
            if kind in NEEDED:
                code = process.returncode
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return (
                    f"Ray's {kind} (pid {process.pid} on {os.uname().nodename}) has ended ({how}{self._agent(kind)}), "
                    f"and no process of the run can go on without it; {NEXT_STEP}"
                )
        return None

    def _agent(self, kind: str) -> str:
        """Names the agent that ended before the raylet, which ends itself as soon as one of its agents has."""
        log = self._logs / "raylet.out"
        found = kind == "raylet" and log.exists() and re.findall(r"agent_name = (\w+)", log.read_text(errors="replace"))
        return f", as its {found[-1]} had" if found else ""

    async def watch(self) -> NoReturn:
        """Looks once a second; ends only by raising ClusterLost."""
        while True:
            await asyncio.sleep(EVERY_S)
            if text := self.lost():
                raise ClusterLost(text)

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns or raises what the work does. If a process of Ray ends first: cancels the work, raises
        ClusterLost."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            return await (working if working.done() else watching)
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    def end(self, pids: Iterable[int | None]) -> None:
        """Ends what is left of a cluster that has lost a part: first the actors' processes, given by `pids`.

        Ray's own shutdown would ask the lost part for a minute, and again as this interpreter exits; it is taken out.
        """
        import ray

        atexit.unregister(ray._private.worker.shutdown)
        for pid in pids:
            if pid is not None and _is_of_ray(pid):
                os.kill(pid, signal.SIGKILL)
        end_at_once(self._node)


def _is_of_ray(pid: int) -> bool:
    """False if the process ended, and another one has its number by now."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
