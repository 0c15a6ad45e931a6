"""Adapters with a scalar head beside the policy's, against PEFT's sequence classification."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cluster.errors import WrongInput
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.adapter_config import HEAD, read_scored
from learner.model.policy import Policy
from learner.model.roles import ScoredRole

IDS = torch.tensor([[5, 9, 2, 7, 7, 3]])


def theirs(path: str, folder: str | None = None, outputs: int = 1, **lora: Any) -> Any:
    """A reward model as anyone makes one: from `folder`, or fresh with no weight zero."""
    base: Any = AutoModelForSequenceClassification.from_pretrained(path, num_labels=outputs, dtype=torch.float32)
    base.config.pad_token_id = 0
    if folder is not None:
        return peft.PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    torch.manual_seed(3)
    settings: Any = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], "task_type": "SEQ_CLS"}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings | lora)).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.fixture(scope="module")
def scored_path(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("scored"))
    theirs(tiny_path).save_pretrained(folder)
    return folder


def policy_with(path: str, *roles: ScoredRole, adapter: str | None = None, **settings: Any) -> Policy:
    return Policy(
        ModelConfig(path=path, adapter=adapter, dtype=settings.pop("dtype", "float32")),
        LoraConfig(rank=8, alpha=16),
        checkpointing=settings.pop("checkpointing", "none"),
        seed=0,
        device=torch.device("cpu"),
        roles=roles,
    )


def last_score(policy: Policy, role: str) -> Tensor:
    with policy.acting_as(role):
        scores: Tensor = policy.scored[role].head(policy.hidden(IDS))
    return scores[-1]


def test_a_frozen_role_scores_as_transformers_and_peft_do_and_leaves_the_policy_alone(
    tiny_path: str, adapter_path: str, scored_path: str
) -> None:
    alone = policy_with(tiny_path, adapter=adapter_path)
    role = ScoredRole("reward", scored_path, trained=False, key="rewards")
    policy = policy_with(tiny_path, role, adapter=adapter_path)
    wanted = theirs(tiny_path, scored_path)(input_ids=IDS).logits[0, 0]
    assert wanted.abs() > 1e-3
    torch.testing.assert_close(last_score(policy, "reward"), wanted, atol=1e-6, rtol=1e-6)
    assert torch.equal(policy.hidden(IDS), alone.hidden(IDS))
    assert policy.masters.keys() == alone.masters.keys()
    assert policy.scalings() == alone.scalings()
    assert not any(weight.requires_grad for weight in policy.scored["reward"].weights.values())


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_trained_role_has_the_gradient_of_peft_and_the_policy_none(
    tiny_path: str, scored_path: str, checkpointing: str
) -> None:
    role = ScoredRole("value", scored_path, trained=True, key="learner")
    policy = policy_with(tiny_path, role, checkpointing=checkpointing)
    model = theirs(tiny_path, scored_path)
    model(input_ids=IDS).logits.sum().backward()
    wanted = {
        name.replace(".default", "").replace("modules_to_save.", ""): weight.grad
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    value = policy.scored["value"]
    assert value.masters is not None
    with policy.acting_as("value"):
        value.head(policy.hidden(IDS))[-1].backward()
    assert wanted.keys() == value.masters.named.keys()
    for name, weight in value.masters.named.items():
        torch.testing.assert_close(weight.grad, wanted[name], atol=1e-6, rtol=1e-4)
    assert all(weight.grad is None for weight in policy.masters.values())


def test_a_fresh_role_says_zero_and_what_it_becomes_is_read_by_peft(tiny_path: str, tmp_path: Path) -> None:
    policy = policy_with(tiny_path, ScoredRole("value", None, trained=True, key="learner"), dtype="bfloat16")
    value = policy.scored["value"]
    assert last_score(policy, "value") == 0.0
    assert value.masters is not None
    torch.manual_seed(1)
    for weight in value.masters.named.values():
        torch.nn.init.normal_(weight, std=0.1)
    value.masters.sync()
    value.save(tmp_path, tiny_path)
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(str(tmp_path), num_labels=1)
    model.config.pad_token_id = 0
    wanted = model.eval()(input_ids=IDS).logits[0, 0]
    torch.testing.assert_close(last_score(policy, "value").float(), wanted.float(), atol=0.05, rtol=0.05)  # bfloat16
    in_float32 = policy_with(tiny_path, ScoredRole("value", str(tmp_path), trained=False, key="learner"))
    torch.testing.assert_close(last_score(in_float32, "value"), wanted, atol=1e-5, rtol=1e-5)


def test_padding_is_the_base_s_or_that_of_the_tokenizer_beside_the_adapter(
    tiny_path: str, scored_path: str, tmp_path: Path
) -> None:
    """As TRL's RewardTrainer leaves it: a base without a padding token, and one that is the end token in the folder."""
    base, folder = (shutil.copytree(path, tmp_path / name) for path, name in ((tiny_path, "b"), (scored_path, "a")))
    role = ScoredRole("reward", str(folder), trained=False, key="rewards")
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    assert policy_with(tiny_path, role).scored["reward"].pad == 259
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    assert policy_with(str(base), role).scored["reward"].pad == tokenizer.eos_token_id != 259


def test_what_is_no_scalar_head_on_this_base_is_refused_by_name(
    tiny_path: str, adapter_path: str, scored_path: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongInput, match=r"^here: task_type of .* must be 'SEQ_CLS', got 'CAUSAL_LM'; give an"):
        read_scored(adapter_path, "here")
    theirs(tiny_path, outputs=2).save_pretrained(tmp_path / "two")
    with pytest.raises(WrongInput, match=r"^here: .*score.weight .* must be a head of one output, got 2 outputs"):
        read_scored(str(tmp_path / "two"), "here")
    theirs(tiny_path, modules_to_save=["embed_tokens"]).save_pretrained(tmp_path / "more")
    with pytest.raises(WrongInput, match=r"^here: modules_to_save of .* must be the head alone, got embed_tokens"):
        read_scored(str(tmp_path / "more"), "here")
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text((Path(scored_path) / "adapter_config.json").read_text())
    weights = load_file(Path(scored_path) / "adapter_model.safetensors")
    save_file(weights | {HEAD: torch.zeros(1, 3)}, other / "adapter_model.safetensors")
    assert json.loads((other / "adapter_config.json").read_text())["r"] == 8
    with pytest.raises(WrongInput, match=r"^here: .*other: must have the names and shapes of model.path, 1 differ"):
        policy_with(tiny_path, ScoredRole("reward", str(other), trained=False, key="here"))
