"""Decides, by pure functions, in which of Ray's bundles each role of a run goes, and whether the nodes have room for
them.

A fraction of a GPU only tells Ray how many roles may share it; the memory of each role is limited by its own budget of
bytes. Roles that share a GPU are in one bundle {GPU: 1}, since Ray may put two fractional bundles on different GPUs.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.errors import WrongInput
from cluster.machine import visible_cards


@dataclass(frozen=True, slots=True)
class Role:
    """One process to place.

    cpus: CPU cores. gpus: a share of a GPU (0 to 1), or a number of GPUs. packed: whether to put it on as few nodes as
    possible together with the other packed roles; the others are spread over as many nodes as possible. node: the name
    of the node that it must be on (None: any); such a role shares no GPU.
    """

    name: str
    cpus: float
    gpus: float
    packed: bool = False
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The bundles to reserve in Ray.

    bundles: resources by Ray's names, CPU and GPU. bundle_of: by role name, the index of its bundle. packed: indices of
    the bundles with a packed role. node_of: by index, the node of the bundles that must be on a certain node.
    """

    bundles: list[dict[str, float]]
    bundle_of: dict[str, int]
    packed: frozenset[int]
    node_of: dict[int, str]

    def groups(self) -> list[tuple[str, list[int]]]:
        """The groups to reserve one after another, each with Ray's strategy and the indices of its bundles. Bundles
        that must be on a certain node come first, then the group with the largest bundle, since small bundles still
        find room between large ones."""
        bound = set(self.node_of)
        others = set(range(len(self.bundles))) - self.packed - bound
        groups = [("PACK", sorted(self.packed)), ("SPREAD", sorted(others))]
        free = sorted((group for group in groups if group[1]), key=lambda group: min(map(self._size, group[1])))
        return [("PACK", sorted(bound)), *free] if bound else free

    def _size(self, index: int) -> tuple[float, float]:
        return -self.bundles[index].get("GPU", 0.0), -self.bundles[index]["CPU"]


def place(roles: Sequence[Role], nodes: Sequence[Mapping[str, float]]) -> Placement:
    """Places the roles as `pack` does. Raises WrongInput if the nodes cannot hold the bundles."""
    placement = pack(roles)
    check(placement.bundles, nodes)
    return placement


def pack(roles: Sequence[Role]) -> Placement:
    """Places roles first-fit, those with the most GPUs first. There is one bundle for each shared GPU, one for each
    role with several GPUs (which Ray then takes from one node), and one for each role without a GPU.

    Among roles with equal shares the last one, the learner, is placed first, so that it shares its GPU with generators.
    """
    bundles: list[dict[str, float]] = []
    free: list[float] = []
    bundle_of: dict[str, int] = {}
    for role in sorted(roles, key=lambda r: (-r.gpus, r is not roles[-1])):
        fits = [i for i, left in enumerate(free) if role.gpus > 0 and left >= role.gpus - 1e-9]
        if fits:
            index = fits[0]
            bundles[index]["CPU"] += role.cpus
        else:
            index, cards = len(bundles), max(1.0, role.gpus) if role.gpus > 0 else 0.0
            bundles.append({"CPU": role.cpus, **({"GPU": cards} if cards else {})})
            free.append(cards)
        free[index] -= role.gpus
        bundle_of[role.name] = index
    packed = frozenset(bundle_of[role.name] for role in roles if role.packed)
    return Placement(bundles, bundle_of, packed, {bundle_of[role.name]: role.node for role in roles if role.node})


def local_node(min_cpus: float) -> dict[str, float]:
    """The resources of a private cluster on this machine. At least `min_cpus` cores are offered, even if the machine
    has fewer, since more processes than cores are slow but not wrong."""
    return {"CPU": max(float(os.cpu_count() or 1), min_cpus), "GPU": float(len(visible_cards()))}


def waiting(roles: Sequence[Role], cores: int) -> dict[str, str]:
    """Environment variables for the roles of one machine: if they have more threads than there are cores, OpenMP's
    threads sleep while they wait for one another. By default they spin, on a core that another thread needs: a learner
    with two threads then takes 5 to 6 times the CPU time on two busy cores. Results do not change."""
    return {"OMP_WAIT_POLICY": "PASSIVE"} if sum(role.cpus for role in roles) > cores else {}


def _told(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPU and {resources.get('GPU', 0.0):g} GPU"


def check(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> None:
    """Checks that the nodes have room for the bundles, placed first-fit with the largest bundle first. Raises
    WrongInput, which says what is missing."""
    left = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: (-b.get("GPU", 0.0), -b["CPU"])):
        home = next((node for node in left if all(node.get(k, 0.0) >= v for k, v in bundle.items())), None)
        if home is None:
            need = {k: sum(b.get(k, 0.0) for b in bundles) for k in ("CPU", "GPU")}
            have = {k: sum(node.get(k, 0.0) for node in nodes) for k in ("CPU", "GPU")}
            raise WrongInput(
                f"placement: the run needs {_told(need)}, and finds no node for {_told(bundle)} of them; the cluster "
                f"has {_told(have)} on {len(nodes)} node(s). Lower rollout.workers, cluster.learners, cluster.cpus or "
                "cluster.gpus, or add nodes"
            )
        for key, value in bundle.items():
            home[key] = home.get(key, 0.0) - value
