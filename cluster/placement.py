"""Where each role goes: a pure function of what is asked for and what the nodes have, or one clear error.

Fractions of a GPU are Ray's bookkeeping only; bytes are kept by each role's own budget. Two roles that share a card sit
in one {GPU: 1} bundle (two fractional bundles of one group may land on different cards).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.errors import WrongInput
from cluster.machine import visible_cards


@dataclass(frozen=True, slots=True)
class Role:
    """One process to place: its name, CPU cores, and GPUs: a share of one (0 to 1), or several. packed: on as few nodes
    as possible together with the others that are; else on as many as possible. node: the name of the one that it must
    be on; such a role shares no card."""

    name: str
    cpus: float
    gpus: float
    packed: bool = False
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles to reserve (in Ray's terms), for each role the index of its bundle, those with a packed role, and the
    node of those that must be on one."""

    bundles: list[dict[str, float]]
    bundle_of: dict[str, int]
    packed: frozenset[int]
    node_of: dict[int, str]

    def groups(self) -> list[tuple[str, list[int]]]:
        """What to reserve one after the other: Ray's strategy, and the indices of its bundles. Those that must be on a
        certain node come first; then the larger bundles, since the others find room between them more easily."""
        bound = set(self.node_of)
        others = set(range(len(self.bundles))) - self.packed - bound
        groups = [("PACK", sorted(self.packed)), ("SPREAD", sorted(others))]
        free = sorted((group for group in groups if group[1]), key=lambda group: min(map(self._size, group[1])))
        return [("PACK", sorted(bound)), *free] if bound else free

    def _size(self, index: int) -> tuple[float, float]:
        return -self.bundles[index].get("GPU", 0.0), -self.bundles[index]["CPU"]


def place(roles: Sequence[Role], nodes: Sequence[Mapping[str, float]]) -> Placement:
    """`pack`, checked: WrongInput when the nodes together, or the largest of them, cannot hold the result."""
    placement = pack(roles)
    check(placement.bundles, nodes)
    return placement


def pack(roles: Sequence[Role]) -> Placement:
    """Places roles first-fit, the most GPUs first: one bundle for each card, one for each role with several cards,
    which are then of one node, and one for each role without a GPU.

    Among equal shares the last role, the learner, is placed first, so that it shares its card with generators.
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
    """What a private cluster on this machine offers. Cores are only counted here: more processes than cores is slow,
    not wrong."""
    return {"CPU": max(float(os.cpu_count() or 1), min_cpus), "GPU": float(len(visible_cards()))}


def waiting(roles: Sequence[Role], cores: int) -> dict[str, str]:
    """Of roles on one machine, the environment that says how threads of a product wait for each other: asleep, where
    there are more threads than cores. OpenMP's default is to spin, on a core that another needs: on two busy cores a
    learner with two threads then takes 5 to 6 times the CPU time. What is computed stays the same."""
    return {"OMP_WAIT_POLICY": "PASSIVE"} if sum(role.cpus for role in roles) > cores else {}


def _told(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPU and {resources.get('GPU', 0.0):g} GPU"


def check(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> None:
    """Simulates packing, largest bundle first. Raises WrongInput, which says what is missing."""
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
