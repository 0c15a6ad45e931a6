"""What Policy refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4TextConfig, LlamaConfig, MambaConfig, OPTConfig

from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.logprob import token_logprobs
from learner.model.policy import Policy
from rollout.architecture import ArchitectureError

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_model(config: Any, folder: Path) -> str:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def make_policy(
    path: str,
    *,
    adapter: str | None = None,
    checkpointing: str = "none",
    dtype: Any = "float32",
    seed: int = 0,
    targets: Any = "all-linear",
) -> Policy:
    return Policy(
        ModelConfig(path=path, adapter=adapter, dtype=dtype),
        LoraConfig(rank=8, alpha=16, targets=targets),
        checkpointing=checkpointing,
        seed=seed,
        device=torch.device("cpu"),
    )


def test_llama_and_checkpointing(tmp_path: Path) -> None:
    policy = make_policy(save_model(LlamaConfig(**SMALL), tmp_path), checkpointing="full")
    assert policy.head.shape == (40, 16)
    assert not policy.head.requires_grad
    assert len(policy.masters) == 2 * 7
    torch.autograd.backward(policy.hidden(torch.tensor([[1, 2, 3]])).sum())
    assert any(master.grad is not None and master.grad.abs().sum() > 0 for master in policy.masters.values())


def test_layers_that_cannot_be_had_without_the_logits_are_a_sentence(tmp_path: Path) -> None:
    config = Llama4TextConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=24)
    with pytest.raises(ArchitectureError, match=r"model.path: .* \(model_type llama4_text\) keeps its layers where"):
        make_policy(save_model(config, tmp_path))


def test_targets_that_peft_refuses_are_named(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"learner.lora.targets: Module 'out_proj' is incompatible .*; name others"):
        make_policy(save_model(config, tmp_path))


def test_dropout_is_off_even_where_checkpointing_looks_like_training(tmp_path: Path) -> None:
    config = OPTConfig(
        vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16,
        dropout=0.5, attention_dropout=0.5, max_position_embeddings=32,
    )  # fmt: skip
    policy = make_policy(save_model(config, tmp_path), checkpointing="full")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(policy.hidden(ids), policy.hidden(ids))


def test_right_padding_is_not_seen(tiny_path: str) -> None:
    policy = make_policy(tiny_path)
    row = torch.tensor([[5, 6, 7, 8, 9]])
    padded = torch.tensor([[5, 6, 7, 8, 9, 0, 0, 0], [9, 8, 7, 6, 5, 4, 3, 2]])
    with torch.no_grad():
        alone, among = policy.hidden(row), policy.hidden(padded)[:5]
        targets = torch.tensor([6, 7, 8, 9, 1])
        found = [token_logprobs(h, policy.head, targets, 1.0) for h in (alone, among)]
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_seed_decides_the_initial_adapter(tiny_path: str) -> None:
    one, same, other = (make_policy(tiny_path, seed=seed).masters for seed in (1, 1, 2))
    name = next(name for name in one if "lora_A" in name)
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_bfloat16_masters_are_not_rounded(tiny_path: str, adapter_path: str) -> None:
    for adapter in (None, adapter_path):
        exact, half = (make_policy(tiny_path, adapter=adapter, dtype=dtype) for dtype in ("float32", "bfloat16"))
        for name, master in exact.masters.items():  # peft draws the first weights in the base's type
            assert torch.equal(master if adapter else master.bfloat16().float(), half.masters[name])
        assert all(weight.dtype == torch.bfloat16 for weight in half._peft.parameters())
        for name, weight in half.trained.weights.items():
            assert torch.equal(weight, half.masters[name].bfloat16())


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["q_proj", "k_porj"], ["embed_tokens"]])
def test_wrong_targets_are_named(tiny_path: str, targets: list[str]) -> None:
    wrong = next(name for name in targets if name != "q_proj")
    with pytest.raises(ValueError, match=f"learner.lora.targets: .* got '{wrong}'; known: down_proj, gate_proj"):
        make_policy(tiny_path, targets=targets)


def test_targets_are_respected(tiny_path: str) -> None:
    policy = make_policy(tiny_path, targets=["q_proj", "v_proj"])
    assert {name.split(".")[-3] for name in policy.masters} == {"q_proj", "v_proj"}
    assert policy.peft_config is not None
    assert policy.peft_config["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"r": 16}, "r of .* must be 8 as learner.lora.rank says, got 16"),
     ({"use_dora": True}, "use_dora of .* must not be set, got True"),
     ({"target_modules": ["q_proj"]}, "target_modules of .* must be those of learner.lora.targets=all-linear, down_"),
     ({"target_modules": ["fc1"]}, "target_modules of .* each must name linear layers .* got 'fc1'; known: down_proj"),
     ({"lora_alpha": 5}, "lora_alpha of .* must be 16.0 as learner.lora.alpha says, got 5")],
)  # fmt: skip
def test_contradicting_adapters_are_refused(
    tiny_path: str, adapter_path: str, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(adapter_path, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=f"model.adapter: {message}"):
        make_policy(tiny_path, adapter=str(tmp_path / "adapter"))


def test_reference_gives_the_adapter_back(tiny_path: str, adapter_path: str) -> None:
    ids = torch.tensor([[5, 6, 7]])
    for adapter in (None, adapter_path):
        policy = make_policy(tiny_path, adapter=adapter)
        with torch.no_grad():
            for master in policy.masters.values():
                master.add_(0.05)
            policy.sync()
            before = policy.hidden(ids)
            with policy.acting_as("reference"):
                assert not torch.allclose(policy.hidden(ids), before)
            assert torch.equal(policy.hidden(ids), before)
        torch.autograd.backward(policy.hidden(ids).sum())
        assert all(master.grad is not None for master in policy.masters.values())
