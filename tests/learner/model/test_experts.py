"""Adapters of experts: equal to PEFT's in logprobs and gradients without the dense change of a weight; what is exported
and merged is PEFT's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.errors import WrongInput
from examples.random_families import TINY, make_family
from examples.random_model import make_tiny_model
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.adapter_config import follow
from learner.model.experts import expert_parameters
from learner.model.export import export, load_masters, save_masters, update_of
from learner.model.lora import lora_targets
from learner.model.policy import Policy
from learner.model.roles import ScoredRole
from rollout.data.weight_names import check_adapter
from rollout.types import Weights
from tests.learner.model.test_packing_check import random_adapter
from tests.model_rows import ROWS

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]
IDS = torch.tensor([[5, 6, 7, 8, 9, 200, 3, 3, 100, 40, 41, 42]])


def saved(kind: str, folder: Path) -> str:
    """A tiny random model of a row of the table of models, as transformers saves it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(TINY | ROWS[kind]))
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return str(folder)


def policy_of(
    path: str, *, rank: Any = 8, adapter: str | None = None, roles: Any = (), targets: Any = None, **more: Any
) -> Policy:
    policy = Policy(
        ModelConfig(path=path, adapter=adapter, dtype="float32"), LoraConfig(rank=rank, targets=targets or TARGETS),
        seed=0, device=torch.device("cpu"), roles=roles, **{"checkpointing": "none"} | more,
    )  # fmt: skip
    if adapter is None:
        random_adapter(policy)
    return policy


def in_peft(path: str, folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True).eval()


def logprobs(lm: Any) -> Tensor:
    """[L - 1] of IDS."""
    states = lm.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    every: Tensor = lm.get_output_embeddings()(states).log_softmax(-1)[0, :-1]
    return every.gather(-1, IDS[0, 1:, None])[:, 0]


@pytest.mark.parametrize(("kind", "rank"), [("qwen3_moe", 8), ("gpt_oss", 2), ("mixtral", 1)])
def test_logprobs_and_gradients_are_those_of_pefts_parameters(kind: str, rank: int, tmp_path: Path) -> None:
    path = saved(kind, tmp_path / "model")
    policy = policy_of(path, rank=rank)
    with torch.no_grad():  # smaller, or attention is so sharp that float32 has gradients to 1e-4 only
        for weight in policy.trained.weights.values():
            weight.mul_(0.25)
    export(policy, tmp_path / "adapter", path)
    wanted = in_peft(path, tmp_path / "adapter")
    ours, theirs = logprobs(policy._lm), logprobs(wanted.get_base_model())
    assert float((ours - theirs).detach().abs().max()) < 1e-5
    ours.sum().backward()
    theirs.sum().backward()
    slopes = {name: weight.grad for name, weight in wanted.named_parameters() if weight.requires_grad}
    assert {name.replace(".default.", ".") for name in slopes} == policy.trained.weights.keys()
    assert sum(".experts." in name for name in slopes) == 2 * 2 * 2  # A and B of both tensors in two layers
    for name, slope in slopes.items():
        own = policy.trained.weights[name.replace(".default.", ".")].grad
        assert slope is not None
        assert float((own - slope).norm()) <= 1e-5 * float(slope.norm()), name
    with policy.acting_as("reference"), torch.no_grad(), wanted.disable_adapter():
        # gpt-oss's attention is ours there, which rounds otherwise than transformers'.
        assert torch.allclose(logprobs(policy._lm), logprobs(wanted.get_base_model()), atol=2e-6, rtol=0)
        assert float((logprobs(policy._lm) - ours.detach()).abs().max()) > 0.1  # the adapter is in force


class Sizes(TorchDispatchMode):
    """Collects the number of elements of each tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        for one in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in given:  # not a view
                self.made.append(one.numel())
        return found


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_no_change_of_all_experts_is_made_or_kept(kind: str, tmp_path: Path) -> None:
    """Which PEFT's own forward makes: E * out * in numbers."""
    path = saved(kind, tmp_path / "model")
    policy = policy_of(path)
    export(policy, tmp_path / "adapter", path)
    weights = {name: weight for name, weight in policy._lm.named_parameters() if weight.dim() == 3}
    dense = min(weight.numel() for weight in weights.values())
    own = {weight.data_ptr() for weight in policy._lm.parameters()}
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept.append(tensor.numel())
        return tensor

    with Sizes() as sizes, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy._lm.base_model(input_ids=IDS).last_hidden_state.sum().backward()
    assert max(sizes.made) < dense
    assert max(kept) < dense
    wanted = in_peft(path, tmp_path / "adapter")
    with Sizes() as sizes:
        wanted.get_base_model().base_model(input_ids=IDS).last_hidden_state.sum().backward()
    assert max(sizes.made) >= dense


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "granitemoe"])
def test_merged_weights_are_pefts_under_the_checkpoints_names(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path / "model")
    policy = policy_of(path)
    export(policy, tmp_path / "adapter", path)
    in_peft(path, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    wanted, base = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "model"))
    update = update_of(policy, 1, merged=True)
    assert isinstance(update, Weights)
    sent = load(bytes(update.payload))
    assert {name for name, weight in wanted.items() if not torch.equal(weight, base[name])} == sent.keys()
    for name, weight in sent.items():
        assert float((weight - wanted[name]).abs().max()) < 1e-6, name


def test_experts_of_gpt_oss_are_sent_one_by_one_with_their_biases(tmp_path: Path) -> None:
    path = saved("gpt_oss", tmp_path / "model")
    policy = policy_of(path)
    export(policy, tmp_path / "adapter", path)
    merged = in_peft(path, tmp_path / "adapter").merge_and_unload().state_dict()
    update = update_of(policy, 1, merged=True)
    assert isinstance(update, Weights)
    sent = {name: weight for name, weight in load(bytes(update.payload)).items() if ".experts." in name}
    assert len(sent) == 2 * 4 * 4  # layers, experts, tensors
    for name, weight in sent.items():
        block, expert, leaf = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name).groups()  # type: ignore[union-attr]
        assert float((weight - merged[f"{block}.{leaf}"][int(expert)]).abs().max()) < 1e-6, name


def test_a_policy_goes_on_from_its_masters_and_from_its_adapter(tmp_path: Path) -> None:
    path = saved("qwen3_moe", tmp_path / "model")
    policy = policy_of(path)
    export(policy, tmp_path / "adapter", path)
    save_masters(policy, tmp_path / "masters")
    again = Policy(
        ModelConfig(path=path, dtype="float32"), LoraConfig(rank=8, targets=TARGETS), checkpointing="full", seed=5,
        device=torch.device("cpu"),
    )  # fmt: skip
    load_masters(again, tmp_path / "masters")
    lora = follow(LoraConfig(alpha=32), str(tmp_path / "adapter"))
    assert (sorted(lora.targets), lora.rank) == (sorted(TARGETS), 8)
    check_adapter(str(tmp_path / "adapter"), "model.adapter", policy.peft_config or {}, None)
    followed = Policy(
        ModelConfig(path=path, adapter=str(tmp_path / "adapter"), dtype="float32"), lora, checkpointing="none", seed=5,
        device=torch.device("cpu"),
    )  # fmt: skip
    wanted = policy.hidden(IDS)
    for other in (again, followed):
        assert torch.equal(other.hidden(IDS), wanted)
    with followed.acting_as("reference"):  # the adapter that training started from
        assert torch.equal(followed.hidden(IDS), wanted)


def test_a_value_has_adapters_of_the_experts_of_its_own(tmp_path: Path) -> None:
    path = saved("qwen3_moe", tmp_path / "model")
    policy = policy_of(path, roles=[ScoredRole("value", None, trained=True, key="learner.value")])
    value = policy.scored["value"]
    assert sum(".experts." in name for name in value.weights) == 8
    with policy.acting_as("reference"):
        base = policy.hidden(IDS)
    with policy.acting_as("value"):
        assert torch.equal(policy.hidden(IDS), base)  # its B are zero
        value.weights["base_model.model.model.layers.0.mlp.experts.lora_B.weight"].data += 0.1
        moved = policy.hidden(IDS)
        moved.sum().backward()
    assert float((moved - base).detach().abs().max()) > 1e-3
    assert value.weights["base_model.model.model.layers.0.mlp.experts.lora_A.weight"].grad is not None
    assert all(weight.grad is None for weight in policy.trained.weights.values())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "llama4_text",
            r"model.layers.0.feed_forward.experts of this model \(model_type llama4_text\) is a Llama4Text",
        ),
        ("nemotron_h", r"needs a model with routed experts, and this one \(model_type nemotron_h\) has none"),
    ],
)
def test_other_experts_are_refused_by_name(kind: str, words: str) -> None:
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(TINY | ROWS[kind])))
    with pytest.raises(ValueError, match=words) as refused:
        expert_parameters(lm)
    assert "\n" not in str(refused.value)


# Routing replay: by families whose routers differ (softmax of all, of the chosen, renormalised, with a bias).


def chosen_in(policy: Policy) -> dict[int, Tensor]:
    """Layer -> [L, k], filled by each forward pass: what its router chose."""
    found: dict[int, Tensor] = {}

    def note(layer: int) -> Any:
        def hook(_module: Any, _given: Any, output: Any) -> None:
            (found[layer],) = (one for one in output if not one.is_floating_point())

        return hook

    for name, module in policy._lm.named_modules():
        if name.rpartition(".")[2] in ("gate", "router") and (match := re.search(r"layers\.(\d+)\.", name)):
            module.register_forward_hook(note(int(match[1])))
    return found


ROUTERS = ["qwen3_moe", "gpt_oss", "mixtral", "granitemoe", "olmoe", "qwen2_moe"]


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_experts_that_are_given_are_taken_and_weighed_anew(kind: str, tmp_path: Path) -> None:
    policy = policy_of(saved(kind, tmp_path), targets="all-linear", replays_routing=True)
    chosen = chosen_in(policy)

    def hidden(experts: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return policy.hidden(IDS, experts=experts)

    own = hidden()
    layers, k = max(chosen) + 1, chosen[0].shape[1]
    given = torch.stack([chosen[layer] for layer in range(layers)], 1)  # [L, layers, k]
    assert torch.equal(hidden(given.flatten(1).to(torch.int16)), own)
    assert torch.equal(hidden(torch.full((len(given), layers * k), -1, dtype=torch.int16)), own)
    other = (given + 1) % (given.max() + 1)
    moved = hidden(other.flatten(1).to(torch.int16))
    assert all(torch.equal(chosen[layer], other[:, layer]) for layer in range(layers))
    assert float((moved - own).abs().max()) > 1e-3
    some = torch.where(torch.arange(len(given))[:, None, None] < 5, other, -1)
    hidden(some.flatten(1).to(torch.int16))
    assert torch.equal(chosen[0][:5], other[:5, 0])
    assert torch.equal(chosen[0][5:], given[5:, 0])
    assert torch.equal(hidden(), own)  # and nothing of it is left


def test_replay_holds_where_layers_are_computed_again(tmp_path: Path) -> None:
    path, slopes = saved("qwen3_moe", tmp_path), []
    given = torch.randint(0, 4, (IDS.shape[1], 2, 1), generator=torch.Generator().manual_seed(1))
    experts = torch.cat([given, (given + 1) % 4], -1).flatten(1).to(torch.int16)
    for checkpointing in ("none", "full"):
        policy = policy_of(path, targets="all-linear", checkpointing=checkpointing, replays_routing=True)
        policy.hidden(IDS, experts=experts).square().sum().backward()
        slopes.append({name: weight.grad for name, weight in policy.trained.weights.items()})
    assert slopes[0].keys() == slopes[1].keys()
    for name, slope in slopes[0].items():
        assert slope is not None
        assert float(slope.abs().max()) > 0
        torch.testing.assert_close(slopes[1][name], slope, atol=1e-6, rtol=1e-5)


def test_a_model_whose_routers_are_not_known_is_refused_at_once(tmp_path: Path) -> None:
    """Phi-3.5-MoE's router chooses without a topk."""
    for path, words in (
        (str(make_tiny_model(tmp_path / "dense")), "it has no layers with routed experts"),
        (saved("phimoe", tmp_path / "phimoe"), r"layers.0.\S+ (chooses by 0 topk|does not say how many)"),
    ):
        with pytest.raises(WrongInput, match=f"^rollout.routing_replay: the learner must know .*{words}"):
            policy_of(path, targets="all-linear", replays_routing=True)


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    policy = policy_of(saved("qwen3_moe", tmp_path), targets="all-linear", replays_routing=True)
    with pytest.raises(WrongInput, match="a token has 4 of them, where rollouts have 6; leave"):
        policy.hidden(IDS, experts=torch.zeros(IDS.shape[1], 6, dtype=torch.int16))


def test_experts_are_named_in_a_list_and_nowhere_else(tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "dense"))
    with pytest.raises(ValueError, match="experts needs a model with routed experts, and this one"):
        lora_targets(lm, ["q_proj", "experts"])
    lm = AutoModelForCausalLM.from_pretrained(make_family(tmp_path / "moe", "qwen3_moe"))
    assert lora_targets(lm, ["experts"]) == ["experts"]
    assert "experts" not in lora_targets(lm, "all-linear")
    with pytest.raises(ValueError, match="only q_proj, .* and experts are adapted, got 'mlp.experts'; leave it out"):
        lora_targets(lm, ["mlp.experts"])


def test_an_adapter_of_one_of_both_tensors_is_refused(tmp_path: Path) -> None:
    path = saved("qwen3_moe", tmp_path / "model")
    policy = policy_of(path)
    assert policy.peft_config is not None
    policy.peft_config["target_parameters"] = ["experts.down_proj"]
    export(policy, tmp_path / "adapter", path)
    with pytest.raises(WrongInput, match="target_parameters of .* must be those of routed experts, experts.down_proj "):
        follow(LoraConfig(), str(tmp_path / "adapter"))
