"""Emulated nodes: where the processes of a run go, and a node that lacks something: `make test-nodes`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.system.lost_node import EmulatedNodes

pytestmark = pytest.mark.skipif("NODES" not in os.environ, reason="a minute; make test-nodes runs it")


def dry_run(nodes: EmulatedNodes, folder: Path, *overrides: str) -> tuple[int, str]:
    words = [sys.executable, "-m", "learner.main", "--dry-run", "--config", "configs/local_cpu.yaml"]
    words += [f"cluster.address={nodes.address}", f"output_dir={folder}", *overrides]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120)
    return ran.returncode, ran.stdout + ran.stderr


def another_version(folder: Path, package: str) -> str:
    """A folder that, on PYTHONPATH, says that the package is of version 0.0.1."""
    told = folder / f"{package}-0.0.1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.1\n")
    return str(folder)


def test_ranks_are_packed_generators_spread_and_a_node_with_other_packages_is_named(tmp_path: Path) -> None:
    with EmulatedNodes() as nodes:
        for name in ("left", "right"):
            nodes.start(name, cpus=2)
            nodes.until_joined(name)
        code, said = dry_run(nodes, tmp_path, "cluster.learners=2", "rollout.workers=2")
        assert code == 0, said
        on = [line.partition("): ")[2] for line in said.splitlines() if line.startswith("placement: node ")]
        assert sorted(on) == ["generator-0, generator-1", "learner-0, learner-1"], said  # the ranks fill a node

        code, said = dry_run(nodes, tmp_path, "cluster.learners=1", "rollout.workers=2")
        on = [line.partition("): ")[2] for line in said.splitlines() if line.startswith("placement: node ")]
        assert all("generator" in line for line in on), said
        assert len(on) == 2, said

        code, said = dry_run(nodes, tmp_path, "rollout.workers=3", "cluster.cpus.generator=2")
        assert (code, "placement: the run needs 7 CPU" in said) == (2, True), said

        code, said = dry_run(nodes, tmp_path, "cluster.rewards.processes=1", "cluster.rewards.node=right")
        assert code == 0, said
        (there,) = [line for line in said.splitlines() if line.startswith("placement: node right (")]
        assert "rewards-0" in there, said
        code, said = dry_run(nodes, tmp_path, "cluster.rewards.processes=1", "cluster.rewards.node=rihgt")
        assert (code, "must be a node of the cluster, got rihgt; the nodes are" in said) == (2, True), said

        nodes.kill("right")
        nodes.start("other", cpus=2, PYTHONPATH=another_version(tmp_path, "peft"))
        nodes.until_joined("other")
        code, said = dry_run(nodes, tmp_path, "cluster.learners=2", "rollout.workers=2")
        assert code == 2, said
        assert "node other (" in said, said
        assert "peft 0.0.1 is installed, the driver has" in said, said
