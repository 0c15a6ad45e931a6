"""What keeps a private Ray cluster private: a token, the loopback interface, and no page of metrics unless asked for;
and small: no autoscaler, no API server.

Ray reads all but the last from the environment, once, as it is imported here and in each process that it starts.
"""

import asyncio
import atexit
import logging
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cluster.actor import ClusterLost
from cluster.errors import WrongInput
from cluster.files import abandoned, locked
from cluster.own_path import entries

# The folder of a private Ray cluster: closed to other users, and removed after a driver that was killed before it
# could.

_USUAL, _PREFIX = Path("/tmp"), "gl-"
LONGEST = 21  # bytes of its path: that of a socket ends at 107, and gl-... and what Ray makes in it have 86


def root() -> Path:
    """Where temporary folders are made here: TMPDIR, or /tmp where that is not set, too long or not to be written.
    Raises WrongInput: neither can be."""
    given = Path(os.environ.get("TMPDIR") or _USUAL)
    wrong = {}
    for folder in dict.fromkeys((given, _USUAL)):
        if len(os.fsencode(folder)) > LONGEST:
            wrong[folder] = f"has more than {LONGEST} bytes"
            continue
        try:
            tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder).cleanup()
        except OSError as error:
            wrong[folder] = error.strerror or str(error)
        else:
            return folder
    told = ", ".join(f"{folder}: {why}" for folder, why in wrong.items())
    raise WrongInput(
        f"TMPDIR: must be a folder that can be written, of a path of at most {LONGEST} bytes, since sockets lie in it "
        f"({told}); set it to such a folder"
    )


class RuntimeFolder:
    """<root>/gl-<pid>-<random>, for its owner only, and in it the folder that Ray is given.

    Ray opens whatever it is given to everybody, sockets included; the folder above keeps them out.
    """

    def __init__(self, place: Path | None = None) -> None:
        """Makes it in `place`, or the usual one; folders of processes that are gone are swept away first. Raises
        WrongInput."""
        place = root() if place is None else place
        for folder in abandoned(place, _PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
        self._lock = locked(self.path)  # held until this process ends, however it ends
        self.of_ray = self.path / "r"
        self.of_ray.mkdir()

    def remove(self) -> None:
        """Removes it with all that Ray and the roles left there."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


# What schedulers send to all processes of a job as a warning, or a terminal as it vanishes: the driver ends the run,
# and needs the others for its last step. Not SIGTERM, by which Ray and reward processes end what they have started.
FOR_THE_DRIVER = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

log = logging.getLogger("cluster")

_ENV = {
    "RAY_AUTH_MODE": "token",
    # What Ray does on a desktop system, where nobody may be asked by a firewall: its node is 127.0.0.1, and every
    # port of every process listens there only. (`_node_ip_address="127.0.0.1"` is turned back into the outer address.)
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # The dashboard's Prometheus page answers without a token and has no switch; at no port none starts.
    "DASHBOARD_METRIC_PORT": "-1",
}


def close_doors() -> None:
    """Sets this process's environment for a private cluster; before anything imports ray."""
    os.environ.update(_ENV)
    # The token is in this process's environment alone, not in the home folder. Ray keeps the first one that it sees.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def system_config(shows_metrics: bool) -> dict[str, Any]:
    """Settings of Ray's own processes. shows_metrics: a tracker wants the page of the node's agent, which answers
    without a token; on 127.0.0.1, as all else."""
    return {
        "enable_metrics_collection": shows_metrics,
        # A process for each core, started at once for tasks; every role has a process of its own.
        "enable_worker_prestart": False,
        "prestart_worker_first_driver": False,
    }


@contextmanager
def behind_doors() -> Iterator[None]:
    """Inside this block Ray starts its processes in groups of their own, neither autoscaler nor API server, and an
    agent that listens at a port of its own. ray.init has no arguments for that.

    The autoscaler shows its metrics at a port, and the API server what `ray list` and `ray job` ask, without the token.

    A signal to the driver's process group (`timeout 2h` sends one) is for the driver alone: Ray's processes would end
    beside it, and not whole. So each has a group of its own; and as some signals are sent to all processes of a job, it
    ignores FOR_THE_DRIVER, as do its workers. A start that fails, or that SIGTERM cuts short, ends them.
    """
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    def console_popen(command: Any, *, preexec_fn: Callable[[], None], **options: Any) -> Any:
        def begin() -> None:
            leave_to_the_driver()
            preexec_fn()

        return popen(command, preexec_fn=begin, process_group=0, **options)

    monitor, server = Node.start_monitor, Node.start_api_server
    processes, popen = Node.start_ray_processes, services.ConsolePopen
    started: list[Node] = []

    def without_monitor(node: Node) -> None:
        pass

    def without_server(node: Node, **options: Any) -> None:
        node._webui_url = ""  # as where it shows no dashboard

    def at_a_free_port(node: Node) -> None:
        params: RayParams = node._ray_params
        params.dashboard_agent_listen_port = 0  # any that is free; Ray's 52365 goes to one cluster alone
        started.append(node)
        processes(node)

    Node.start_monitor = without_monitor  # type: ignore[method-assign]
    Node.start_api_server = without_server  # type: ignore[method-assign,assignment]
    Node.start_ray_processes = at_a_free_port  # type: ignore[method-assign]
    services.ConsolePopen = console_popen  # type: ignore[assignment,misc]
    try:
        yield
    except BaseException:
        for node in started:
            end_at_once(node)
        raise
    finally:
        Node.start_monitor, Node.start_api_server = monitor, server  # type: ignore[method-assign]
        Node.start_ray_processes = processes  # type: ignore[method-assign]
        services.ConsolePopen = popen  # type: ignore[misc]


def leave_to_the_driver() -> None:
    """This process ignores FOR_THE_DRIVER, and so do all that it starts."""
    for number in FOR_THE_DRIVER:
        signal.signal(number, signal.SIG_IGN)


def job_config() -> Any:
    """Of a driver by whose files none of ours is hidden in its workers. Ray puts the folder of the driver's script and
    its working directory first on their path: they get none of it, as where a job has a working directory of its own,
    and the driver's path last (cluster.ray_actor.Host)."""
    from ray.job_config import JobConfig

    config: JobConfig = JobConfig(_py_driver_sys_path=entries())
    config._runtime_env_has_working_dir = lambda: True  # type: ignore[method-assign]
    return config


def end_at_once(node: Any) -> None:
    """Kills the Ray processes of this node and the agents that its raylet started: these run on for a minute or two
    after a raylet that is killed alone."""
    for _, process in node.live_processes():
        with suppress(ProcessLookupError):  # nothing of that group is left
            os.killpg(process.pid, signal.SIGKILL)
    node.kill_all_processes(check_alive=False)


def check_doors() -> None:
    """Warns if close_doors came too late: ray had been imported before it, so its ports are open to the network."""
    from ray.util import get_node_ip_address

    address = get_node_ip_address()
    if address not in ("127.0.0.1", "::1"):
        log.warning(
            "the private Ray cluster listens on %s and not on 127.0.0.1 only (a token is asked for): ray had been "
            "imported before this run; start it in a fresh process, or import gleaner first",
            address,
        )


# Watches Ray's own processes of a private cluster, which are children of this process.
#
# Ray itself reports their loss late (that of the GCS after 60 s, and then it ends this process), or as something else
# (an actor that died, or an actor's owner).

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
