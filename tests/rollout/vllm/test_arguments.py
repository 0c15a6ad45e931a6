"""What vLLM is asked for on a card, and which layers it gives LoRA kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from examples.random_families import TINY, make_family
from rollout.vllm.arguments import engine_arguments, keeps_states, lora_arguments
from tests.model_rows import ROWS
from tests.rollout.engine_case import settings


def test_on_a_card_the_logits_are_float32_as_the_learner_s() -> None:
    assert engine_arguments(settings(Path("m")), cuda=True)["hf_overrides"] == {"head_dtype": "float32"}
    assert "hf_overrides" not in engine_arguments(settings(Path("m")), cuda=False)


@pytest.mark.parametrize(
    ("name", "targets", "layers"),
    [
        ("gemma2", (), ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        ("phi3", (), ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]),
        ("gemma2", ("q_proj", "v_proj"), ["q_proj", "v_proj"]),
        ("qwen3_moe", (), ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ],
)
def test_only_layers_that_an_adapter_changes_get_lora_kernels(
    tmp_path: Path, name: str, targets: tuple[str, ...], layers: list[str]
) -> None:
    assert lora_arguments(str(make_family(tmp_path, name)), targets) == {"lora_target_modules": layers}


@pytest.mark.parametrize(
    ("kind", "keeps"),
    [("nemotron_h", True), ("jamba", True), ("olmo_hybrid", True), ("gemma2", False), ("olmo", False)],
)
def test_layers_that_keep_a_state_are_known_before_the_engine(tmp_path: Path, kind: str, keeps: bool) -> None:
    """By the config.json alone. vLLM on a CPU shares no prompts of such models, or would not start."""
    config = AutoConfig.for_model(kind, **TINY | ROWS[kind])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.save_pretrained(tmp_path)
    assert keeps_states(str(tmp_path)) is keeps


@pytest.mark.parametrize("wanted", ["flash_attention_2", "flash_attention_3"])
def test_attention_that_is_not_installed_hides_no_layers(tmp_path: Path, wanted: str) -> None:
    file = make_family(tmp_path, "gemma2") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_implementation": wanted}))
    assert len(lora_arguments(str(tmp_path), ())["lora_target_modules"]) == 7
