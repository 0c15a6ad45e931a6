"""A connection to a Ray cluster: connect, place, spawn, shut down.

Ray reads its authentication mode from the environment once, as it is imported; hence every import of it stands inside
a function that runs after `connect` has set that environment.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import machine
from cluster.actor import S
from cluster.exit_reason import ExitReasons
from cluster.placement import PlacementError, Role, waiting
from cluster.prestart import setup
from cluster.ray_actor import Host, Remote
from cluster.ray_metrics import metrics_address
from cluster.ray_private import check_doors, close_doors, job_config, short_start, system_config
from cluster.ray_reservation import Node, Reservation
from cluster.ray_temp_dir import RuntimeFolder
from cluster.ray_watch import RayProcesses

CALLS = 2**16  # of a process at once; behind Ray's own limit, 1000, its pulse would wait for groups to end
GROUPS_BYTES = 256 * 2**20  # of the object store, for what is no policy: groups are kilobytes

# Tables travel as pickle sends them (rollout.schema), which Ray else overrides with a slower way of its own: column by
# column and with every type, a fifth of the driver's work.
PICKLED_TABLES = {"RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION": "1"}

# Set for every role; its output reaches the driver: no progress bars, no warnings meant for library authors.
ROLE_ENV = PICKLED_TABLES | {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a role without a GPU must not see one
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}


class Session:
    """A connection to a Ray cluster and what this run has put on it."""

    def __init__(self, mode: str, folder: RuntimeFolder | None, commands: Mapping[str, str] | None = None) -> None:
        self.mode = mode  # local | joined
        self._commands = commands or {}
        self._folder = folder
        # Temporary files of roles lie in the private cluster's folder, which is removed even if a role is killed.
        self._role_env = {"TMPDIR": str(folder.ray)} if folder is not None else {}
        self._actors: list[Remote[Any]] = []
        self._reserved: Reservation | None = None
        import ray

        node: Any = ray._private.worker._global_node
        logs = Path(node.get_logs_dir_path())
        self.ray_processes = RayProcesses(node, logs)
        self._exits = ExitReasons(logs)

    def nodes(self) -> list[Mapping[str, Any]]:
        """The living nodes, as Ray describes them."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    async def reserve(self, roles: Sequence[Role], deadline_s: float, note: Callable[[str], None] = print) -> None:
        """Reserves room for every role. Raises PlacementError at once if the cluster is too small, DeadlineExceeded if
        no room becomes free in time. `note` receives a line about what is being waited for."""
        self._reserved = Reservation(roles, self.nodes())
        if self.mode == "local":
            self._role_env |= waiting(roles, os.cpu_count() or 1)
        await self._reserved.until_ready(deadline_s, note)

    def node_of(self) -> dict[str, Node]:
        """The node of each role that room is reserved for, by the role's name."""
        return self._reservation().nodes()

    def _reservation(self) -> Reservation:
        assert self._reserved is not None, "reserve() comes first"
        return self._reserved

    def spawn(
        self,
        role: Role,
        factory: Callable[..., S],
        args: Sequence[Any],
        env: Mapping[str, str],
        *,
        stateless: bool = False,
    ) -> Remote[S]:
        """Starts a process for a reserved role; `env` is set before anything is imported there. stateless: if it is
        lost, Ray starts another, on another node if need be, and makes again the calls that it had."""
        import ray

        options: dict[str, Any] = {
            "num_cpus": role.cpus,
            "num_gpus": role.gpus,
            # Else Remote.revive starts another, and its caller counts; and what may have run is not run again unseen.
            "max_restarts": -1 if stateless else 0,
            "max_task_retries": -1 if stateless else 0,  # until the deadline of the call
            "max_concurrency": CALLS,
            "enable_task_events": False,  # Ray keeps one of each call for ever: 40 kB a step
            "scheduling_strategy": self._reservation().strategy(role),
            "runtime_env": self._runtime_env(role, env),
        }
        named = type(role.name, (Host,), {})  # so that `ps`, `ray list actors` and log lines say which role it is
        actor_class: Any = ray.remote(named).options(**options)
        sent = list(args)
        path = [*sys.path, os.getcwd()]
        remote: Remote[S] = Remote(
            role.name, lambda: actor_class.remote(factory, sent, path), self._exits, self.ray_processes.lost
        )
        self._actors.append(remote)
        return remote

    def _runtime_env(self, role: Role, env: Mapping[str, str]) -> dict[str, Any]:
        wanted: dict[str, Any] = {"env_vars": {**role_env(role, env), **self._role_env}}
        if role.name in self._commands:
            wanted["py_executable"] = self._commands[role.name]
        return wanted

    async def release(self) -> None:
        """Kills what this run started and gives its room back."""
        for actor in self._actors:
            await actor.kill()
        if self._reserved is not None:
            self._reserved.remove()
        self._actors, self._reserved = [], None

    async def close(self) -> None:
        """Releases everything, leaves the cluster, and removes a private cluster's folder.

        A private cluster ends as a whole, and its GCS is asked for nothing (of an actor that is still starting, or
        about the room): if a service manager or Slurm sent SIGTERM to all processes, it answers no more.
        """
        import ray

        if self.ray_processes.lost() is None:
            if self._folder is None:
                await self.release()
            else:
                for actor in [one for one in self._actors if one.pid is not None]:
                    await actor.kill()
            ray.shutdown()
        else:
            self.ray_processes.end([actor.pid for actor in self._actors])
        if self._folder is not None:
            self._folder.remove()


def role_env(role: Role, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a role's process, beside that of this one and the cluster's own."""
    return {**ROLE_ENV, **env, "OMP_NUM_THREADS": str(max(1, int(role.cpus)))}


def in_job() -> bool:
    """True inside the entrypoint of `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def joins(address: str) -> bool:
    """Whether `connect` joins a cluster, rather than starting a private one."""
    return in_job() or address != "local"


def connect(
    address: str,
    min_cpus: float,
    policy_bytes: int = 0,
    shows_metrics: bool = False,
    commands: Mapping[str, str] | None = None,
) -> Session:
    """Joins the cluster that launched us, or the one at `address`, or starts a private one for `local`, with an object
    store for policies of that many bytes. shows_metrics: the page that Prometheus reads is wanted. commands: of the
    workers of roles that are prestarted (cluster.prestart).

    Never a bare ray.init(): it would join whatever cluster was last started on the machine, even a dead one.
    """
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # the environment is complete already
    os.environ.update(PICKLED_TABLES)
    if not _on_terminal():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # else it colours what its processes say in files, too
    with _sigterm_as_before():
        return _connected(address, min_cpus, policy_bytes, shows_metrics, commands)


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


@contextmanager
def _sigterm_as_before() -> Iterator[None]:
    """Ray sets a handler of its own, which ends the process: behind this block it is the caller's again. (What comes
    while Ray starts still meets Ray's, which ends what it has started.)"""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _connected(
    address: str, min_cpus: float, policy_bytes: int, shows_metrics: bool, commands: Mapping[str, str] | None
) -> Session:
    if joins(address):
        _join(address)
        if shows_metrics:
            metrics_address()  # or it says why there is none
        return Session("joined", None)
    close_doors()
    import ray

    folder = RuntimeFolder()
    try:
        with short_start(Path(setup.__file__)):
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=max(os.cpu_count() or 1, int(min_cpus)),
                object_store_memory=store_bytes(policy_bytes, machine.shared_memory() or 0),
                logging_level=logging.WARNING,
                log_to_driver=True,
                _temp_dir=str(folder.ray),
                _system_config=system_config(shows_metrics),
                job_config=job_config(),
            )
    except BaseException:
        folder.remove()
        raise
    check_doors(ray)
    return Session("local", folder, commands)


def _join(address: str) -> None:
    """Connects to the cluster that launched us, or the one at `address`. Raises PlacementError if there is none."""
    if not in_job():
        _check_listening(address)
    import ray

    try:
        ray.init(
            address=None if in_job() else address, log_to_driver=True, logging_level=logging.WARNING,
            job_config=job_config(),
        )  # fmt: skip
    except ConnectionError as error:
        raise PlacementError(
            f"cluster.address: no running Ray was found for {address!r}; start one with: ray start --head, or use "
            "cluster.address=local"
        ) from error


def wanted_store(policy_bytes: int) -> int:
    """Bytes of an object store with room for two policies, one on its way and the one before it, which is still held.
    What finds no room is written to disk, at a third of the speed."""
    return GROUPS_BYTES + 2 * policy_bytes


def store_bytes(policy_bytes: int, free: int) -> int:
    """Of a private cluster's store. With more than `free`, the bytes left in shared memory, all of it would lie on
    disk."""
    return max(GROUPS_BYTES, min(wanted_store(policy_bytes), int(0.9 * free)))


def _check_listening(address: str) -> None:
    """Raises PlacementError if nothing listens at the address; Ray itself would try for a minute and say nothing."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise PlacementError(
                f"cluster.address: nothing answers at {address} ({error.strerror or error}); start it with: "
                f"ray start --head --port={port}, or use cluster.address=local"
            ) from None
