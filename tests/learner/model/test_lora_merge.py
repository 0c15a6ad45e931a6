"""learner.push: merged, against PEFT's own merge: which weights are sent, what they are, and that the base stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from examples.random_model import make_tiny_model
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.export import update_of
from learner.model.policy import Policy, merged
from learner.model.roles import ScoredRole
from rollout.types import Weights
from tests.learner.adapters import written_value
from tests.peak import peak_bytes

ATTENTION = {f"{name}_proj.weight" for name in "qkvo"} | {f"{name}_proj.bias" for name in "qkv"}  # of a Qwen2


def make_policy(path: Path, dtype: Any, targets: Any = "all-linear", roles: Sequence[ScoredRole] = ()) -> Policy:
    """With an adapter that is far from zero."""
    policy = Policy(
        ModelConfig(path=str(path), dtype=dtype),
        LoraConfig(rank=8, alpha=24, targets=targets),
        checkpointing="none",
        seed=0,
        device=torch.device("cpu"),
        roles=roles,
    )
    torch.manual_seed(1)
    policy.load({name: 0.1 * torch.randn_like(master) for name, master in policy.masters.items()})
    return policy


def sent(policy: Policy) -> dict[str, Tensor]:
    update = update_of(policy, 3, merged=True)
    assert isinstance(update, Weights)
    update.verify()
    return load(bytes(update.payload))


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_it_is_pefts_merge_and_the_base_stays(tmp_path: Path, dtype: Any, rounding: float) -> None:
    policy = make_policy(make_tiny_model(tmp_path), dtype)
    before = {name: weight.clone() for name, weight in policy._lm.state_dict().items()}
    for _ in range(3):  # nothing creeps into the base
        found = sent(policy)
    after = policy._lm.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    # PEFT's, in float32 from the same weights.
    expected = policy._peft.float().merge_and_unload().state_dict()
    assert len(found) == 2 * (len(ATTENTION) + 3)
    moved = 0.0
    for name, weight in found.items():
        assert weight.dtype == getattr(torch, dtype)
        torch.testing.assert_close(weight.float(), expected[name], rtol=rounding, atol=1e-6)
        base = before.get(name.replace("_proj.", "_proj.base_layer."))
        assert base is not None
        moved = max(moved, float((weight - base).abs().max()))
    assert moved > 0.1


def test_a_block_of_layers_is_sent_whole_and_the_others_not_at_all(tmp_path: Path) -> None:
    policy = make_policy(make_tiny_model(tmp_path), "float32", ["q_proj", "v_proj"])
    found = sent(policy)
    assert found.keys() == {f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ATTENTION}
    own = policy._lm.state_dict()
    assert torch.equal(found["model.layers.1.self_attn.k_proj.weight"], own["model.layers.1.self_attn.k_proj.weight"])


def test_layers_that_another_role_alone_adapts_are_not_sent(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    folder = written_value(str(path), tmp_path / "value", ["down_proj"])
    value = ScoredRole("value", folder, trained=True, key="learner.value.start")
    found = sent(make_policy(path, "float32", ["q_proj"], [value]))
    assert found.keys() == {f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ATTENTION}


def test_one_matrix_at_a_time_is_held_beside_the_bytes(tmp_path: Path) -> None:
    policy = make_policy(make_tiny_model(tmp_path, layers=4), "bfloat16")
    width_in, width_out = 64, 3 * 64
    one = 4 * width_in * width_out + 4 * 8 * (width_in + width_out)  # the matrix, B and A in float32
    sent = []
    peak = peak_bytes(lambda: sent.append(update_of(policy, 0, merged=True)))
    assert peak <= len(sent[0].payload) + one


def test_adapters_of_other_layers_are_refused() -> None:
    lm = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
    wrapped = get_peft_model(lm, PeftConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"merged is for adapters of nn.Linear, c_attn is Conv1D; set push=adapter"):
        merged(wrapped.get_base_model())
