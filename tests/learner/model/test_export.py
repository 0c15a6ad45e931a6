"""Adapters of models with experts and with fused layers: what is adapted, and under which names. The weights of a
checkpoint that are kept in several types.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from examples.random_families import make_family
from examples.random_towers import make_checkpoint
from learner.config import ModelConfig
from learner.model.export import ServedNames, export, save_masters, update_of
from learner.model.lora import lora_targets
from learner.model.policy import Policy
from rollout.data.model_files import WEIGHTS_FILE
from rollout.types import Adapter
from tests.learner.model.test_packing_check import random_adapter
from tests.learner.model.test_policy import make_policy

IDS = torch.tensor([[5, 6, 7, 8, 9, 200, 3, 3, 100]])


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_and_router_are_not_adapted(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = make_policy(str(make_family(tmp_path, name)))
    assert {key.split(".")[-3] for key in policy.masters} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {weight.shape[0] for key, weight in policy.masters.items() if "lora_A" in key} == {8}
    assert policy.peft_config is not None
    assert not policy.peft_config["rank_pattern"]
    assert "all-linear of a model with experts is its attention (q_proj, k_proj, v_proj, o_proj)" in caplog.text
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    for target in ("gate_proj", "w1", "gate", "down_proj"):
        with pytest.raises(ValueError, match=f"only q_proj, .* and experts are adapted, got '{target}'"):
            lora_targets(lm, ["q_proj", target])


def adapted(name: str, folder: Path) -> Policy:
    policy = make_policy(str(make_family(folder, name)))
    random_adapter(policy)
    return policy


@pytest.mark.parametrize(("name", "second"), [("glm4", True), ("phi3", False)])
def test_fused_layers_are_exported_for_peft_and_where_it_differs_for_vllm(
    name: str, second: bool, tmp_path: Path
) -> None:
    policy = adapted(name, tmp_path / "model")
    export(policy, tmp_path / "adapter", str(tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with torch.no_grad():
        wanted, found = policy._peft(input_ids=IDS).logits, loaded(input_ids=IDS).logits
    assert float((wanted - found).abs().max()) < 1e-5
    assert (tmp_path / "adapter" / "vllm").exists() == second


def test_a_whole_model_is_exported_with_settings_that_transformers_does_not_save(tmp_path: Path) -> None:
    """Of which it has some in published models: a temperature, and nothing of sampling."""
    base = make_family(tmp_path / "model", "gemma2")
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "eos_token_id": [1, 2]}))
    model = ModelConfig(path=str(base), dtype="float32")
    whole = Policy(model, None, checkpointing="none", seed=0, device=torch.device("cpu"))
    export(whole, tmp_path / "out", str(base))
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (kept["temperature"], kept["eos_token_id"]) == (0.9, [1, 2])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_parts_of_a_fused_layer_change_its_rows_as_the_whole_does(tmp_path: Path) -> None:
    """By multiplying out what is pushed: [B1 A; B2 A] are the rows of B A."""
    policy = adapted("glm4", tmp_path / "model")
    update = update_of(policy, 1)
    assert isinstance(update, Adapter)
    pushed = load(bytes(update.payload))
    assert {key.split(".")[-3] for key in pushed} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert sorted(update.config["target_modules"]) == sorted({key.split(".")[-3] for key in pushed})
    block = "base_model.model.model.layers.1.mlp."
    whole = policy.masters[f"{block}gate_up_proj.lora_B.weight"] @ policy.masters[f"{block}gate_up_proj.lora_A.weight"]
    parts = [
        pushed[f"{block}{part}.lora_B.weight"] @ pushed[f"{block}{part}.lora_A.weight"]
        for part in ("gate_proj", "up_proj")
    ]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-6)
    export(policy, tmp_path / "adapter", str(tmp_path / "model"))
    served = load((tmp_path / "adapter/vllm/adapter_model.safetensors").read_bytes())
    assert served.keys() == pushed.keys()
    config = json.loads((tmp_path / "adapter/vllm/adapter_config.json").read_text())
    assert config["target_modules"] == update.config["target_modules"]


def test_names_that_are_the_same_are_left_alone() -> None:
    weights = {"base_model.model.model.layers.0.mlp.gate_up_proj.lora_B.weight": torch.zeros(4, 2)}
    phi3, glm4 = (ServedNames(SimpleNamespace(model_type=kind)) for kind in ("phi3", "glm4"))
    assert phi3.weights(weights).keys() == weights.keys()
    config = {"target_modules": ["model.layers.0.mlp.gate_up_proj", "o_proj"]}
    assert phi3.config(config) == config
    assert glm4.config(config)["target_modules"] == [
        "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "o_proj",
    ]  # fmt: skip


def test_rows_that_vllm_holds_in_another_order_are_sent_and_exported_in_it(tmp_path: Path) -> None:
    """Llama 4's queries and keys, whose heads have 32 numbers; the adapter for PEFT and the policy stay as they are."""
    policy = make_policy(str(make_checkpoint(tmp_path / "model", "llama4")))
    random_adapter(policy)
    before = {name: master.detach().clone() for name, master in policy.masters.items()}
    update = update_of(policy, 1)
    assert isinstance(update, Adapter)
    pushed = load(bytes(update.payload))
    export(policy, tmp_path / "adapter", str(tmp_path / "model"))
    served = load_file(tmp_path / "adapter" / "vllm" / WEIGHTS_FILE)
    exported = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    assert pushed.keys() == before.keys()
    assert served.keys() == exported.keys()
    turned = {name for name, weight in pushed.items() if not torch.equal(weight, before[name])}
    assert turned == {name for name in before if "lora_B" in name and ("q_proj" in name or "k_proj" in name)}
    for name, master in before.items():
        whole = name.replace("model.model.layers", "model.language_model.model.layers")
        assert torch.equal(policy.masters[name], master)
        assert torch.equal(exported[whole], master)
        assert torch.equal(served[whole], pushed[name])
        if name in turned:
            assert torch.equal(pushed[name][:32], torch.cat([master[0:32:2], master[1:32:2]]))


# The weights of a checkpoint that are kept in several types.

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("kinds", "written"),
    [((FLOAT32, FLOAT32), FLOAT32), ((BFLOAT16, BFLOAT16), BFLOAT16), ((BFLOAT16, FLOAT32), FLOAT32)],
)
def test_no_bit_is_lost_where_transformers_keeps_some_weights_in_float32(
    tmp_path: Path, kinds: tuple[torch.dtype, torch.dtype], written: torch.dtype
) -> None:
    torch.manual_seed(0)
    masters = {name: torch.randn(5, 3).to(kind) for name, kind in zip("ab", kinds, strict=True)}
    policy: Any = SimpleNamespace(masters=masters)
    save_masters(policy, tmp_path / "new")
    found = load_file(tmp_path / "new" / WEIGHTS_FILE)
    assert found.keys() == masters.keys()
    for name, master in masters.items():
        assert found[name].dtype == written
        assert torch.equal(found[name].to(FLOAT32), master.to(FLOAT32))
