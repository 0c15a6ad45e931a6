"""Where roles go: a pure function, or one clear error."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cluster.errors import WrongInput
from cluster.placement import Role, pack, place, waiting
from cluster.ray_cluster import Reservation
from learner.driver.machine_checks import check_startable


def test_two_roles_on_one_card_share_one_bundle() -> None:
    found = place([Role("generator-0", 2, 0.4), Role("learner", 3, 0.6)], [{"CPU": 5.0, "GPU": 1.0}])
    assert found.bundles == [{"CPU": 5.0, "GPU": 1.0}]
    assert found.bundle_of == {"generator-0": 0, "learner": 0}


def test_fractions_that_do_not_fit_one_card_take_another_and_cpu_roles_their_own() -> None:
    roles = [Role("cpu", 1, 0.0), *(Role(f"generator-{i}", 1, 0.3) for i in range(4)), Role("learner", 1, 0.6)]
    found = place(roles, [{"CPU": 8.0, "GPU": 2.0}])
    assert found.bundle_of == {
        "learner": 0, "generator-0": 0, "generator-1": 1, "generator-2": 1, "generator-3": 1, "cpu": 2
    }  # fmt: skip
    assert found.bundles == [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0}]


def test_a_generator_of_several_cards_has_them_on_one_node_and_shares_none() -> None:
    roles = [Role("generator-0", 1, 2.0), Role("generator-1", 1, 2.0), Role("learner", 1, 0.5)]
    found = place(roles, [{"CPU": 4.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}])
    assert found.bundles == [{"CPU": 1.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}]
    with pytest.raises(WrongInput, match=r"5 GPU, and finds no node for 1 CPU and 2 GPU of them"):
        place(roles, [{"CPU": 4.0, "GPU": 1.0}] * 5)


def test_ten_tenths_are_one_card() -> None:  # although 10 * 0.1 != 1.0 by repeated subtraction
    found = place([Role(f"generator-{i}", 1, 0.1) for i in range(10)], [{"CPU": 10.0, "GPU": 1.0}])
    assert len(found.bundles) == 1


def test_no_gpu_is_one_clear_error() -> None:
    with pytest.raises(WrongInput, match=r"needs 2 CPU and 1 GPU.*has 64 CPU and 0 GPU on 1 node.*cluster\.gpus"):
        place([Role("generator-0", 1, 0.5), Role("learner", 1, 0.5)], [{"CPU": 64.0}])


def test_cores_together_are_not_cores_on_one_node() -> None:
    small = [{"CPU": 2.0}, {"CPU": 2.0}]
    assert place([Role("generator-0", 2, 0), Role("learner", 2, 0)], small).bundles == [{"CPU": 2.0}, {"CPU": 2.0}]
    with pytest.raises(WrongInput, match=r"needs 3 CPU and 0 GPU, and finds no node for 3 CPU and 0 GPU"):
        place([Role("learner", 3, 0)], small)
    with pytest.raises(WrongInput, match="the cluster has 4 CPU"):
        place([Role(f"generator-{i}", 1, 0) for i in range(5)], small)


def test_ranks_are_packed_generators_spread_and_the_larger_bundles_reserved_first() -> None:
    def groups(generator: float, learner: float) -> list[tuple[str, list[int]]]:
        generators = [Role(f"generator-{i}", 1, generator) for i in range(2)]
        return pack([*generators, *(Role(f"learner-{i}", 1, learner, packed=True) for i in range(2))]).groups()

    assert groups(1.0, 1.0) == [("PACK", [0, 3]), ("SPREAD", [1, 2])]
    assert groups(2.0, 1.0) == [("SPREAD", [0, 1]), ("PACK", [2, 3])]
    assert groups(0.4, 0.6) == [("PACK", [0, 1])]  # who shares a card with a rank goes with it


def test_what_must_be_on_one_node_is_reserved_before_what_may_be_anywhere() -> None:
    roles = [
        Role("generator-0", 4, 0), Role("rewards-0", 1, 0, node="left"), Role("rewards-1", 1, 0, node="left"),
        Role("learner", 2, 0, packed=True),
    ]  # fmt: skip
    found = pack(roles)
    rewards = sorted(found.bundle_of[name] for name in ("rewards-0", "rewards-1"))
    assert found.node_of == dict.fromkeys(rewards, "left")
    others = [("SPREAD", [found.bundle_of["generator-0"]]), ("PACK", [found.bundle_of["learner"]])]
    assert found.groups() == [("PACK", rewards), *others]


NODES = [
    {"NodeID": "a1", "NodeName": "left", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "x",
     "Resources": {"CPU": 2.0}},
    {"NodeID": "b2", "NodeName": "right", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "x",
     "Resources": {"CPU": 4.0, "GPU": 1.0}},
]  # fmt: skip


def scoring(count: int, node: str, gpus: int = 0) -> list[Role]:
    return [*(Role(f"rewards-{i}", 1, gpus, node=node) for i in range(count)), Role("learner", 3, 0, packed=True)]


@pytest.mark.parametrize("name", ["left", "10.0.0.1"])
def test_a_node_is_found_by_name_or_address(name: str) -> None:
    found = Reservation(scoring(2, name), NODES)
    assert [*found._labels.values()] == [{"ray.io/node-id": "a1"}] * 2


@pytest.mark.parametrize(
    ("count", "node", "gpus", "said"),
    [
        (3, "left", 0, "node left has too little for what must be on it: 1 CPU more, and 0 left"),
        (1, "left", 1, "node left has too little for what must be on it: 1 GPU more, and 0 left"),
        (4, "right", 0, "the run needs 3 CPU and 0 GPU, and finds no node for 3 CPU and 0 GPU of them"),
        (1, "lefd", 0, "must be a node of the cluster, got lefd; the nodes are left 10.0.0.1 x, right 10.0.0.2 x"),
        (1, "x", 0, "must be of one node, got x"),
    ],
)
def test_a_node_without_the_room_or_of_no_such_name_is_one_clear_error(
    count: int, node: str, gpus: int, said: str
) -> None:
    with pytest.raises(WrongInput, match=re.escape(said)):
        Reservation(scoring(count, node, gpus), NODES)


def test_threads_sleep_while_they_wait_only_where_they_outnumber_the_cores() -> None:
    roles = [Role("generator-0", 1, 0), Role("learner", 2, 0)]
    assert waiting(roles, cores=3) == {}
    assert waiting(roles, cores=2) == {"OMP_WAIT_POLICY": "PASSIVE"}


# What Ray would not start with, and would only say after a minute.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTHONWARNINGS", "ignore,e::DeprecationWarning"),
        ("PYTHONWARNINGS", "error::UserWarning"),
        ("PYTHONOPTIMIZE", "3"),
    ],
)
def test_a_variable_with_which_its_processes_end_is_named(name: str, value: str) -> None:
    with pytest.raises(WrongInput, match=f"^{name}: .*got .*{value}.*; unset it"):
        check_startable({name: value})


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONWARNINGS": "ignore::FutureWarning", "PYTHONOPTIMIZE": "1"},
        {"PYTHONWARNINGS": "error::UserWarning:my_rewards", "PYTHONOPTIMIZE": "yes"},
        {"PYTHONWARNINGS": "", "PYTHONOPTIMIZE": ""},
    ],
)
def test_others_do_no_harm(environ: dict[str, str]) -> None:
    check_startable(environ)


def test_a_machine_whose_loopback_interface_is_off() -> None:
    apart = ["unshare", "--net", "--map-root-user"]
    try:
        if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no network of one's own may be made here")
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    call = "from learner.driver.machine_checks import check_startable; check_startable()"
    told = subprocess.run(
        [*apart, sys.executable, "-c", call], capture_output=True, text=True, check=False, timeout=60
    ).stderr
    assert "WrongInput: cluster.address: local needs the loopback interface" in told
