"""Room for the processes of a run on the nodes of a cluster, reserved through Ray's placement groups."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cluster.actor import DeadlineExceeded
from cluster.deadline import within
from cluster.placement import PlacementError, Role, check, pack

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

    Raises PlacementError if they cannot hold the roles, or the one that a role must be on is none of them.
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
    raise PlacementError(
        f"placement: the name of a node {rule}, got {name}; the nodes are {', '.join(' '.join(n) for n in called)} "
        "(name, address, machine): give one of these"
    )


def _take(bundle: Mapping[str, float], left: dict[str, float], name: str) -> None:
    """Takes what the bundle asks for from what is left of the node."""
    for kind, count in bundle.items():
        if left.get(kind, 0.0) < count:
            raise PlacementError(
                f"placement: node {name} has too little for what must be on it: {count:g} {kind} more, and "
                f"{left.get(kind, 0.0):g} left; lower cluster.rewards, or give another node"
            )
        left[kind] -= count


def _missing(bundles: Sequence[Mapping[str, float]]) -> str:
    import ray

    need = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    have = ray.available_resources()
    return ", ".join(f"{need[kind]:g} {kind} asked for, {have.get(kind, 0.0):g} free" for kind in need if need[kind])
