"""Starts and watches a private Ray cluster, for cluster.ray_cluster. It is private by a token, by the loopback
interface and by a folder closed to other users; it has no page of metrics unless one is asked for, no autoscaler and no
API server. RayProcesses notices when one of Ray's own processes ends.

Ray reads its authentication mode and its token from the environment when it is imported, here and in each process that
it starts. So `close_doors` must run before anything imports ray.
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

_USUAL, _PREFIX = Path("/tmp"), "gl-"
LONGEST = 21  # bytes of the path of TMPDIR: a socket's path has at most 107, and 86 are used below TMPDIR


def root() -> Path:
    """The folder for temporary folders: TMPDIR, or /tmp if TMPDIR is not set, too long or not writable. Raises
    WrongInput if neither can be used."""
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
    """The folder of a private cluster, <root>/gl-<pid>-<random>, which only its owner can enter. of_ray: the folder in
    it that Ray gets.

    Ray makes its folder and its sockets accessible to all users; the folder above keeps them out.
    """

    def __init__(self, place: Path | None = None) -> None:
        """Makes the folder in `place` (None: `root()`), after removing the folders that killed drivers have left there.
        Raises WrongInput."""
        place = root() if place is None else place
        for folder in abandoned(place, _PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
        self._lock = locked(self.path)  # held until this process ends, however it ends
        self.of_ray = self.path / "r"
        self.of_ray.mkdir()

    def remove(self) -> None:
        """Removes the folder with all files of Ray and of the roles."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


# Signals that a scheduler sends to all processes of a job as a warning, or a terminal as it closes. Only the driver
# acts on them and ends the run, for which it needs the other processes. SIGTERM is not among them, since Ray and reward
# processes use it to end their children.
FOR_THE_DRIVER = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

log = logging.getLogger("cluster")

_ENV = {
    "RAY_AUTH_MODE": "token",
    # As on Windows and macOS, Ray's node is then 127.0.0.1, and every process listens there only. (Ray would replace
    # `_node_ip_address="127.0.0.1"` by the address in the network.)
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # The dashboard's Prometheus page answers without a token, and only an invalid port turns it off.
    "DASHBOARD_METRIC_PORT": "-1",
}


def close_doors() -> None:
    """Sets this process's environment for a private cluster. Must be called before anything imports ray."""
    os.environ.update(_ENV)
    # The token is in the environment and not in the home folder. Ray keeps the first token that it sees.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def system_config(shows_metrics: bool) -> dict[str, Any]:
    """Settings of Ray's own processes. shows_metrics: whether the node's agent exports metrics, on a page of 127.0.0.1
    that answers without a token."""
    return {
        "enable_metrics_collection": shows_metrics,
        # Ray would start a process per core for tasks, although every role has a process of its own.
        "enable_worker_prestart": False,
        "prestart_worker_first_driver": False,
    }


@contextmanager
def behind_doors() -> Iterator[None]:
    """Patches Ray inside this block, since ray.init has no arguments for the following. Ray starts its processes in
    process groups of their own, its agent listens at any free port, and neither autoscaler nor API server is started.
    These two answer without the token, one with metrics, the other to `ray list` and `ray job`.

    A signal to the driver's process group (`timeout 2h` sends one) must reach the driver alone, or Ray's processes
    would end in disorder beside it. So each has a group of its own, and it ignores FOR_THE_DRIVER, as its workers do,
    since such signals can be sent to all processes of a job. If the block raises, also by SIGTERM, Ray's processes are
    killed.
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
        node._webui_url = ""  # Ray's value without a dashboard

    def at_a_free_port(node: Node) -> None:
        params: RayParams = node._ray_params
        params.dashboard_agent_listen_port = 0  # any free port; Ray's default 52365 suffices for one cluster only
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
    """Makes this process, and all that it starts, ignore the signals FOR_THE_DRIVER."""
    for number in FOR_THE_DRIVER:
        signal.signal(number, signal.SIG_IGN)


def job_config() -> Any:
    """The job's configuration for Ray, by which no file of the user hides a module of gleaner in the workers. Ray would
    put the folder of the driver's script and the working directory first on their sys.path. It does not for a job with
    a working directory of its own, which is pretended here; cluster.ray_actor.Host appends the driver's path."""
    from ray.job_config import JobConfig

    config: JobConfig = JobConfig(_py_driver_sys_path=entries())
    config._runtime_env_has_working_dir = lambda: True  # type: ignore[method-assign]
    return config


def end_at_once(node: Any) -> None:
    """Kills Ray's processes on this node with their process groups. The agents that the raylet has started would run
    for another minute or two if the raylet alone were killed."""
    for _, process in node.live_processes():
        with suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(process.pid, signal.SIGKILL)
    node.kill_all_processes(check_alive=False)


def check_doors() -> None:
    """Warns if ray was imported before `close_doors`, so that its ports are open to the network."""
    from ray.util import get_node_ip_address

    address = get_node_ip_address()
    if address not in ("127.0.0.1", "::1"):
        log.warning(
            "the private Ray cluster listens on %s and not on 127.0.0.1 only (a token is asked for): ray had been "
            "imported before this run; start it in a fresh process, or import gleaner first",
            address,
        )


T = TypeVar("T")

EVERY_S = 1.0
NEEDED = ("gcs_server", "raylet")  # Ray's other processes only serve the dashboard and the logs
NEXT_STEP = "start the same command again: it goes on from the last checkpoint"


class RayProcesses:
    """Watches Ray's own processes on this node. node: Ray's record of the processes that it has started. logs: the
    folder with their output.

    Ray itself reports their end late (that of the GCS after 60 s, by ending this process), or as the death of an actor
    or of an actor's owner.
    """

    def __init__(self, node: Any, logs: Path) -> None:
        self._node, self._logs = node, logs

    def lost(self) -> str | None:
        """A sentence about the first process of NEEDED that has ended, or None if all run."""
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
        """Names the agent that ended before the raylet: a raylet ends itself as soon as one of its agents has ended."""
        log = self._logs / "raylet.out"
        found = kind == "raylet" and log.exists() and re.findall(r"agent_name = (\w+)", log.read_text(errors="replace"))
        return f", as its {found[-1]} had" if found else ""

    async def watch(self) -> NoReturn:
        """Checks once a second, and never returns. Raises ClusterLost when a process of NEEDED has ended."""
        while True:
            await asyncio.sleep(EVERY_S)
            if text := self.lost():
                raise ClusterLost(text)

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work` and returns or raises its result. If a process of NEEDED ends first, cancels the work and
        raises ClusterLost."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            return await (working if working.done() else watching)
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    def end(self, pids: Iterable[int | None]) -> None:
        """Kills what is left of a cluster that has lost one of its processes, first the actors' processes `pids`.

        Ray's own shutdown would wait for the lost process for a minute, and once more when this interpreter exits; its
        atexit handler is removed.
        """
        import ray

        atexit.unregister(ray._private.worker.shutdown)
        for pid in pids:
            if pid is not None and _is_of_ray(pid):
                os.kill(pid, signal.SIGKILL)
        end_at_once(self._node)


def _is_of_ray(pid: int) -> bool:
    """Whether the process is a worker of Ray. It is not if the worker has ended and another process has its id."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
