"""What Policy refuses."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    Qwen2Config,
)

from cluster.errors import WrongInput
from examples.random_model import make_tiny_model
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model import masters
from learner.model import policy as policy_module
from learner.model.base import head_of
from learner.model.export import update_of
from learner.model.logprob import decoder_of, token_logprobs
from learner.model.policy import Policy, merged, resolve_checkpointing
from learner.model.roles import ScoredRole
from rollout.types import Weights
from tests.learner.adapters import written_value
from tests.peak import peak_bytes

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


@pytest.mark.parametrize("most", [10, 200, 2**23])
def test_gradients_added_together_are_those_added_one_by_one(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three micro-batches of matrices of 6 to 150 elements: alone, in several operations, in one."""
    monkeypatch.setattr(masters, "MOST_TOGETHER", most)
    torch.manual_seed(0)
    sizes = [(2, 3), (10, 15), (5, 30), (7, 1), (4, 4)]
    totals, wanted = ([torch.zeros(size) for size in sizes] for _ in range(2))
    for _ in range(3):
        grads = [torch.randn(size).to(torch.bfloat16) for size in sizes]
        together = masters._Sums()
        for total, one, grad in zip(totals, wanted, grads, strict=True):
            together.add(total, grad)
            one.add_(grad)
        together.flush()
    assert all(torch.equal(total, one) for total, one in zip(totals, wanted, strict=True))


def test_llama_and_checkpointing(tmp_path: Path) -> None:
    policy = make_policy(save_model(LlamaConfig(**SMALL), tmp_path), checkpointing="full")
    assert policy.head.shape == (40, 16)
    assert not policy.head.requires_grad
    assert len(policy.masters) == 2 * 7
    torch.autograd.backward(policy.hidden(torch.tensor([[1, 2, 3]])).sum())
    assert any(master.grad is not None and master.grad.abs().sum() > 0 for master in policy.masters.values())


def test_layers_that_cannot_be_had_without_the_logits_are_a_sentence(tmp_path: Path) -> None:
    config = Llama4TextConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=24)
    lm: Any = AutoModelForCausalLM.from_config(config)  # its base_model_prefix names no module of it
    assert decoder_of(lm) is lm.model
    assert head_of(lm, "m") is lm.lm_head.weight
    lm.layers_elsewhere = lm.model
    del lm.model
    with pytest.raises(WrongInput, match=r"model.path: m \(model_type llama4_text\) keeps its layers where"):
        head_of(lm, "m")


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


# Checkpointing: the same gradient bit for bit, the recomputation that was asked for, and no other.

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


def test_mlps_by_tiles_give_the_same_gradient(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slopes(policy: Policy) -> dict[str, Tensor]:
        states = policy.hidden(IDS)
        torch.autograd.backward((states * torch.linspace(-1, 1, states.numel()).view(states.shape)).sum())
        return {name: master.grad for name, master in policy.masters.items() if master.grad is not None}

    wanted, tokens = slopes(policy_of(path, "full")), Counter[int]()
    monkeypatch.setattr(policy_module, "MLP_TILE", 2)
    policy = policy_of(path, "full", offload=True)
    for module in policy._lm.modules():
        if hasattr(module, "down_proj"):
            module.down_proj.register_forward_pre_hook(lambda _, inputs: tokens.update([inputs[0].shape[-2]]))
    found = slopes(policy)
    assert max(tokens) == 2
    for name, slope in wanted.items():
        assert (found[name] - slope).norm() <= 1e-6 * slope.norm()


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


# learner.push: merged, against PEFT's own merge: which weights are sent, what they are, and that the base stays.

ATTENTION = {f"{name}_proj.weight" for name in "qkvo"} | {f"{name}_proj.bias" for name in "qkv"}  # of a Qwen2


def make_merged_policy(path: Path, dtype: Any, targets: Any = "all-linear", roles: Sequence[ScoredRole] = ()) -> Policy:
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
    policy = make_merged_policy(make_tiny_model(tmp_path), dtype)
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
    policy = make_merged_policy(make_tiny_model(tmp_path), "float32", ["q_proj", "v_proj"])
    found = sent(policy)
    assert found.keys() == {f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ATTENTION}
    own = policy._lm.state_dict()
    assert torch.equal(found["model.layers.1.self_attn.k_proj.weight"], own["model.layers.1.self_attn.k_proj.weight"])


def test_layers_that_another_role_alone_adapts_are_not_sent(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    folder = written_value(str(path), tmp_path / "value", ["down_proj"])
    value = ScoredRole("value", folder, trained=True, key="learner.value.start")
    found = sent(make_merged_policy(path, "float32", ["q_proj"], [value]))
    assert found.keys() == {f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ATTENTION}


def test_one_matrix_at_a_time_is_held_beside_the_bytes(tmp_path: Path) -> None:
    policy = make_merged_policy(make_tiny_model(tmp_path, layers=4), "bfloat16")
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
