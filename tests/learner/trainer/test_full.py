"""The whole model trained: the textbook's gradient, float32 masters, and a folder that anybody can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.random_model import make_tiny_model
from learner.algo.loss_config import LossConfig
from learner.config.learner import LearnerConfig, OptimizerConfig
from learner.trainer.stochastic_rounding import RoundedUpdater, rounded, updater_for
from rollout.types import Weights
from tests.learner import naive
from tests.learner.trainers import (
    adapter_of,
    advantages_by_hand,
    distance,
    gradient,
    groups_near,
    make_trainer,
    masters,
    naive_gradient,
    probe_of,
)

FULL: dict[str, Any] = {"mode": "full", "learning_rate": 1e-3}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
async def test_gradient_is_the_textbooks(tmp_path: Path, tied: bool, checkpointing: Any) -> None:
    path = str(make_tiny_model(tmp_path, tied=tied))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    groups, config = groups_near(model), LossConfig(ratio="clip")
    trainer = make_trainer(path, loss=config, token_budget=60, checkpointing=checkpointing, **FULL)
    found = await gradient(trainer, groups)
    wanted = naive_gradient(model, None, groups, config, advantages_by_hand("batch"))
    assert found.keys() == wanted.keys()
    assert ("lm_head.weight" in found) != tied
    assert distance(found, wanted) < 2e-5


async def test_masters_are_float32_and_what_is_sent_is_what_computes(tiny_path: str) -> None:
    groups = groups_near(AutoModelForCausalLM.from_pretrained(tiny_path))
    trainer = make_trainer(tiny_path, dtype="bfloat16", **FULL | {"learning_rate": 1e-6})
    before = masters(trainer)
    metrics = [await trainer.step(groups) for _ in range(2)][-1]
    assert metrics["loss/skipped_nonfinite"] == 0
    after = masters(trainer)
    moved = {name: float((after[name] - before[name]).abs().max()) for name in after}
    assert all(weight.dtype == torch.float32 for weight in after.values())
    assert all(0 < step < 1e-5 for step in moved.values())  # far below what bfloat16 can tell apart
    sent = await adapter_of(trainer)
    assert isinstance(sent, Weights)
    sent.verify()
    assert sent.version == 2
    computing = dict(trainer._policy._lm.named_parameters())
    arrived = load_safetensors(bytes(sent.payload))
    assert arrived.keys() == computing.keys() == after.keys()
    assert all(torch.equal(arrived[name], computing[name]) for name in arrived)


def test_random_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    for value in (1.0 + 2**-10, -3.001, 1e-30, 0.0):
        found = rounded(torch.full((200_000,), value))
        near = torch.tensor(value, dtype=torch.bfloat16)
        assert found.dtype == torch.bfloat16
        assert float(found.double().mean()) == pytest.approx(value, rel=2e-5, abs=1e-34)
        assert len(found.unique()) == 1 + (float(near) != value)
    assert torch.equal(rounded(torch.tensor([torch.inf, -torch.inf])), torch.tensor([torch.inf, -torch.inf]).bfloat16())


async def test_8_bit_states_need_no_masters_and_lose_no_update(tiny_path: str) -> None:
    """200 updates of 1e-5 on weights whose bfloat16 neighbours are 2e-3 away: rounded to nearest, none would stay."""
    config = LearnerConfig(mode="full", optimizer=OptimizerConfig(kind="adamw_8bit", max_grad_norm=1e9))
    torch.manual_seed(0)
    weight = torch.full((8192,), 0.5, dtype=torch.bfloat16).requires_grad_()
    updater = updater_for([weight], config, dtype="bfloat16", device=torch.device("cpu"))
    assert isinstance(updater, RoundedUpdater)
    assert updater.missing_state_bytes() == 2 * 8192
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        norm, updated = updater.step(1e-5, loss_is_finite=True)
        assert updated
        assert norm == pytest.approx(8192**0.5, rel=1e-3)
    assert weight.dtype == torch.bfloat16
    assert float(weight.detach().double().mean()) == pytest.approx(0.5 - 200e-5, abs=1e-4)
    weight.grad = torch.full_like(weight, torch.nan)
    before = weight.detach().clone()
    assert updater.step(1e-5, loss_is_finite=True)[1] is False
    assert torch.equal(weight, before)
    assert updater.missing_state_bytes() == 0


async def test_8_bit_training_of_a_whole_model_resumes_bit_for_bit(tiny_path: str, tmp_path: Path) -> None:
    groups = groups_near(AutoModelForCausalLM.from_pretrained(tiny_path))
    settings: dict[str, Any] = {"dtype": "bfloat16", "optimizer": OptimizerConfig(kind="adamw_8bit")}
    trainer, other = (make_trainer(tiny_path, **settings, **FULL) for _ in range(2))
    before = masters(trainer)
    await trainer.step(groups)
    own = dict(trainer._policy._lm.named_parameters())
    assert all(
        weight is own[name] and weight.dtype == torch.bfloat16 for name, weight in trainer._policy.masters.items()
    )
    assert all(not torch.equal(own[name], before[name]) for name in before)
    await trainer.save(tmp_path)
    await trainer.step(groups)
    await other.load(tmp_path)
    await other.step(groups)
    assert (await adapter_of(other)).digest == (await adapter_of(trainer)).digest


async def test_export_is_a_model_and_a_checkpoint_goes_on(tiny_path: str, tmp_path: Path) -> None:
    groups = groups_near(AutoModelForCausalLM.from_pretrained(tiny_path))
    trainer, other = make_trainer(tiny_path, **FULL), make_trainer(tiny_path, **FULL)
    await trainer.step(groups)
    await trainer.save(tmp_path)
    ids = list(range(3, 40))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    wanted = naive.logprobs(exported, ids[:1], ids[1:], 1.0).detach().numpy()
    assert np.abs(await probe_of(trainer, ids) - wanted).max() < 1e-5
    assert np.abs(await probe_of(other, ids) - wanted).max() > 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([104, 105])
    assert exported.generation_config.eos_token_id == [258, 256]

    await other.load(tmp_path)
    await trainer.step(groups)
    await other.step(groups)
    assert distance(masters(other), masters(trainer)) == 0
    assert (await adapter_of(other)).digest == (await adapter_of(trainer)).digest


def test_a_reference_is_kept_for_a_kl_alone_and_boundaries_go_where_they_are_told_to(tiny_path: str) -> None:
    plain, other = (
        make_trainer(tiny_path, loss=LossConfig(beta=beta), checkpointing="full", offload_boundaries=beta > 0, **FULL)
        for beta in (0.0, 0.1)
    )
    with pytest.raises(KeyError, match="reference"):
        plain._policy.acting_as("reference")
    with other._policy.acting_as("reference"):
        pass
    assert (plain._policy._offload, other._policy._offload) == (False, True)
