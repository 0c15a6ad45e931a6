"""A resumed run is the same run, bit for bit; and each part of the saved state is needed for it."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.files import WriteFailed
from learner.config import ModelConfig
from learner.config.settings import (
    LearnerConfig,
    LoraConfig,
    OptimizerConfig,
    ScheduleConfig,
    ValueConfig,
)
from learner.trainer.trainer import Trainer
from tests.learner.rollouts import make_groups, uniform
from tests.learner.trainers import adapter_of

STEPS = 6


def make_trainer(
    path: str, dtype: Any = "float32", optimizer: Any = "adamw", rank: Any = 8, algorithm: Any = "grpo"
) -> Trainer:
    return Trainer(
        ModelConfig(path=path, dtype=dtype),
        LearnerConfig(
            lora=LoraConfig(rank=rank),
            learning_rate=1e-2,
            schedule=ScheduleConfig(kind="cosine", warmup=0.3),
            optimizer=OptimizerConfig(kind=optimizer, weight_decay=0.01),
            algorithm=algorithm,
            value=ValueConfig(warmup=1, learning_rate=2e-2) if algorithm == "ppo" else ValueConfig(),
        ),
        temperature=1.0,
        max_completion_length=16,
        total_steps=STEPS,
        seed=3,
        device="cpu",
    )


def batch(step: int) -> list[pa.Table]:
    return make_groups([[0, 1, 0], [0, 1, 2]], uniform, seed=step)


async def run(trainer: Trainer, first: int, last: int) -> list[dict[str, float]]:
    volatile = ("time/", "memory/")
    metrics = [await trainer.step(batch(step)) for step in range(first, last)]
    return [{k: v for k, v in one.items() if not k.startswith(volatile)} for one in metrics]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Of all roles that are trained."""
    roles = {"": trainer._policy.masters}
    roles |= {name: role.masters.named for name, role in trainer._policy.scored.items() if role.masters is not None}
    return {role + name: one.detach().clone() for role, own in roles.items() for name, one in own.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Of the three, every pair of values.
@pytest.mark.parametrize(
    ("algorithm", "optimizer", "dtype"),
    [
        ("grpo", "adamw", "float32"), ("grpo", "adamw_8bit", "bfloat16"), ("grpo", "adamw", "float16"),
        ("ppo", "adamw_8bit", "float32"), ("ppo", "adamw", "bfloat16"), ("ppo", "adamw_8bit", "float16"),
    ],
)  # fmt: skip
async def test_resume_is_bitwise(tiny_path: str, tmp_path: Path, algorithm: str, optimizer: str, dtype: str) -> None:
    def make() -> Trainer:
        return make_trainer(tiny_path, dtype, optimizer, algorithm=algorithm)

    straight = make()
    wanted = await run(straight, 0, STEPS)
    first = make()
    begun = await run(first, 0, 3)
    await first.save(tmp_path / "checkpoint")
    second = make()
    await second.load(tmp_path / "checkpoint")
    found = begun + await run(second, 3, STEPS)
    assert json.dumps(found) == json.dumps(wanted)  # nan, of a float16 overflow, equals itself as text
    assert equal(weights(second), weights(straight))
    assert (await adapter_of(second)).digest == (await adapter_of(straight)).digest
    assert (await adapter_of(second)).version == STEPS


def _spoil_adapter(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def _spoil(key: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        state = torch.load(folder / "trainer.pt", weights_only=True)
        state[key] = change(state[key])
        torch.save(state, folder / "trainer.pt")

    return spoil


def _without_moments(updater: dict[str, Any]) -> dict[str, Any]:
    updater["optimizer"]["state"] = {}
    return updater


async def _resumed(trainers: list[Trainer], folder: Path, spoil: Callable[[Path], None]) -> tuple[Any, Any]:
    """Weights of one that went on from what the other saved, once that was spoiled, and of the other."""
    straight, second = trainers
    await run(straight, 0, 3)
    await straight.save(folder)
    spoil(folder)
    await second.load(folder)
    await run(straight, 3, STEPS)
    await run(second, 3, STEPS)
    return weights(second), weights(straight)


@pytest.mark.parametrize(
    "spoil",
    [_spoil_adapter, _spoil("updater", _without_moments), _spoil("version", lambda version: 0)],
    ids=["adapter", "optimizer", "version, hence schedule"],
)
async def test_each_part_is_needed(tiny_path: str, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    assert not equal(*await _resumed([make_trainer(tiny_path) for _ in range(2)], tmp_path, spoil))


def _spoil_value(folder: Path) -> None:
    _spoil_adapter(folder / "value")


@pytest.mark.parametrize("spoil", [_spoil_value, _spoil("value", _without_moments)], ids=["value", "its optimizer"])
async def test_each_part_of_the_value_is_needed(tiny_path: str, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    trainers = [make_trainer(tiny_path, algorithm="ppo") for _ in range(2)]
    assert not equal(*await _resumed(trainers, tmp_path, spoil))


async def test_random_generators_come_back(tiny_path: str, tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    trainer = make_trainer(tiny_path)
    await trainer.save(tmp_path)
    wanted = draw()
    assert draw() != wanted
    await trainer.load(tmp_path)
    assert draw() == wanted


async def test_building_a_trainer_leaves_the_random_state_alone(tiny_path: str) -> None:
    before = torch.get_rng_state()
    one, other = make_trainer(tiny_path), make_trainer(tiny_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(weights(one), weights(other))


async def test_a_state_with_code_in_it_is_not_loaded_and_a_full_disk_is_named(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_path)
    await trainer.save(tmp_path)
    torch.save({"version": _Code()}, tmp_path / "trainer.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        await trainer.load(tmp_path)

    def full(*_: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file\nand more of it")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(WriteFailed) as failed:
        await trainer.save(tmp_path)
    said = f"{tmp_path / 'trainer.pt'} cannot be written (PytorchStreamWriter failed writing file); mend that"
    assert failed.value.sentence() == said


class _Code:
    """Not among what torch.load(weights_only=True) makes."""


async def test_another_rank_is_refused(tiny_path: str, tmp_path: Path) -> None:
    await make_trainer(tiny_path, rank=16).save(tmp_path)
    with pytest.raises(ValueError, match=r"weights: .* shapes of this model, .* wanted .*8.* got .*16"):
        await make_trainer(tiny_path).load(tmp_path)
    with pytest.raises(FileNotFoundError):
        await make_trainer(tiny_path).load(tmp_path / "nowhere")
