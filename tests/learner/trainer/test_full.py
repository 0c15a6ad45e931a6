"""The whole model trained: the textbook's gradient, float32 masters, and a folder that anybody can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.memory.shape import OptimizerKind
from examples.random_model import make_tiny_model
from learner.algo.surrogates import LossConfig
from learner.config.settings import LearnerConfig, OptimizerConfig
from learner.trainer.optimizer import RoundedUpdater, rounded, updater_for
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


def test_a_loss_that_is_not_finite_changes_no_rounded_weight() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    updater = RoundedUpdater([weight], LearnerConfig(mode="full"), torch.device("cpu"))
    weight.grad = torch.ones_like(weight)
    assert updater.step(0.1, loss_is_finite=False)[1] is False
    assert torch.equal(weight.detach(), torch.ones(2, 3, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    assert updater.step(0.1, loss_is_finite=True)[1] is True
    assert (weight < 1).all()


def test_random_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    for value in (1.0 + 2**-10, -3.001, 1e-30, 0.0):
        found = rounded(torch.full((200_000,), value))
        near = torch.tensor(value, dtype=torch.bfloat16)
        assert found.dtype == torch.bfloat16
        assert float(found.double().mean()) == pytest.approx(value, rel=2e-5, abs=1e-34)
        assert len(found.unique()) == 1 + (float(near) != value)
    assert torch.equal(rounded(torch.tensor([torch.inf, -torch.inf])), torch.tensor([torch.inf, -torch.inf]).bfloat16())


@pytest.mark.parametrize(("kind", "size"), [("adamw_8bit", 2), ("adamw_rounded", 8)])
def test_without_masters_no_update_is_lost(kind: OptimizerKind, size: int) -> None:
    """200 updates of 1e-5 on weights whose bfloat16 neighbours are 2e-3 away: rounded to nearest, none would stay."""
    config = LearnerConfig(mode="full", optimizer=OptimizerConfig(kind=kind, max_grad_norm=1e9))
    torch.manual_seed(0)
    weight = torch.full((8192,), 0.5, dtype=torch.bfloat16).requires_grad_()
    updater = updater_for([weight], config, dtype="bfloat16", device=torch.device("cpu"))
    assert isinstance(updater, RoundedUpdater)
    assert updater.missing_state_bytes() == size * 8192
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


def test_states_without_masters_are_float32_and_as_adamws() -> None:
    """The same gradients, with masters and without: the same states, and weights apart by their rounding alone."""
    torch.manual_seed(0)
    first, gradients = torch.randn(64, 64), [torch.randn(64, 64).bfloat16() for _ in range(10)]
    rounding, plain = first.bfloat16().requires_grad_(), first.bfloat16().float().requires_grad_()
    optimizers = []
    for weight, kind in ((rounding, "adamw_rounded"), (plain, "adamw")):
        config = LearnerConfig.model_validate({"mode": "full", "optimizer": {"kind": kind, "max_grad_norm": 1e9}})
        updater = updater_for([weight], config, dtype="bfloat16", device=torch.device("cpu"))
        for one in gradients:
            weight.grad = one.to(weight.dtype)
            updater.step(1e-3, loss_is_finite=True)
        (optimizer,) = updater.optimizers
        optimizers.append(optimizer.state[weight])
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizers[0][name].dtype == torch.float32
        assert torch.allclose(optimizers[0][name], optimizers[1][name], rtol=1e-6)
    assert float((rounding.detach().float() - plain.detach()).abs().mean()) < 5e-3  # steps of bfloat16: 4e-3 at 1


async def test_a_model_moves_as_it_does_with_masters(tiny_path: str) -> None:
    """20 steps of 1e-4 along the same way as far: rounded to the nearest bfloat16 it would come a third of it."""
    groups = groups_near(AutoModelForCausalLM.from_pretrained(tiny_path))
    moves = []
    for kind in ("adamw", "adamw_rounded"):
        optimizer = OptimizerConfig.model_validate({"kind": kind})
        trainer = make_trainer(tiny_path, dtype="bfloat16", optimizer=optimizer, **FULL | {"learning_rate": 1e-4})
        before = masters(trainer)
        for _ in range(20):
            await trainer.step(groups)
        after = masters(trainer)
        moves.append(torch.cat([(after[name].float() - before[name].float()).flatten() for name in after]))
    with_masters, without = moves
    assert float(without @ with_masters / with_masters.square().sum()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_rounded"])
async def test_training_without_masters_resumes_bit_for_bit(
    kind: OptimizerKind, tiny_path: str, tmp_path: Path
) -> None:
    groups = groups_near(AutoModelForCausalLM.from_pretrained(tiny_path))
    settings: dict[str, Any] = {"dtype": "bfloat16", "optimizer": OptimizerConfig(kind=kind)}
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
        make_trainer(tiny_path, loss=LossConfig(beta=beta), checkpointing="offloaded" if beta > 0 else "full", **FULL)
        for beta in (0.0, 0.1)
    )
    with pytest.raises(KeyError, match="reference"):
        plain._policy.acting_as("reference")
    with other._policy.acting_as("reference"):
        pass
    assert (plain._policy._offload, other._policy._offload) == (False, True)
