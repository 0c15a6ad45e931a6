"""The driver's connection to a Ray cluster. `connect` joins a cluster or starts a private one and returns a Session,
which reserves room for the roles of a run, starts their processes, and shuts down. The module also runs a function on
each node (on_each) and exports metrics through Ray (RayMetrics).

Ray reads its authentication mode from the environment when it is imported. So every import of ray is inside a function
that runs after `connect` has set that environment.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cluster import machine
from cluster.actor import DeadlineExceeded, S, within
from cluster.errors import WrongInput
from cluster.placement import Role, check, pack, waiting
from cluster.ray_actor import ExitReasons, Host, Remote, in_one_line
from cluster.ray_private import (
    RayProcesses,
    RuntimeFolder,
    behind_doors,
    check_doors,
    close_doors,
    job_config,
    system_config,
)


def metrics_address() -> str:
    """host:port at which Ray's agent on this node answers GET /metrics, for Prometheus. Raises WrongInput if this
    process has not joined a Ray cluster, or one that exports no metrics."""
    import ray

    if not ray.is_initialized():
        raise WrongInput("trackers: prometheus shows metrics by way of Ray, and this process has joined no cluster")
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)
    if node["MetricsExportPort"] <= 0:
        raise WrongInput(
            f"trackers: prometheus needs Ray's metrics, and the cluster's node {node['NodeManagerAddress']} was "
            "started with enable_metrics_collection false; start Ray without that setting, or leave prometheus out"
        )
    return f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"


class RayMetrics:
    """Gauges and counters of this process, exported by Ray's agent. Ray adds the prefix `ray_` to each name, and the
    suffix `_total` to that of a counter.

    Ray drops a gauge that was not set during two of its reports (20 s), so a gauge must be set repeatedly.
    """

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def set(self, name: str, labels: Mapping[str, str], value: float, description: str) -> None:
        """Sets a gauge. labels: must have the same keys in each call with this name."""
        from ray.util.metrics import Gauge

        if name not in self._known:
            self._known[name] = Gauge(name, description, tuple(labels))
        self._known[name].set(value, dict(labels))

    def add(self, name: str, labels: Mapping[str, str], value: float, description: str) -> None:
        """Adds to a counter; a value of 0 only registers it. labels: as for `set`."""
        from ray.util.metrics import Counter

        if name not in self._known:
            self._known[name] = Counter(name, description, tuple(labels))
        if value > 0:
            self._known[name].inc(value, dict(labels))


# Room for the roles of a run, reserved through Ray's placement groups.

PATIENCE_S = 3.0  # after this wait for a reservation the user is told what is waited for
NODE_ID = "ray.io/node-id"  # Ray's label with the id of a node


class Node(NamedTuple):
    """A node of the cluster. id: Ray's. name: Ray's name of the node (by default its address) and the host name."""

    id: str
    name: str


class Reservation:
    """The room for the roles of a run: a Ray placement group for each group of cluster.placement.Placement.

    Args:
        nodes: the living nodes, as ray.nodes() describes them.

    Raises WrongInput if the nodes cannot hold the roles, or if the node that a role must be on is not among them.
    """

    def __init__(self, roles: Sequence[Role], nodes: Sequence[Mapping[str, Any]]) -> None:
        self._placement = pack(roles)
        node_of, bundles = self._placement.node_of, self._placement.bundles
        left = {node["NodeID"]: dict(node["Resources"]) for node in nodes}
        self._labels = {}
        for bundle, name in node_of.items():
            node = _named(name, nodes)["NodeID"]
            _take(bundles[bundle], left[node], name)
            self._labels[bundle] = {NODE_ID: node}
        check([bundle for at, bundle in enumerate(bundles) if at not in node_of], [*left.values()])
        self._groups: list[tuple[list[int], Any]] = []  # indices of bundles, and their placement group

    async def until_ready(self, deadline_s: float, note: Callable[[str], None]) -> None:
        """Reserves the room. Raises DeadlineExceeded if it does not become free in time. note: is called with a line
        for the user if this takes longer than PATIENCE_S."""
        from ray.util.placement_group import placement_group

        bundles: list[dict[str, float]] = []
        try:
            async with within(deadline_s):
                for strategy, indices in self._placement.groups():
                    bundles = [self._placement.bundles[index] for index in indices]
                    labels = [self._labels.get(index, {}) for index in indices]
                    group = placement_group(bundles, strategy=strategy, bundle_label_selector=labels)
                    self._groups.append((indices, group))
                    free = asyncio.ensure_future(group.ready())
                    await asyncio.wait({free}, timeout=min(PATIENCE_S, deadline_s / 2))
                    if not free.done():
                        note(f"waiting up to {deadline_s:g} s for room on the cluster: {_missing(bundles)}")
                    await free
        except TimeoutError:
            raise DeadlineExceeded(
                f"placement: no room after {deadline_s:g} s: {_missing(bundles)}. Stop other jobs or ask for less"
            ) from None

    def strategy(self, role: Role) -> Any:
        """Ray's scheduling strategy for the process of this role."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._placement.bundle_of[role.name]
        indices, group = next(found for found in self._groups if bundle in found[0])
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=indices.index(bundle))

    def nodes(self) -> dict[str, Node]:
        """The node of each role, by its name."""
        import ray
        from ray.util.placement_group import placement_group_table

        known = {
            node["NodeID"]: Node(node["NodeID"], f"{node['NodeName']} ({node['NodeManagerHostname']})")
            for node in ray.nodes()
        }
        node_of: dict[int, Node] = {}
        for indices, group in self._groups:
            on = placement_group_table(group)["bundles_to_node_id"]
            node_of |= {index: known[on[at]] for at, index in enumerate(indices)}
        return {name: node_of[bundle] for name, bundle in self._placement.bundle_of.items()}

    def remove(self) -> None:
        """Frees the room."""
        from ray.util.placement_group import remove_placement_group

        for _, group in self._groups:
            remove_placement_group(group)
        self._groups = []


def _named(name: str, nodes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The node whose name, address or host name is `name`. Raises WrongInput if it is not exactly one."""
    called = [(node["NodeName"], node["NodeManagerAddress"], node["NodeManagerHostname"]) for node in nodes]
    found = [node for node, names in zip(nodes, called, strict=True) if name in names]
    if len(found) == 1:
        return found[0]
    rule = "must be of one node" if found else "must be a node of the cluster"
    raise WrongInput(
        f"placement: the name of a node {rule}, got {name}; the nodes are {', '.join(' '.join(n) for n in called)} "
        "(name, address, machine): give one of these"
    )


def _take(bundle: Mapping[str, float], left: dict[str, float], name: str) -> None:
    """Subtracts the resources of a bundle from those that are left on its node. Raises WrongInput if they do not
    suffice."""
    for kind, count in bundle.items():
        if left.get(kind, 0.0) < count:
            raise WrongInput(
                f"placement: node {name} has too little for what must be on it: {count:g} {kind} more, and "
                f"{left.get(kind, 0.0):g} left; lower cluster.rewards, or give another node"
            )
        left[kind] -= count


def _missing(bundles: Sequence[Mapping[str, float]]) -> str:
    import ray

    need = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    have = ray.available_resources()
    return ", ".join(f"{need[kind]:g} {kind} asked for, {have.get(kind, 0.0):g} free" for kind in need if need[kind])


A = TypeVar("A")
T = TypeVar("T")


class NodeFailed(str):
    """The reason, on one line, why `on_each` has no answer from a node."""


async def on_each(
    nodes: Iterable[Node], work: Callable[[A], T], argument: A, deadline_s: float
) -> dict[Node, T | NodeFailed]:
    """Calls `work(argument)` in a Ray task on each node, on all at the same time, and returns the results by node. The
    tasks run beside reserved roles, since they ask for no CPU cores. deadline_s: for each node."""
    wanted = sorted(set(nodes))
    answers = await asyncio.gather(*(_on(node, work, argument, deadline_s) for node in wanted))
    return dict(zip(wanted, answers, strict=True))


async def _on(node: Node, work: Callable[[A], T], argument: A, deadline_s: float) -> T | NodeFailed:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(work)
    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    ref = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(argument)
    try:
        async with within(deadline_s):
            found: T = await ref
    except TimeoutError:
        ray.cancel(ref, force=True)
        return NodeFailed(f"no answer within {deadline_s:g} s")
    except ray.exceptions.RayError as error:
        return NodeFailed(in_one_line(getattr(error, "cause", None) or error))
    return found


# Calls that a process may run at the same time. With Ray's default of 1000 the calls that check whether it still
# answers would wait until groups have ended.
CALLS = 2**16
GROUPS_BYTES = 256 * 2**20  # of the object store, for all that is not a policy: groups are kilobytes

# Arrow tables are pickled as rollout.schema defines it. Ray's own serialisation of tables goes column by column and
# carries every type; it took a fifth of the driver's time.
PICKLED_TABLES = {"RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION": "1"}

# Environment of every role. Its output reaches the driver, so progress bars and warnings for library authors are off.
ROLE_ENV = PICKLED_TABLES | {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a role without a GPU must not see one
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}


class Session:
    """A connection to a Ray cluster, with the room that this run has reserved and the processes that it has started.
    mode: local (a private cluster) or joined. ray_processes: Ray's own processes on this node."""

    def __init__(self, mode: str, folder: RuntimeFolder | None) -> None:
        self.mode = mode
        self._folder = folder
        # Roles have their temporary files in the private cluster's folder, which is removed even if a role is killed.
        self._role_env = {"TMPDIR": str(folder.of_ray)} if folder is not None else {}
        self._actors: list[Remote[Any]] = []
        self._reserved: Reservation | None = None
        import ray

        head: Any = ray._private.worker._global_node
        logs = Path(head.get_logs_dir_path())
        self.ray_processes = RayProcesses(head, logs)
        self._exits = ExitReasons(logs)

    def nodes(self) -> list[Mapping[str, Any]]:
        """The living nodes, as ray.nodes() describes them."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    async def reserve(self, roles: Sequence[Role], deadline_s: float, note: Callable[[str], None] = print) -> None:
        """Reserves room for every role. Raises WrongInput at once if the cluster is too small, and DeadlineExceeded if
        the room does not become free in time. note: see Reservation.until_ready."""
        self._reserved = Reservation(roles, self.nodes())
        if self.mode == "local":
            self._role_env |= waiting(roles, os.cpu_count() or 1)
        await self._reserved.until_ready(deadline_s, note)

    def node_of(self) -> dict[str, Node]:
        """The node of each role with reserved room, by the role's name."""
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
        """Starts the process of a role with reserved room, which constructs `factory(*args)`. env: environment
        variables that are set before the process imports anything. stateless: whether Ray replaces a lost process, on
        another node if need be, and repeats the calls that it had."""
        import ray

        options: dict[str, Any] = {
            "num_cpus": role.cpus,
            "num_gpus": role.gpus,
            # A process with state is replaced by Remote.revive, whose caller counts losses and repeats no call that may
            # have run.
            "max_restarts": -1 if stateless else 0,
            "max_task_retries": -1 if stateless else 0,  # until the deadline of the call
            "max_concurrency": CALLS,
            "enable_task_events": False,  # Ray never deletes the events of calls: 40 kB per step
            "scheduling_strategy": self._reservation().strategy(role),
            "runtime_env": self._runtime_env(role, env),
        }
        named = type(role.name, (Host,), {})  # its name appears in `ps`, `ray list actors` and log lines
        actor_class: Any = ray.remote(named).options(**options)
        sent = list(args)
        path = [*sys.path, os.getcwd()]
        remote: Remote[S] = Remote(
            role.name, lambda: actor_class.remote(factory, sent, path), self._exits, self.ray_processes.lost
        )
        self._actors.append(remote)
        return remote

    def _runtime_env(self, role: Role, env: Mapping[str, str]) -> dict[str, Any]:
        return {"env_vars": {**role_env(role, env), **self._role_env}}

    async def release(self) -> None:
        """Kills the processes that this run has started and frees its room."""
        for actor in self._actors:
            await actor.kill()
        if self._reserved is not None:
            self._reserved.remove()
        self._actors, self._reserved = [], None

    async def close(self) -> None:
        """Releases everything, leaves the cluster, and removes a private cluster's folder.

        A private cluster is shut down as a whole, without questions to its GCS about actors that are still starting or
        about the room: if a service manager or Slurm has sent SIGTERM to all processes, the GCS does not answer.
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
    """Environment variables of a role's process, in addition to those of this process and of the cluster."""
    return {**ROLE_ENV, **env, "OMP_NUM_THREADS": str(max(1, int(role.cpus)))}


def in_job() -> bool:
    """Whether this process is the entrypoint of `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def joins(address: str) -> bool:
    """Whether `connect` joins a cluster and does not start a private one."""
    return in_job() or address != "local"


def connect(
    address: str,
    min_cpus: float,
    policy_bytes: int = 0,
    shows_metrics: bool = False,
) -> Session:
    """Joins the cluster of the Ray job that this process is in, or else the cluster at `address`; starts a private
    cluster for `local`.

    min_cpus: CPU cores that a private cluster offers at least. policy_bytes: size of a policy that its object store
    must have room for. shows_metrics: whether Ray must export metrics for Prometheus. Raises WrongInput.

    A bare ray.init() is never called, since it joins the cluster that was last started on the machine, even a dead one.
    """
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # the environment is complete already
    os.environ.update(PICKLED_TABLES)
    if not _on_terminal():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colours the output of its processes in files too
    with _sigterm_as_before():
        return _connected(address, min_cpus, policy_bytes, shows_metrics)


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # stderr is None, or closed
        return False


@contextmanager
def _sigterm_as_before() -> Iterator[None]:
    """Restores the handler of SIGTERM at the end of the block, since ray.init sets its own, which ends the process. (A
    SIGTERM while Ray starts meets Ray's handler, which ends the processes that it has started.)"""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _connected(address: str, min_cpus: float, policy_bytes: int, shows_metrics: bool) -> Session:
    if joins(address):
        _join(address)
        if shows_metrics:
            metrics_address()  # raises WrongInput if the cluster exports no metrics
        return Session("joined", None)
    close_doors()
    import ray

    folder = RuntimeFolder()
    try:
        with behind_doors():
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=max(os.cpu_count() or 1, int(min_cpus)),
                object_store_memory=store_bytes(policy_bytes, machine.shared_memory() or 0),
                logging_level=logging.WARNING,
                log_to_driver=True,
                _temp_dir=str(folder.of_ray),
                _system_config=system_config(shows_metrics),
                job_config=job_config(),
            )
    except BaseException:
        folder.remove()
        raise
    check_doors()
    return Session("local", folder)


def _join(address: str) -> None:
    """Connects to the cluster of this process's Ray job, or to that at `address`. Raises WrongInput without one."""
    if not in_job():
        _check_listening(address)
    import ray

    try:
        ray.init(
            address=None if in_job() else address, log_to_driver=True, logging_level=logging.WARNING,
            job_config=job_config(),
        )  # fmt: skip
    except ConnectionError as error:
        raise WrongInput(
            f"cluster.address: no running Ray was found for {address!r}; start one with: ray start --head, or use "
            "cluster.address=local"
        ) from error


def wanted_store(policy_bytes: int) -> int:
    """Bytes of an object store with room for two policies: one on its way and the previous one, which is still held.
    Ray writes objects without room to disk, at a third of the speed."""
    return GROUPS_BYTES + 2 * policy_bytes


def store_bytes(policy_bytes: int, free: int) -> int:
    """Bytes of a private cluster's object store. free: free bytes of shared memory; Ray would put a larger store on
    disk as a whole."""
    return max(GROUPS_BYTES, min(wanted_store(policy_bytes), int(0.9 * free)))


def _check_listening(address: str) -> None:
    """Raises WrongInput if nothing listens at the address; Ray itself would try for a minute without a message."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise WrongInput(
                f"cluster.address: nothing answers at {address} ({error.strerror or error}); start it with: "
                f"ray start --head --port={port}, or use cluster.address=local"
            ) from None
