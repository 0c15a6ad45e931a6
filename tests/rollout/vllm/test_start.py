"""The engine's start, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.random_families import make_family
from examples.random_model import make_tiny_model
from rollout.data.weight_files import WeightsError
from tests.rollout.data.test_weight_names import changed, without


def test_a_known_model_is_not_inspected_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry

    from rollout.vllm.arguments import know_model

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
    assert wrong_with({"model": model, "learner": {"mode": "lora", "push": "adapter"}}) == []


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
