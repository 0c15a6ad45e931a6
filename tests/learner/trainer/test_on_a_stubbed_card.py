"""What the learner asks of torch.cuda, without a card: torch's own Python runs, over stubs of what is compiled.

So each call passes the checks that torch makes before it reaches the driver, as of a device without an index. Tensors
are fake ones that say they are on the card; what they hold is not computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.model import random_base
from cluster.memory.shape import Shape
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.model import policy
from learner.model.attention import VARLEN, kernels
from learner.trainer.memory_limit import MemoryLimit
from learner.trainer.trainer import Trainer

CARD = SimpleNamespace(name="stub", total_memory=24 * 2**30, major=9, minor=0)
TINY = Shape("tiny", "llama", 64, 160, 2, 4, 2, 16, 512, tied=True)


class Driver:
    """What torch.cuda's Python would call. fractions: (share, card) of each cap that was set; free, peak: bytes."""

    def __init__(self) -> None:
        self.fractions: list[tuple[float, int]] = []
        self.free, self.peak = CARD.total_memory, 3 * 2**30

    def set_fraction(self, share: float, card: int) -> None:
        self.fractions.append((share, card))

    def stats(self, card: int) -> dict[str, Any]:
        assert card == 0
        return {"allocated_bytes": {"all": {"peak": self.peak}}}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        monkeypatch.setattr(module, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    runtime = SimpleNamespace(cudaMemGetInfo=lambda card: (driver.free, CARD.total_memory))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    # And not torch.cuda.is_available: fake tensors would then want to start the driver.
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda card: CARD, raising=False)
    compiled = {
        "_cuda_getDevice": lambda: 0,
        "_cuda_setMemoryFraction": driver.set_fraction,
        "_cuda_resetPeakMemoryStats": lambda card: None,
        "_cuda_memoryStats": driver.stats,
        "_cuda_emptyCache": lambda: None,
    }
    for name, stub in compiled.items():
        monkeypatch.setattr(torch._C, name, stub, raising=False)
    return driver


@pytest.fixture
def fake(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without content, and a base model of such."""
    monkeypatch.setattr(policy, "load_base", random_base)
    for trial in ("check_head", "fuse"):  # they ask what the model computes
        monkeypatch.setattr(policy, trial, lambda *_, **__: None)
    monkeypatch.setattr(torch.utils, "swap_tensors", lambda *_: None)  # refuses fake tensors; peft casts
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_: self)  # would guard the device, which is not there
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):  # where peft makes its adapters, too
        yield


def make(folder: Path, memory_bytes: int | None, **learner: Any) -> Trainer:
    (folder / "config.json").write_text(json.dumps(TINY.to_config()))
    return Trainer(
        ModelConfig(path=str(folder)),
        LearnerConfig.model_validate(learner),
        temperature=1.0,
        max_completion_length=16,
        total_steps=10,
        seed=0,
        device="cuda",
        memory_bytes=memory_bytes,
        attention=VARLEN,
    )


@pytest.mark.parametrize("checkpointing", ["auto", "none", "full"])
def test_a_learner_with_a_limit_is_built(fake: None, driver: Driver, tmp_path: Path, checkpointing: str) -> None:
    trainer = make(tmp_path, 6 * 2**30, checkpointing=checkpointing)
    assert driver.fractions == [(0.25, 0)]
    assert {str(master.device) for master in trainer._policy.masters.values()} == {"cuda:0"}
    trainer._memory.start_step()
    assert trainer._memory.peak() == driver.peak
    trainer._memory.check()
    driver.peak = 7 * 2**30
    with pytest.raises(RuntimeError, match="peak of 7168 MiB, its limit is 6144 MiB"):
        trainer._memory.check()


def test_a_limit_above_the_card_is_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="at most the 24576 MiB of cuda:0, got 25600 MiB"):
        MemoryLimit(25 * 2**30, torch.device("cuda", 0))
    assert driver.fractions == []


def test_a_limit_above_what_is_free_gives_way(driver: Driver) -> None:
    driver.free = 3 * 2**30
    MemoryLimit(6 * 2**30, torch.device("cuda", 0))
    assert driver.fractions == [(0.125, 0)]


def test_which_attention_a_card_takes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    assert kernels(device, torch.bfloat16)[0] == VARLEN
    assert VARLEN not in kernels(device, torch.float32)
    monkeypatch.setattr(CARD, "major", 7)
    assert VARLEN not in kernels(device, torch.bfloat16)
