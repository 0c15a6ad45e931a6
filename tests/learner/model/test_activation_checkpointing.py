"""Checkpointing: the same gradient bit for bit, the recomputation that was asked for, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, OPTConfig, Qwen2Config

from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.policy import Policy, resolve_checkpointing
from tests.learner.model.test_policy import SMALL, save_model

LAYERS = 3
IDS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[LlamaConfig, Qwen2Config], ids=["llama", "qwen2"])
def path(request: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return save_model(request.param(**SMALL | {"num_hidden_layers": LAYERS}), tmp_path_factory.mktemp("model"))


def policy_of(path: str, checkpointing: Any, **options: Any) -> Policy:
    policy = Policy(
        ModelConfig(path=path, dtype="float32"),
        LoraConfig(rank=8, alpha=16),
        checkpointing=checkpointing,
        seed=0,
        device=torch.device("cpu"),
        **options,
    )
    with torch.no_grad():
        for i, master in enumerate(policy.masters.values()):  # B is 0 at first, and so would half of the gradients be
            master.copy_(torch.randn(master.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
    policy.sync()
    return policy


def gradient(policy: Policy) -> dict[str, Tensor]:
    torch.autograd.backward(policy.hidden(IDS).square().sum())
    return {name: master.grad for name, master in policy.masters.items() if master.grad is not None}


def forwards_of(policy: Policy, part: Callable[[Any], Any]) -> list[int]:
    """How often `part` of each layer is computed in a forward and backward pass."""
    counts = [0] * LAYERS
    for i, layer in enumerate(policy._lm.model.layers):

        def count(*_: Any, i: int = i) -> None:
            counts[i] += 1

        part(layer).register_forward_hook(count)
    gradient(policy)
    return counts


@pytest.mark.parametrize("checkpointing", ["full", 2, "mlp"])
def test_gradients_are_equal_bit_for_bit(path: str, checkpointing: Any) -> None:
    wanted, found = gradient(policy_of(path, "none")), gradient(policy_of(path, checkpointing))
    assert len(wanted) == 2 * 7 * LAYERS
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("checkpointing", "mlp", "attention"),
    [("none", [1, 1, 1], [1, 1, 1]), ("full", [2, 2, 2], [2, 2, 2]), (2, [2, 2, 1], [2, 2, 1]),
     ("mlp", [2, 2, 2], [1, 1, 1])],
)  # fmt: skip
def test_what_is_computed_twice(path: str, checkpointing: Any, mlp: list[int], attention: list[int]) -> None:
    # The hook sits on a linear layer inside: the recomputation stops as soon as it has what it needs, and so may not
    # come to the end of the module itself.
    assert forwards_of(policy_of(path, checkpointing), lambda layer: layer.mlp.gate_proj) == mlp
    assert forwards_of(policy_of(path, checkpointing), lambda layer: layer.self_attn.q_proj) == attention


def test_kept_bytes_shrink_with_the_policy(path: str) -> None:
    def kept(checkpointing: Any) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        policy = policy_of(path, checkpointing)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy.hidden(IDS)
        return total

    none, one, two, full, mlp = (kept(c) for c in ("none", 1, 2, "full", "mlp"))
    assert none > one > two > full
    assert none > mlp > full


def test_offloaded_boundaries_give_the_same_gradient(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = gradient(policy_of(path, "full"))
    calls: list[bool] = []
    plain = torch.autograd.graph.save_on_cpu

    def counted(**options: Any) -> Any:
        calls.append(True)
        return plain(**options)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counted)
    policy = policy_of(path, "full", offload=True)
    calls.clear()  # those of the checks at start-up
    found = gradient(policy)
    assert len(calls) == 1
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_refusals_name_the_setting(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="learner.checkpointing: must be at most the 3 layers of .*, got 4"):
        policy_of(path, 4)
    opt = OPTConfig(
        vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16,
        max_position_embeddings=32,
    )  # fmt: skip
    with pytest.raises(ValueError, match="learner.checkpointing: mlp needs decoder layers .* has 0 in 2 layers"):
        policy_of(save_model(opt, tmp_path), "mlp")


def test_auto_without_a_plan() -> None:
    assert resolve_checkpointing("auto", torch.device("cpu")) == "none"
    assert resolve_checkpointing("auto", torch.device("cuda")) == "full"
    assert resolve_checkpointing(2, torch.device("cpu")) == 2
