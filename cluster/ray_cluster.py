"""A connection to a Ray cluster: connect, place, spawn, shut down.

Ray reads its authentication mode from the environment once, as it is imported; hence every import of it stands inside
a function that runs after `connect` has set that environment.
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

# Numbers that Ray's agent of this node shows to Prometheus, and where it does.


def metrics_address() -> str:
    """host:port at which the agent of this process's node answers to GET /metrics. Raises WrongInput where this
    process is not in a Ray cluster, or in one that shows no metrics."""
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
    """Gauges and counters of this process by name; Ray puts `ray_` before a name, and `_total` behind a counter's.

    A gauge that was not set for two of Ray's reports (20 s) is shown no more, so one that is to stay is set again.
    """

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def set(self, name: str, labels: Mapping[str, str], value: float, description: str) -> None:
        """Of a gauge. labels: a name has always the same keys."""
        from ray.util.metrics import Gauge

        if name not in self._known:
            self._known[name] = Gauge(name, description, tuple(labels))
        self._known[name].set(value, dict(labels))

    def add(self, name: str, labels: Mapping[str, str], value: float, description: str) -> None:
        """To a counter; nothing where the value is 0."""
        from ray.util.metrics import Counter

        if name not in self._known:
            self._known[name] = Counter(name, description, tuple(labels))
        if value > 0:
            self._known[name].inc(value, dict(labels))


# Room for the processes of a run on the nodes of a cluster, reserved through Ray's placement groups.

PATIENCE_S = 3.0  # of waiting for a reservation before a line says so
NODE_ID = "ray.io/node-id"  # the label by which Ray knows a node


class Node(NamedTuple):
    """A node of the cluster. name: the one Ray gives it, by default its address, and that of its machine."""

    id: str
    name: str


class Reservation:
    """One group of bundles for the roles that are packed, which Ray puts on as few nodes as possible, and one for those
    that it spreads over as many as possible.

    Args:
        nodes: those that live, as Ray describes them.

    Raises WrongInput if they cannot hold the roles, or the one that a role must be on is none of them.
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
        self._groups: list[tuple[list[int], Any]] = []  # indices of bundles, and Ray's group of them

    async def until_ready(self, deadline_s: float, note: Callable[[str], None]) -> None:
        """Raises DeadlineExceeded if no room becomes free in time. `note` receives a line about what is waited for."""
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
        """Where to start the process of this role, in Ray's terms."""
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
        """Gives the room back."""
        from ray.util.placement_group import remove_placement_group

        for _, group in self._groups:
            remove_placement_group(group)
        self._groups = []


def _named(name: str, nodes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The node of that name or address, or of the machine of that name."""
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
    """Takes what the bundle asks for from what is left of the node."""
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


# A function that is run once on each of some nodes of the cluster, in a process of its own there.

A = TypeVar("A")
T = TypeVar("T")


class NodeFailed(str):
    """Why a node gave no answer, on one line."""


async def on_each(
    nodes: Iterable[Node], work: Callable[[A], T], argument: A, deadline_s: float
) -> dict[Node, T | NodeFailed]:
    """What `work(argument)` returns on each node; all nodes work at the same time. It takes no core of those that are
    reserved."""
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

    def __init__(self, mode: str, folder: RuntimeFolder | None) -> None:
        self.mode = mode  # local | joined
        self._folder = folder
        # Temporary files of roles lie in the private cluster's folder, which is removed even if a role is killed.
        self._role_env = {"TMPDIR": str(folder.of_ray)} if folder is not None else {}
        self._actors: list[Remote[Any]] = []
        self._reserved: Reservation | None = None
        import ray

        head: Any = ray._private.worker._global_node
        logs = Path(head.get_logs_dir_path())
        self.ray_processes = RayProcesses(head, logs)
        self._exits = ExitReasons(logs)

    def nodes(self) -> list[Mapping[str, Any]]:
        """The living nodes, as Ray describes them."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    async def reserve(self, roles: Sequence[Role], deadline_s: float, note: Callable[[str], None] = print) -> None:
        """Reserves room for every role. Raises WrongInput at once if the cluster is too small, DeadlineExceeded if
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
        return {"env_vars": {**role_env(role, env), **self._role_env}}

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
) -> Session:
    """Joins the cluster that launched us, or the one at `address`, or starts a private one for `local`, with an object
    store for policies of that many bytes. shows_metrics: the page that Prometheus reads is wanted.

    Never a bare ray.init(): it would join whatever cluster was last started on the machine, even a dead one.
    """
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # the environment is complete already
    os.environ.update(PICKLED_TABLES)
    if not _on_terminal():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # else it colours what its processes say in files, too
    with _sigterm_as_before():
        return _connected(address, min_cpus, policy_bytes, shows_metrics)


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


def _connected(address: str, min_cpus: float, policy_bytes: int, shows_metrics: bool) -> Session:
    if joins(address):
        _join(address)
        if shows_metrics:
            metrics_address()  # or it says why there is none
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
    """Connects to the cluster that launched us, or the one at `address`. Raises WrongInput if there is none."""
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
    """Bytes of an object store with room for two policies, one on its way and the one before it, which is still held.
    What finds no room is written to disk, at a third of the speed."""
    return GROUPS_BYTES + 2 * policy_bytes


def store_bytes(policy_bytes: int, free: int) -> int:
    """Of a private cluster's store. With more than `free`, the bytes left in shared memory, all of it would lie on
    disk."""
    return max(GROUPS_BYTES, min(wanted_store(policy_bytes), int(0.9 * free)))


def _check_listening(address: str) -> None:
    """Raises WrongInput if nothing listens at the address; Ray itself would try for a minute and say nothing."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise WrongInput(
                f"cluster.address: nothing answers at {address} ({error.strerror or error}); start it with: "
                f"ray start --head --port={port}, or use cluster.address=local"
            ) from None
