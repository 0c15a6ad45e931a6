"""The files of examples/clusters: what they start is a command of gleaner's, on the Ray that it wants."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from learner.config import load
from learner.main import RunRequest, answer, command_of

FOLDER = Path("examples/clusters")


def settings_of(words: list[str]) -> dict[str, Any]:
    """Of `python -m learner.main …`: the settings that it gives, once they are known to be right."""
    assert words[:3] == ["python", "-m", "learner.main"]
    found: list[RunRequest] = []

    def keep(asked: RunRequest) -> int:
        found.append(asked)
        return 0

    assert answer(command_of(RunRequest, keep, "train"), words[3:], "learner.main") == 0
    assert found[0].config is not None
    config = load.load_config("configs/local_cpu.yaml", found[0].overrides or ())
    return {"address": config.cluster.address, "output_dir": config.output_dir, "name": config.name}


def test_the_slurm_script_starts_a_cluster_and_one_run_on_it(tmp_path: Path) -> None:
    for name, prints in (("scontrol", "printf 'n1\\nn2\\n'"), ("srun", "printf '%s\\n' \"$@\"")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{prints}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    ran = subprocess.run(
        [FOLDER / "slurm.sh", "--config", "my.yaml", "output_dir=/shared/my runs", "name=x"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ray, _, command = ran.stdout.partition("\n--\n")
    assert ray.split() == ["ray", "symmetric-run", "--address", "n1:6379", "--min-nodes", "2"]
    assert settings_of(command.splitlines()) == {"address": "n1:6379", "output_dir": "/shared/my runs", "name": "x"}


def test_the_job_for_kuberay_runs_on_the_ray_of_the_image() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]
    assert settings_of(shlex.split(job["entrypoint"]))["output_dir"] == "/shared/runs"
    pins = Path("requirements/gpu.txt").read_text().splitlines()  # docker/cuda.Dockerfile installs these
    assert f"ray=={job['rayClusterSpec']['rayVersion']}" in pins
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}  # else anybody who reaches it may run code
