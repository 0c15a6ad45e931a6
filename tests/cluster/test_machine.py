"""Which cards a process would see. The driver's library is replaced at its functions, since no machine here has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from cluster import machine
from cluster.memory.plan import CARDS as KINDS
from cluster.placement import local_node

CARDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]
PART = "MIG-7777"


@pytest.fixture
def three_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Card i has i + 1 GiB and capability 8.i; of the first one a MIG part of 100 MiB."""

    def capability(handle: str) -> list[int]:
        if handle == PART:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [8, CARDS.index(handle)]

    def mode(handle: str) -> list[int]:
        if handle != CARDS[0]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def by_uuid(name: str) -> str:
        if name != PART:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return name

    def memory(handle: str) -> Any:
        total = 100 * 2**20 if handle == PART else (CARDS.index(handle) + 1) * 2**30
        return SimpleNamespace(total=total, free=total - 2**20)

    stands_for: dict[str, Any] = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: len(CARDS),
        "nvmlDeviceGetHandleByIndex": CARDS.__getitem__, "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda handle: handle, "nvmlDeviceGetName": lambda handle: f"NVIDIA {handle}",
        "nvmlDeviceGetMemoryInfo": memory, "nvmlDeviceGetCudaComputeCapability": capability,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: CARDS[0], "nvmlDeviceGetMigMode": mode,
    }  # fmt: skip
    for name, function in stands_for.items():
        monkeypatch.setattr(pynvml, name, function)


@pytest.mark.usefixtures("three_cards")
@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        (None, CARDS),
        ("", []),
        ("2,0", ["GPU-cc33", "GPU-aa11"]),
        ("1, 7, 0", ["GPU-ab22"]),  # CUDA stops at the first name of no card
        ("-1,0", []),
        ("GPU-cc,GPU-ab22", ["GPU-cc33", "GPU-ab22"]),
        ("GPU-a", []),  # two begin so
        (PART, [PART]),
        ("MIG-1", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(named: str | None, wanted: list[str]) -> None:
    environ = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert [card.uuid for card in machine.visible_cards(environ)] == wanted


@pytest.mark.usefixtures("three_cards")
def test_what_is_said_of_a_card() -> None:
    _, second, third = machine.visible_cards({})
    assert (second.name, second.size, second.free) == ("NVIDIA GPU-ab22", 2 * 2**30, 2 * 2**30 - 2**20)
    assert third.capability == (8, 2)
    (part,) = machine.visible_cards({"CUDA_VISIBLE_DEVICES": PART})
    assert (part.size, part.capability) == (100 * 2**20, (8, 0))


def test_a_card_is_taken_where_more_of_it_is_gone_than_its_driver_keeps() -> None:
    assert not machine.Card("a", "GPU-1", 1000, 950, (9, 0)).taken
    assert machine.Card("a", "GPU-1", 1000, 949, (9, 0)).taken
    assert not any(machine.Card(kind.name, "GPU-1", kind.bytes, kind.free, kind.capability).taken for kind in KINDS)


@pytest.mark.usefixtures("three_cards")
def test_a_private_cluster_has_the_cards_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert local_node(1)["GPU"] == 2.0


def test_no_driver_is_no_card() -> None:
    """This machine's own answer; a machine with a card says so with its driver."""
    assert bool(machine.visible_cards({})) == (machine.card_driver_version() is not None)


# Commands that compute in their own process: by OpenMP's own words, as it is loaded, its threads sleep while they
# wait.

# Each fails by what is not there, and torch is loaded only then.
COMMANDS = {
    "export": ["export", "nowhere", "out"],
    "reward-model": ["reward-model", "train", "nowhere.jsonl", "--model", "nowhere", "--out", "/proc/x"],
}
CALL = "import sys; from learner.tools.cli import main; code = main(sys.argv[1:]); import torch; sys.exit(code)"


def said(words: list[str], **environment: str) -> list[str]:
    """What OpenMP says of its settings in the process of a command."""
    told = subprocess.run(
        [sys.executable, "-c", CALL, *words], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "OMP_DISPLAY_ENV": "true", **environment},
    )  # fmt: skip
    assert told.returncode == 2, told.stderr
    return [line.strip() for line in told.stderr.splitlines() if " OMP_" in line]


@pytest.mark.parametrize("command", ["export", pytest.param("reward-model", marks=pytest.mark.long)])
def test_threads_sleep_while_they_wait(command: str) -> None:
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in said(COMMANDS[command])


def test_what_the_user_says_of_the_waiting_stays() -> None:
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in said(COMMANDS["export"], OMP_WAIT_POLICY="ACTIVE")


@pytest.mark.usefixtures("three_cards")
def test_the_usable_ones_are_whole_or_named_parts_and_tell_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    assert [card.uuid for card in machine.usable_cards()] == CARDS[1:]  # the first is divided
    monkeypatch.setattr(machine, "torch_cuda", lambda: "")
    assert machine.usable_cards() == []
    assert len(machine.visible_cards()) == 3
    memory = pynvml.nvmlDeviceGetMemoryInfo

    def lost(handle: str) -> Any:
        if handle == CARDS[1]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return memory(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lost)
    assert [card.uuid for card in machine.visible_cards()] == [CARDS[0], CARDS[2]]


def test_what_the_processor_computes_fastest_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for flags, dtype in {"fpu avx2": "float32", "fpu avx512_bf16 avx2": "bfloat16", "amx_bf16": "bfloat16"}.items():
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: none\n")
        monkeypatch.setattr(machine, "CPUS", tmp_path / "cpuinfo")
        assert machine.processor("flags") == flags
        assert machine.cpu_dtype() == dtype
    monkeypatch.setattr(machine, "CPUS", tmp_path / "none")
    assert machine.processor("flags") == ""
