"""A machine or card that cannot run the configuration: one line before anything starts. The cards are stand-ins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import machine
from cluster.errors import WrongInput
from cluster.machine import Card
from cluster.memory.shape import SHAPES
from learner.config import RunConfig
from learner.driver import machine_checks
from learner.driver.machine_checks import check_main_memory, check_placement, cuda_wheels
from learner.driver.memory import cards_of, settle

GIB = 2**30
H100 = Card("H100", "GPU-1", 80 * GIB, 79 * GIB, (9, 0))
T4 = Card("Tesla T4", "GPU-2", 15 * GIB, 15 * GIB, (7, 5))
A100 = Card("A100", "GPU-3", 40 * GIB, 40 * GIB, (8, 0))


def config_of(share: float = 0.5, **changes: object) -> RunConfig:
    plain = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"use": "format"}]}
    return RunConfig.model_validate(plain | {"cluster": {"gpus": {"generator": share, "learner": share}}} | changes)


def set_up(
    monkeypatch: pytest.MonkeyPatch,
    cards: list[Card],
    shown: int,
    driver: str | None = "580.65.06",
    cuda: str = "13.0",
    liger: bool = True,
) -> None:
    def visible(environ: Mapping[str, str] | None = None) -> list[Card]:
        return cards[:shown] if environ is None else cards

    monkeypatch.setattr(machine, "visible_cards", visible)
    monkeypatch.setattr(machine, "card_driver_version", lambda: driver)
    monkeypatch.setattr(machine, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(machine_checks, "find_spec", lambda name: name if liger and name == "liger_kernel" else None)


def refusal(config: RunConfig) -> str:
    with pytest.raises(WrongInput) as caught:
        check_placement(config, None)
    return str(caught.value)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, [], 0, driver=None)
    assert refusal(config_of()).startswith("cluster.gpus: the run needs 1 GPU, and no NVIDIA driver answers; install")


def test_fewer_cards_are_shown_than_the_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, [H100, H100], 1)
    assert refusal(config_of(1.0)).startswith("CUDA_VISIBLE_DEVICES: shows 1 of 2 cards, and the run needs 2 GPU;")


def test_a_driver_older_than_torchs_cuda_and_a_torch_without(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, [H100], 1, driver="570.86.10")
    assert refusal(config_of()) == "NVIDIA driver: 570.86.10 is older than CUDA 13.0 needs, R580; update it"
    set_up(monkeypatch, [H100], 1, cuda="")
    assert refusal(config_of()).startswith("torch: this build is for CPUs only; install")


def test_a_card_without_the_learners_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, [H100], 1, liger=False)
    assert refusal(config_of()).startswith("liger-kernel: is not installed, and a learner on a card needs it; pip")


def test_a_card_too_old_for_the_types_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, [T4], 1)
    assert refusal(config_of()) == (
        "model.dtype: bfloat16 needs compute capability 8.0, this card has 7.5; set model.dtype=float16 (Tesla T4)"
    )
    with pytest.raises(WrongInput, match=r"bfloat16 needs compute capability 8.0, this card has 7.5; .*\(t4\)"):
        check_placement(config_of(), cards_of("t4"))
    check_placement(config_of(), cards_of("a100-80gb"))
    set_up(monkeypatch, [H100, A100], 2)
    assert refusal(config_of(1.0, rollout={"kv_cache_dtype": "fp8"})).startswith("rollout.kv_cache_dtype: fp8 needs")


def test_weights_that_main_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that sleeps has its 15 GiB there, and the learner loads as many."""
    turns, slices = (config_of(memory={"layout": layout}) for layout in ("alternating", "slices"))
    model = SHAPES["Llama-3.1-8B"].to_config()
    monkeypatch.setattr(machine, "main_memory", lambda: 24 * GIB)
    monkeypatch.setattr(machine, "available_memory", lambda: 20 * GIB)
    with pytest.raises(WrongInput, match=r"^main memory: the run needs 30.1 GiB .*asleep 15.1 GiB.* has 24.0 GiB; "):
        check_main_memory(turns, settle(turns, model, 80 * GIB))
    monkeypatch.setattr(machine, "available_memory", lambda: 10 * GIB)
    (note,) = check_main_memory(slices, settle(slices, model, 80 * GIB))
    assert note.startswith("main memory: the run takes about 2")
    monkeypatch.setattr(machine, "shared_memory", lambda: 64 * 2**20)
    _, small = check_main_memory(slices, settle(slices, model, 80 * GIB))
    assert small.startswith("/dev/shm: 64 MiB are free of the 256 MiB of Ray's object store, which then lies on disk")
    assert check_main_memory(config_of(0.0), settle(config_of(0.0), model)) == ()  # there the plan is of this memory
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")  # whose roles lie on other machines
    assert check_main_memory(turns, settle(turns, model, 80 * GIB)) == ()


def test_our_own_wheels_are_of_one_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (Path(__file__).parents[3] / "requirements" / "gpu.txt").read_text().splitlines()
    wheels = [line.split("==") for line in lines if "==" in line]
    there = [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in wheels]
    monkeypatch.setattr(machine_checks, "distributions", lambda: there)
    assert cuda_wheels() == {13}
    there.append(SimpleNamespace(metadata={"Name": "nvidia-cublas-cu12"}, version="12.8"))
    assert cuda_wheels() == {12, 13}


@pytest.mark.parametrize(
    ("cuda", "dtype", "why"),
    [
        ("", "bfloat16", "this torch is for CPUs; make setup GPU=1"),
        ("13.0", "float32", "model.dtype is float32"),
        ("13.0", "bfloat16", "they are too few for its processes"),
    ],
)
def test_cards_that_a_run_leaves_alone_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, cuda: str, dtype: str, why: str
) -> None:
    set_up(monkeypatch, [H100, H100], 2, cuda=cuda)
    plain = {"model": {"path": "m", "dtype": dtype}, "data": {"path": "d"}, "rewards": [{"use": "format"}]}
    (note,) = machine_checks.machine_notes(RunConfig.model_validate(plain))
    assert note.startswith(f"cards: 2 x H100, not used: {why}")
    assert machine_checks.machine_notes(config_of(0)) == ()  # the settings ask for CPUs
    (note,) = machine_checks.machine_notes(RunConfig.model_validate(plain | {"cluster": {"address": "auto"}}))
    assert note.startswith("cluster.gpus: not given, so on CPUs")
    set_up(monkeypatch, [], 0, cuda=cuda)
    assert machine_checks.machine_notes(RunConfig.model_validate(plain)) == ()
