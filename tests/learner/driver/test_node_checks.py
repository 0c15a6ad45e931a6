"""What a node of a cluster has and lacks. On real nodes: tests/nodes."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cluster.config import ClusterConfig, RewardProcessConfig
from cluster.ray_cluster import Node
from learner.config import RunConfig
from learner.driver.roles import (
    Needs,
    NodeFacts,
    Wanted,
    downloads,
    lacks,
    look,
    needs,
    placed,
    short_of,
)

OWN = NodeFacts(
    packages={"Python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.1", "peft": "0.18", "vllm": "0.32.0"},
    sources="a",
    contents={"model.path": {"config.json": "1", "model.safetensors": "2"}, "rewards: mine": {"mine.py": "3"}},
    lock="pid 1",
    shared=2**30,
    disk=2**40,
)
MODEL = {"model.path": "/models/m"}
GENERATOR, LEARNER = Needs("generator", MODEL, {"rewards: mine": "/mine.py"}), Needs("learner", MODEL, {})


def without(names: Mapping[str, str], *left_out: str, **other: str) -> dict[str, str]:
    return {name: text for name, text in names.items() if name not in left_out} | other


def test_a_node_like_the_drivers_lacks_nothing() -> None:
    same = replace(OWN, packages=without(OWN.packages, torch="2.13.0+cu130"))  # a driver without a card is no other
    assert [*lacks(same, OWN, GENERATOR), *lacks(same, OWN, LEARNER)] == []
    assert list(lacks(OWN, replace(OWN, packages=without(OWN.packages, "vllm")), GENERATOR)) == []


def test_each_thing_that_a_node_lacks_is_said_for_the_processes_that_need_it() -> None:
    bare = replace(
        OWN,
        packages=without(OWN.packages, "vllm", peft="0.17"),
        sources="b",
        contents={"model.path": {"config.json": "1", "model.safetensors": "9"}, "rewards: mine": {}},
        lock=None,
    )
    both = [
        "peft 0.17 is installed, the driver has 0.18; install the same on all nodes",
        "its gleaner differs from the driver's; install the same, or submit the job with --working-dir",
        "model.path: /models/m is not what the driver has (model.safetensors differs); copy it again",
    ]
    assert list(lacks(bare, OWN, GENERATOR)) == [
        "vllm is not installed, and a generator needs it",
        *both,
        "rewards: mine: /mine.py is not there; put it on every node, or on a disk that all nodes share",
    ]
    assert list(lacks(bare, OWN, LEARNER)) == [
        *both,
        "output_dir: it does not see the driver's run folder; give a folder on a disk that both share",
    ]


def test_a_hub_model_of_another_commit_is_refused_and_one_that_is_not_cached_is_said() -> None:
    def cached(revision: str) -> NodeFacts:
        return replace(OWN, contents={"model.path": {"revision": revision}})

    hub, missing = Needs("learner", {"model.path": "a/b"}, {}), "a/b, which is not in the cache"
    assert list(lacks(cached("c1"), cached("c2"), hub)) == [
        "model.path: a/b is not what the driver has (revision differs); set model.revision=c2"
    ]
    judge = Needs("reward model", {"rewards: judge": "a/b"}, {})
    there, here = (replace(OWN, contents={"rewards: judge": {"revision": one}}) for one in ("c1", "c2"))
    assert list(lacks(there, here, judge)) == [
        (
            "rewards: judge: a/b is not what the driver has (revision differs); on every node run: "
            "hf download a/b --revision c2, and give the folder that it names"
        )
    ]
    assert [*lacks(cached(missing), cached("c1"), hub), *lacks(cached("c1"), cached(missing), hub)] == []
    assert [*downloads(cached("c1"), hub), *downloads(cached(missing), hub)] == [
        "model.path: a/b is not in its cache, and is downloaded as the learner starts"
    ]


def test_too_little_shared_memory_or_disk_is_said() -> None:
    policy = 384 * 2**20  # two of them and 256 MiB are 1 GiB
    assert list(short_of(OWN, policy)) == []
    assert next(short_of(OWN, policy + 1)).startswith("/dev/shm: 1.0 GiB are free of the 1.0 GiB")
    small = replace(OWN, shared=64 * 2**20, disk=2**30 - 1)
    assert [line.partition(" that ")[0].partition(", where")[0] for line in short_of(small, policy)] == [
        "/dev/shm: 64 MiB are free of the 1.0 GiB",
        "disk: 1024 MiB are free for temporary files",
    ]


def test_nodes_are_said_with_their_processes() -> None:
    left, right = Node("1", "left (a)"), Node("2", "right (b)")
    assert placed({"learner": left, "generator-0": right, "generator-1": left}) == [
        "placement: node left (a): generator-1, learner",
        "placement: node right (b): generator-0",
    ]


def test_what_is_looked_at_is_what_the_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "mine.py").write_text("def mine(completions): return [0.0] * len(completions)")
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tmp_path / "model"), "adapter": str(tmp_path / "gone")},
            "data": {"path": "d"},
            "rewards": [{"use": f"{tmp_path}/mine.py:mine"}, {"use": "number"}],
        }
    )
    generator, learner = needs(config)
    assert generator.files == {"rewards: mine": f"{tmp_path}/mine.py"}
    assert learner.models == {"model.path": str(tmp_path / "model"), "model.adapter": str(tmp_path / "gone")}
    apart = config.model_copy(update={"cluster": ClusterConfig(rewards=RewardProcessConfig(processes=2))})
    generators, _, scoring = needs(apart)
    assert (generators.files, scoring.files) == ({}, generator.files)
    assert [role.name for role in scoring.roles] == ["rewards-0", "rewards-1"]

    wanted = Wanted({**generator.models, **learner.models}, generator.files, tmp_path / ".lock")
    before = look(wanted)
    assert {setting: list(found) for setting, found in before.contents.items()} == {
        "model.path": ["config.json"], "model.adapter": [], "rewards: mine": ["mine.py"]
    }  # fmt: skip
    assert before.packages["torch"]
    assert before.packages["vllm"]
    assert before.lock is None
    assert 0 < before.shared <= shutil.disk_usage("/dev/shm").total
    assert 0 < before.disk <= shutil.disk_usage(tempfile.gettempdir()).total

    (tmp_path / "mine.py").write_text("def mine(completions): return [1.0] * len(completions)")
    (tmp_path / ".lock").write_text("pid 7")
    after = look(wanted)
    assert after.contents["rewards: mine"] != before.contents["rewards: mine"]
    assert (after.lock, after.sources) == ("pid 7", before.sources)
