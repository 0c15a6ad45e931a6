"""A policy on the text part of a checkpoint with towers: it computes what the whole model computes of text, holds no
tower, and its exported adapter fits the whole model. All layouts: tests/families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from examples.random_towers import make_checkpoint
from learner.config import ModelConfig
from learner.model.base import load_base
from learner.model.export import export, load_masters
from learner.model.policy import Policy
from learner.model.roles import ScoredRole
from rollout.data.weight_names import check_fit, check_model
from tests.learner.model.test_packing_check import random_adapter
from tests.learner.model.test_policy import make_policy
from tests.learner.model.test_reference import last_score, policy_with

IDS = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(5))
EQUAL = 1e-4  # nats
OUTSIDE = ("vis", "audio", "multi_modal")  # parts of the names of towers, and of what joins them to the decoder


def whole_model(path: Path) -> Any:
    """transformers' own class of the checkpoint, with its towers."""
    kind = AutoConfig.from_pretrained(path).architectures[0]
    return getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(model: Any) -> Tensor:
    """[60, V] float32, nats: the logprobs of the next token after each of IDS."""
    if isinstance(model, Policy):
        return model.logits.of_(model.hidden(IDS) @ model.head.T, 1.0).log_softmax(-1)
    more = {"token_type_ids": torch.zeros_like(IDS)} if "gemma3" in model.config.model_type else {}
    found: Tensor = model(input_ids=IDS, **more).logits[0].log_softmax(-1)
    return found


def count(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.fixture(params=["gemma3", "gemma4_dense", "qwen3_vl"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint", request.param)


def check_text_part(checkpoint: Path) -> None:
    """The text part is exactly what the whole model computes of text, and its files are taken."""
    whole = whole_model(checkpoint)
    lm = load_base(ModelConfig(path=str(checkpoint), dtype="float32"), torch.device("cpu"), lora=True).eval()
    assert torch.equal(logprobs(lm), logprobs(whole))
    towers = [one.numel() for name, one in whole.named_parameters() if any(part in name for part in OUTSIDE)]
    assert sum(towers) > 0
    assert count(lm) == count(whole) - sum(towers)
    stored = check_model(str(checkpoint))
    assert stored is not None
    assert not any("vis" in name or "mtp" in name for name in stored)
    assert check_fit(str(checkpoint))


def check_export(checkpoint: Path, folder: Path, size: float = 0.2) -> None:
    """An exported adapter is in force on the whole model, on its decoder alone, and is read back bit by bit. size: of
    the adapter's random weights."""
    policy = make_policy(str(checkpoint))
    random_adapter(policy, size)
    export(policy, folder, str(checkpoint))
    whole = whole_model(checkpoint)
    base = logprobs(whole)
    adapted: Any = peft.PeftModel.from_pretrained(whole, str(folder)).eval()
    assert float((logprobs(adapted) - logprobs(policy)).abs().max()) < EQUAL
    assert float((logprobs(adapted) - base).abs().max()) > 1
    touched = {name for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert len(touched) == len([name for name in policy.masters if "lora_A" in name])
    other = make_policy(str(checkpoint))
    load_masters(other, folder)
    assert all(torch.equal(weight, policy.masters[name]) for name, weight in other.masters.items())
    again = make_policy(str(checkpoint), adapter=str(folder))
    assert all(torch.equal(weight, policy.masters[name]) for name, weight in again.masters.items())


def test_the_text_part_is_what_the_whole_model_computes_of_text(checkpoint: Path) -> None:
    check_text_part(checkpoint)


def test_an_exported_adapter_fits_the_whole_model(checkpoint: Path, tmp_path: Path) -> None:
    check_export(checkpoint, tmp_path / "adapter")


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])  # transformers classifies with no others of such checkpoints
def test_a_reward_model_of_the_text_part_is_read_by_peft_on_the_whole_checkpoint(name: str, tmp_path: Path) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "checkpoint", name))
    policy = policy_with(checkpoint, ScoredRole("value", None, trained=True, key="learner"))
    value = policy.scored["value"]
    assert value.masters is not None
    torch.manual_seed(1)
    for weight in value.masters.named.values():
        torch.nn.init.normal_(weight, std=0.1)
    value.masters.sync()
    value.save(tmp_path / "value", checkpoint)

    whole: Any = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1, dtype=torch.float32)
    whole.config.get_text_config().pad_token_id = whole.config.pad_token_id = 300
    theirs = peft.PeftModel.from_pretrained(whole, str(tmp_path / "value")).eval()
    more = {"token_type_ids": torch.zeros_like(IDS)} if name == "gemma3" else {}
    wanted = theirs(input_ids=IDS, **more).logits[0, 0]
    assert abs(float(wanted)) > 0.01
    torch.testing.assert_close(last_score(policy, "value", IDS), wanted, atol=EQUAL, rtol=EQUAL)
    again = policy_with(checkpoint, ScoredRole("reward", str(tmp_path / "value"), trained=False, key="rewards"))
    torch.testing.assert_close(last_score(again, "reward", IDS), wanted, atol=EQUAL, rtol=EQUAL)
