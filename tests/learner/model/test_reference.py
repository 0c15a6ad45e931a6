"""The reference of a model that is trained as a whole: the textbook's KL, whatever happened to the policy meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from examples.random_model import make_tiny_model
from learner.algo.surrogates import LossConfig
from learner.config import ModelConfig
from learner.config.settings import OptimizerConfig
from learner.model.policy import Policy
from learner.model.reference import _narrowed
from learner.trainer.trainer import Trainer
from tests.learner import naive
from tests.learner.trainers import advantages_by_hand, distance, gradient, groups_near, make_trainer, naive_gradient
from tests.peak import peak_bytes

ROOT = Path(__file__).parents[3]
IDS = list(range(3, 40))
FULL: dict[str, Any] = {"mode": "full", "learning_rate": 0.01, "loss": LossConfig(beta=0.3, ratio="clip")}


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture, other weights."""
    return str(make_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=5))


def said(policy: Policy) -> Tensor:
    """Logits of IDS."""
    with torch.no_grad():
        return policy.hidden(torch.tensor([IDS])) @ policy.head.t()


def as_reference(policy: Policy) -> Tensor:
    with policy.acting_as("reference"):
        return said(policy)


@pytest.mark.parametrize("given", [False, True])
async def test_kl_is_the_textbooks_and_a_resumed_run_has_the_same_reference(
    tiny_path: str, other_path: str, groups: list[pa.Table], tmp_path: Path, given: bool
) -> None:
    """What training started from, or model.reference; not what was learned by the time of the checkpoint."""
    model = {"reference": other_path if given else None}
    trainer, resumed = (make_trainer(tiny_path, model=model, token_budget=60, **FULL) for _ in range(2))
    metrics = await trainer.step(groups)
    assert (metrics["policy/kl"] > 1e-3) == given  # at first it is the policy itself
    await trainer.save(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    near = groups_near(policy)
    found = await gradient(trainer, near)
    wanted = naive_gradient(
        policy, naive.load(other_path if given else tiny_path, None), near, FULL["loss"], advantages_by_hand("batch")
    )
    assert distance(found, wanted) < 5e-5
    await resumed.load(tmp_path)
    assert distance(await gradient(resumed, near), found) == 0


@pytest.mark.parametrize("kind", ["auto", "int8"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
async def test_the_reference_stays_and_the_policy_comes_back_bit_for_bit(
    tiny_path: str, groups: list[pa.Table], kind: str, optimizer: Any
) -> None:
    settings = FULL | {"optimizer": OptimizerConfig(kind=optimizer)}
    trainer = make_trainer(tiny_path, dtype="bfloat16", model={"reference_dtype": kind}, **settings)
    policy, start = trainer._policy, said(trainer._policy)
    reference = as_reference(policy)
    assert torch.equal(reference, start) == (kind == "auto")
    assert (reference - start).abs().max() < 0.05 * start.abs().max()
    await trainer.step(groups)
    moved = said(policy)
    assert not torch.equal(moved, start)
    assert torch.equal(as_reference(policy), reference)
    with pytest.raises(ZeroDivisionError), policy.acting_as("reference"):
        raise ZeroDivisionError
    assert torch.equal(said(policy), moved)


async def test_each_update_of_a_batch_is_held_to_the_reference(tiny_path: str, groups: list[pa.Table]) -> None:
    whole = await make_trainer(tiny_path, **FULL).step(groups)
    split = await make_trainer(tiny_path, updates_per_batch=2, **FULL).step(groups)
    assert whole["policy/kl"] == 0
    assert split["policy/kl"] > 1e-3  # of the second, after the first has moved the policy


def held_bytes(policy: Policy) -> int:
    """Of the reference's own tensors."""
    reference = policy._roles["reference"].__self__  # type: ignore[attr-defined]
    kept = [values for _, values in reference._whole]
    kept += [part for narrow in reference._narrow for part in (narrow.numbers, narrow.scales)]
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


def test_what_8_bits_cost_and_save_on_a_trained_model() -> None:
    """Half the bytes; logprobs of the model of gsm8k_cpu.yaml move by 0.02 nats in the mean."""
    path, device = str(ROOT / "examples/tiny-gsm8k"), torch.device("cpu")

    def made(kind: Any) -> Policy:
        model = ModelConfig(path=path, dtype="bfloat16", reference_dtype=kind)
        return Policy(model, None, checkpointing="none", seed=0, device=device, keep_reference=True)

    half, eight = made("auto"), made("int8")
    weights = list(half._lm.parameters())
    assert held_bytes(half) == 2 * sum(weight.numel() for weight in weights)
    linear = [module for module in half._lm.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    saved = sum(module.weight.numel() - 2 * len(module.weight) for module in linear)
    assert held_bytes(eight) == held_bytes(half) - saved
    logs = [as_reference(policy).float().log_softmax(-1) for policy in (half, eight)]
    error = (logs[0] - logs[1])[:-1].gather(1, torch.tensor(IDS[1:])[:, None]).abs()
    assert 1e-4 < float(error.mean()) < 0.05
    plain = peak_bytes(lambda: said(eight))
    largest = max(module.weight.nbytes for module in linear)
    assert peak_bytes(lambda: as_reference(eight)) < plain + 1.1 * largest


async def test_in_8_bits_a_head_apart_stays_as_it_is(tmp_path: Path, groups: list[pa.Table]) -> None:
    path = str(make_tiny_model(tmp_path, tied=False))
    trainer = make_trainer(path, model={"reference_dtype": "int8"}, **FULL)
    assert 0 < (await trainer.step(groups))["policy/kl"] < 1e-2


def test_each_row_has_a_scale_of_its_own_and_one_of_zeros_stays() -> None:
    weight = torch.randn(3, 50) * torch.tensor([[1.0], [1000.0], [0.0]])
    narrow = _narrowed(nn.Linear(50, 3), weight, weight)
    narrow = narrow._replace(weight=torch.empty(0))
    narrow.widen()
    error = (narrow.weight - weight).abs().amax(1)
    assert (error <= weight.abs().amax(1) / 254 * 1.01).all()


def test_what_cannot_be_a_reference_is_refused(tiny_path: str, adapter_path: str, tmp_path: Path) -> None:
    def made(reference: str) -> Trainer:
        return make_trainer(tiny_path, model={"reference": reference}, **FULL)

    folder = tmp_path / "model"
    shutil.copytree(tiny_path, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"rms_norm_eps": 1e-3, "eos_token_id": 7}))
    with pytest.raises(ValueError, match=r"model.reference: .* rms_norm_eps of .* is 0.001, not 1e-06; give another"):
        made(str(folder))
    with pytest.raises(ValueError, match=r"model.reference: must be a whole model, .* is an adapter"):
        made(adapter_path)
