"""One base for all roles: in 4 bits it is the rounded checkpoint and nothing else; roles never change what trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from cluster.errors import WrongInput
from examples.random_families import make_family
from examples.random_model import make_adapter, make_tiny_model
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.base import load_base, without_weights
from learner.model.policy import Policy
from rollout.engine import EngineSettings
from rollout.vllm.arguments import engine_arguments
from tests.rollout.data.test_model_files import (
    Change,
    changed,
    having,
    renamed,
    without,
)

LORA = LoraConfig(rank=8, alpha=16)
IDS = torch.tensor([[5, 6, 7, 8, 9, 200, 3, 3, 100]])


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Wide enough for its linear layers to be most of it."""
    return str(make_tiny_model(tmp_path_factory.mktemp("wide") / "model", hidden_size=128, initializer_range=0.05))


def make_policy(path: str, *, checkpointing: Any = "none", lora: LoraConfig = LORA, **model: Any) -> Policy:
    return Policy(
        ModelConfig.model_validate({"path": path, "dtype": "float32"} | model),
        lora,
        checkpointing=checkpointing,
        seed=0,
        device=torch.device("cpu"),
    )


def dequantised(path: str) -> Any:
    """The plain model with every linear weight but the head rounded to NF4 and back."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            rounded, state = quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
            module.weight.data = dequantize_4bit(rounded, state)
    return model


@pytest.mark.parametrize("checkpointing", ["none", "full", "mlp"])
def test_a_4_bit_base_is_the_rounded_checkpoint_and_only_lora_learns(wide_path: str, checkpointing: Any) -> None:
    policy = make_policy(wide_path, base="nf4", checkpointing=checkpointing)
    hidden = policy.hidden(IDS)
    with torch.no_grad():
        plain, rounded = (
            model.model(input_ids=IDS).last_hidden_state[0]
            for model in (AutoModelForCausalLM.from_pretrained(wide_path), dequantised(wide_path))
        )
    assert float((hidden.detach() - rounded).abs().max()) < 1e-4  # B is 0, so the fresh adapter changes nothing
    assert float((hidden.detach() - plain).abs().max()) > 1e-2
    torch.autograd.backward(hidden.square().sum())
    trained = {name for name, weight in policy._peft.named_parameters() if weight.grad is not None}
    assert len(trained) == len(policy.masters) == 2 * 7 * 2
    assert all(".lora_" in name for name in trained)


def test_a_4_bit_base_is_small(wide_path: str) -> None:
    def linear_bytes(policy: Policy) -> int:
        return sum(w.nbytes for n, w in policy._peft.named_parameters() if "_proj" in n and n.endswith("layer.weight"))

    four, half = (linear_bytes(make_policy(wide_path, dtype="bfloat16", base=base)) for base in ("nf4", "none"))
    assert 4 * four == half > 0


def test_the_generator_serves_the_same_base() -> None:
    def arguments(base: str, dtype: str = "bfloat16") -> dict[str, Any]:
        settings = EngineSettings(
            model="m", dtype=dtype, max_model_len=64, kv_cache_bytes=1, max_num_seqs=1, max_lora_rank=8,
            adapter_window=2, seed=0, base=base,
        )  # fmt: skip
        return engine_arguments(settings, cuda=True)

    assert "quantization" not in arguments("none")
    assert arguments("nf4")["quantization"] == "bitsandbytes"
    with pytest.raises(ValueError, match="base=nf4 needs dtype bfloat16 or float16"):
        arguments("nf4", "float32")


def written(folder: Path, path: str, *, seed: int, rank: int = 8) -> str:
    folder.mkdir()
    payload, config = make_adapter(Path(path), seed=seed, rank=rank)
    (folder / "adapter_model.safetensors").write_bytes(payload)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def trained(policy: Policy) -> set[str]:
    return {name for name, weight in policy._peft.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("base", ["none", "nf4"])
def test_any_adapter_is_the_reference_and_roles_share_one_base(tiny_path: str, tmp_path: Path, base: str) -> None:
    start, anchor = (written(tmp_path / f"a{i}", tiny_path, seed=i, rank=8 + 8 * i) for i in range(2))
    policy = make_policy(tiny_path, adapter=start, reference=anchor, base=base)
    before = trained(policy)
    assert not any("reference" in name for name in before)
    storages = {w.untyped_storage().data_ptr() for n, w in policy._peft.named_parameters() if "lora_" not in n}
    alone = make_policy(tiny_path, base=base)
    assert len(storages) == len({w.untyped_storage().data_ptr() for w in alone._lm.parameters() if not w.requires_grad})

    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        seen["policy"] = policy.hidden(IDS)
        with policy.acting_as("reference"):
            seen["reference"] = policy.hidden(IDS)
            assert trained(policy) <= before
        assert torch.equal(policy.hidden(IDS), seen["policy"])
    assert float((seen["policy"] - seen["reference"]).abs().max()) > 0.01
    small, large = LoraConfig(rank=8, alpha=16), LoraConfig(rank=16, alpha=32)
    for role, folder, lora in (("policy", start, small), ("reference", anchor, large)):
        alone = make_policy(tiny_path, adapter=folder, lora=lora, base=base)
        assert float((alone.hidden(IDS) - seen[role]).detach().abs().max()) < 1e-5, role
    assert trained(policy) == before
    with pytest.raises(RuntimeError, match="inside"), policy.acting_as("reference"):
        raise RuntimeError("inside")
    assert trained(policy) == before
    assert torch.equal(policy.hidden(IDS), seen["policy"])


def test_a_reference_that_is_no_lora_adapter(tiny_path: str, tmp_path: Path) -> None:
    folder = Path(written(tmp_path / "a", tiny_path, seed=1))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "IA3"}))
    with pytest.raises(ValueError, match="adapter 'reference': peft_type of .* must be 'LORA', got 'IA3'"):
        make_policy(tiny_path, reference=str(folder))


def test_a_4_bit_base_without_weights_leaves_a_process_in_which_one_with_weights_loads(tiny_path: str) -> None:
    """bitsandbytes keeps a table for the process, which is made on whatever device is in force."""
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    without_weights(AutoConfig.from_pretrained(tiny_path), torch.float32, quantization)
    assert not [name for name, table in functional.name2qmap.items() if table.is_meta]


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("base", ["none", "nf4"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(UP), f"lacks 1 tensor .*random: {UP};"),
        (renamed(UP, UP.replace("1", "7")), f"lacks 1 tensor .*: {UP};.*\n.*no place for: model.layers.7.mlp.up_proj"),
        (having(model__layers__1__mlp__up_proj__weight=torch.ones(3, 3)), f"1 tensor of .* first {UP}: must be"),
        (
            having(model__norm__weight=torch.full((64,), torch.nan)),
            r"not finite \(nan or inf\) in 1 tensor: model.norm.w",
        ),
        (having(lm_head__weight=torch.ones(260, 64)), "the files hold two different ones"),
    ],
)
def test_what_transformers_makes_up_or_leaves_out_is_refused_as_it_is_loaded(
    base: Any, change: Change, message: str, tmp_path: Path
) -> None:
    """On a node that reads other files than the driver's checks did."""
    path = str(changed(make_tiny_model(tmp_path), change))
    with pytest.raises(WrongInput, match=f"^model.reference: .*{message}"):
        load_base(
            ModelConfig(path=path, dtype="float32", base=base), torch.device("cpu"), lora=True, key="model.reference"
        )


def test_an_expert_that_is_lost_is_named_though_transformers_says_no_name(tmp_path: Path) -> None:
    lost = "model.layers.0.mlp.experts.1.down_proj.weight"
    path = str(changed(make_family(tmp_path, "qwen3_moe"), without(lost)))
    with pytest.raises(WrongInput, match=f"lacks 1 tensor .*: {lost};"):
        load_base(ModelConfig(path=path, dtype="float32"), torch.device("cpu"), lora=True)


@pytest.mark.parametrize("key", ["adapter", "reference"])
def test_an_adapter_that_peft_would_fill_up_or_that_holds_no_numbers_is_refused(key: str, tmp_path: Path) -> None:
    path = str(make_tiny_model(tmp_path / "model"))
    folder = tmp_path / "adapter"
    folder.mkdir()
    weights, content = make_adapter(Path(path), seed=0)
    (folder / "adapter_config.json").write_text(json.dumps(content))
    file = folder / "adapter_model.safetensors"
    for change, message in (
        (lambda tensors: without(min(tensors))(tensors), "must have the names and shapes of"),
        (
            lambda tensors: tensors.update({min(tensors): tensors[min(tensors)] / 0}),
            "not finite .* in 1 tensor: base_model",
        ),
    ):
        tensors = load(weights)
        change(tensors)
        save_file(tensors, file)
        with pytest.raises(ValueError, match=message):
            make_policy(path, **{key: str(folder)}, lora=LoraConfig(rank=8, alpha=16))


@pytest.mark.parametrize("wanted", ["flash_attention_2", "flash_attention_3"])
def test_attention_that_is_not_installed_is_not_taken_from_the_config(tmp_path: Path, wanted: str) -> None:
    folder = make_tiny_model(tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_implementation": wanted}))
    for device in ("cpu", "meta"):
        model = ModelConfig(path=str(folder), dtype="float32")
        assert load_base(model, torch.device(device), lora=True).config._attn_implementation == "sdpa"
