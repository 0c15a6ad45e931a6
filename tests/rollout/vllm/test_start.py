"""The engine's start, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from examples.random_families import TINY, make_family
from examples.random_model import make_tiny_model
from rollout.data.weight_files import WeightsError
from tests.model_rows import ROWS
from tests.rollout.data.test_weight_names import changed, without


def test_a_known_model_is_not_inspected_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry

    from rollout.vllm.startup import know_model

    def fail(*_: object) -> None:
        raise AssertionError("a process was started")

    model = make_tiny_model(tmp_path / "model", family="Llama")
    name = "LlamaForCausalLM"
    lazy = registry._LazyRegisteredModel("vllm.model_executor.models.llama", name)
    monkeypatch.setitem(ModelRegistry.models, name, lazy)
    monkeypatch.setattr(registry, "_run_in_subprocess", fail)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    with pytest.raises(AssertionError, match="a process was started"):
        ModelRegistry.models[name].inspect_model_cls()
    know_model(str(model))
    assert ModelRegistry.models[name].inspect_model_cls().is_text_generation_model


def test_a_model_that_its_registry_has_is_not_refused_before_the_start(tmp_path: Path) -> None:
    """What it has not: tests/learner/driver/test_dry_run.py."""
    pytest.importorskip("vllm")
    from rollout.vllm.trial import wrong_with

    model = {"path": str(make_tiny_model(tmp_path)), "revision": None, "base": "none"}
    given = {"model": model, "learner": {"mode": "lora", "push": "adapter"}, "cluster": {"gpus": {"generator": 0.0}}}
    assert wrong_with(given) == []


@pytest.mark.parametrize(("kind", "on_cpu"), [("jamba", False), ("olmo_hybrid", False), ("nemotron_h", True)])
def test_layers_that_vllm_computes_on_cards_alone_are_refused_on_a_cpu(tmp_path: Path, kind: str, on_cpu: bool) -> None:
    pytest.importorskip("vllm")
    from rollout.vllm.trial import wrong_with

    config = AutoConfig.for_model(kind, **TINY | ROWS[kind])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.save_pretrained(tmp_path)
    model = {"path": str(tmp_path), "revision": None, "base": "none"}
    for mode in ("lora", "full"):
        given = {"model": model, "learner": {"mode": mode, "push": "adapter"}}
        wrong = wrong_with(given | {"cluster": {"gpus": {"generator": 0.0}}})
        assert [line for line in wrong if "generators on a CPU compute those of Mamba-2 alone" not in line] == []
        assert (wrong == []) == on_cpu
        assert wrong_with(given | {"cluster": {"gpus": {"generator": 1.0}}}) == []


@pytest.mark.parametrize(("family", "lost"), [("granite", "gate_proj"), ("phi3", "qkv_proj"), (None, "up_proj")])
def test_an_engine_does_not_make_up_what_the_files_lack(family: str | None, lost: str, tmp_path: Path) -> None:
    """vLLM itself sees no half of a fused matrix missing. Without an engine: it is told before one is built."""
    pytest.importorskip("vllm")
    from rollout.vllm.engine import VllmEngine
    from tests.rollout.engine_case import settings

    if family is None:
        make_tiny_model(tmp_path)
    else:
        make_family(tmp_path, family)
    name = f"model.layers.1.{'self_attn' if 'qkv' in lost else 'mlp'}.{lost}.weight"
    changed(tmp_path, without(name))
    with pytest.raises(WeightsError, match=f"lacks 1 tensor .*: {name};"):
        VllmEngine(settings(tmp_path))
