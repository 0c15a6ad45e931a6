"""What vLLM is asked for on a card, and which layers it gives LoRA kernels."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cluster.errors import WrongInput
from examples.random_families import TINY, make_family
from examples.random_model import make_tiny_model
from rollout.engine import EngineDied
from rollout.types import EngineError, Sampling
from rollout.vllm.arguments import engine_arguments, keeps_states, lora_arguments
from tests.model_rows import ROWS
from tests.rollout.data.test_model_files import changed, without
from tests.rollout.engine_case import PROMPT, EngineCase, run, settings


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


@pytest.mark.parametrize(("name", "apart"), [("qwen3_moe", True), ("mixtral", True), ("gpt_oss", False)])
def test_experts_that_are_named_get_lora_kernels_on_a_card(name: str, apart: bool, tmp_path: Path) -> None:
    """apart: whether vLLM has to take the pair of gate and up projection apart."""
    found = lora_arguments(str(make_family(tmp_path, name)), ("q_proj", "experts"))
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]
    assert found == {"lora_target_modules": layers, "enable_mixed_moe_lora_format": apart}


def test_experts_have_no_lora_kernels_on_a_cpu(tmp_path: Path) -> None:
    wanted = settings(tmp_path, lora_targets=("q_proj", "experts"))
    with pytest.raises(ValueError, match="^lora_targets: vLLM has LoRA for experts on CUDA only; leave experts out"):
        engine_arguments(wanted, cuda=False)
    assert engine_arguments(wanted, cuda=True)["lora_target_modules"] == ["q_proj", "experts"]
    merged = dataclasses.replace(wanted, max_lora_rank=0)  # whole weights are pushed
    assert "lora_target_modules" not in engine_arguments(merged, cuda=False)


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


# The engine's start, without an engine.


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
    with pytest.raises(WrongInput, match=f"lacks 1 tensor .*: {name};"):
        VllmEngine(settings(tmp_path))


# Sleep and wake of the real engine, on a CPU: all but the device memory, since vLLM's CPU worker ignores the call.


def test_an_engine_that_cannot_sleep_says_so_at_start() -> None:
    from rollout.vllm.arguments import engine_arguments

    sleeper = settings(Path("m"), sleeps=True)
    with pytest.raises(ValueError, match="sleeps: vLLM sleeps on CUDA only"):
        engine_arguments(sleeper, cuda=False)
    assert engine_arguments(sleeper, cuda=True)["enable_sleep_mode"]
    assert "enable_sleep_mode" not in engine_arguments(settings(Path("m")), cuda=True)


def test_asleep_it_refuses_and_awake_it_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = EngineCase(make_tiny_model(tmp_path, family="Llama"))
    engine, thread = case.engine, case.engine._thread
    sampling = Sampling(n=2, max_tokens=8, seed=3)
    with pytest.raises(EngineError, match="started with sleeps=True"):
        run(engine.sleep())
    policies = thread._turns._policies
    monkeypatch.setattr(policies, "_settings", dataclasses.replace(policies._settings, sleeps=True))

    async def story() -> None:
        for _ in range(2):
            await engine.load_adapter(case.next_adapter())
        call = asyncio.create_task(engine.generate(PROMPT, Sampling(n=16, max_tokens=400, seed=0)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="nothing may be running, got 1"):
            await engine.sleep()
        await call
        before = await engine.generate(PROMPT, sampling)
        for _ in range(2):
            await engine.sleep()
        late = case.next_adapter()
        for refused in (engine.generate(PROMPT, sampling), engine.probe(PROMPT), engine.load_adapter(late)):
            with pytest.raises(EngineError, match="await wake"):
                await refused
        for _ in range(2):
            await engine.wake()
        newest = thread.windows[0].newest
        assert newest is not None
        assert thread._turns.engine.list_loras() == {newest.lora_id}
        assert [resident.version for resident in thread.windows[0].residents] == [1]
        after = await engine.generate(PROMPT, sampling)
        assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(after, before, strict=True))
        for completion in after:
            case.check(completion, PROMPT, 1)
        await engine.load_adapter(late)
        await engine.sleep()
        # Layers that take nothing: the newest is loaded into another slot than it had, which holds an older one.
        (worker,) = thread._turns.engine.collective_rpc(lambda worker: worker)
        for layer in worker.model_runner.lora_manager._adapter_manager.modules.values():
            layer.set_lora = layer.reset_lora = lambda *_, **__: None
        with pytest.raises(EngineDied, match="wake: the tensors of adapter v2 are not those that went to sleep"):
            await engine.wake()

    try:
        run(story())
    finally:
        run(engine.close())
