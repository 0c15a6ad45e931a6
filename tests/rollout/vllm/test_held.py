"""What vLLM computes with, read back: bit for bit what was sent, and not what was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from examples.random_model import make_adapter, make_tiny_model
from rollout.types import Adapter, Held, Weights
from rollout.weights import (
    COLUMNS,
    digest_of_tensor,
    digests_of,
    read_of,
)
from tests.rollout.engine_case import EngineCase, run


def of_adapter(adapter: Adapter, dtype: torch.dtype) -> dict[str, str]:
    """A as it is and B times alpha / r, in the engine's type."""
    factor = adapter.config["lora_alpha"] / adapter.config["r"]
    sent = {name: tensor.to(dtype) for name, tensor in load(bytes(adapter.payload)).items()}
    return {name: digest_of_tensor(t * factor if ".lora_B." in name else t) for name, t in sent.items()}


def manager(case: EngineCase) -> Any:
    """vLLM's own, of adapters and their slots."""
    return worker_of(case).model_runner.lora_manager._adapter_manager


def worker_of(case: EngineCase) -> Any:
    (worker,) = case.engine._thread._turns.engine.collective_rpc(lambda worker: worker)
    return worker


def has_copy_of_head(case: EngineCase) -> bool:
    """Whether the output embedding is computed with a repacked copy: on a CPU without AVX-512 not in bfloat16."""
    head = worker_of(case).model_runner.get_model().lm_head
    ones = torch.ones(1, head.weight.shape[1], dtype=head.weight.dtype)
    return bool(head.cpu_linear(ones, torch.zeros_like(head.weight), None).any())


def of_weights(weights: Weights) -> dict[str, str]:
    tensors = load(bytes(weights.payload))
    return digests_of((name, read_of(tensor, weights.version, tensor.dtype)) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("dtype", "family", "targets", "changes"),
    [
        ("float32", "Llama", "all-linear", {}),
        (
            "bfloat16",
            "Qwen2",
            ["q_proj", "v_proj", "up_proj"],
            {"max_lora_rank": 16, "in_flight": "continue", "adapter_window": 1},
        ),
    ],
)
def test_an_adapter_is_in_the_slots_of_the_kernels(
    tmp_path: Path, dtype: str, family: str, targets: Any, changes: dict[str, Any]
) -> None:
    case = EngineCase(make_tiny_model(tmp_path, family=family), targets=targets, dtype=dtype, **changes)
    try:
        for version in range(5):  # more than there are slots
            run(case.push())
            held = run(case.engine.held())
            assert held.tensors == of_adapter(case.adapters[version], getattr(torch, dtype))
            assert held.unread == ()
        loras = manager(case)
        newest = case.engine._thread.window.newest
        assert newest is not None
        slot = loras.lora_index_to_id.index(newest.lora_id)
        loras.modules["model.layers.1.self_attn.qkv_proj"].lora_b_stacked[2][slot, 0, 0, 0] += 1
        changed = [name for name, digest in run(case.engine.held()).tensors.items() if held.tensors[name] != digest]
        assert changed == ["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    finally:
        run(case.engine.close())


def test_a_factor_that_is_rounded_and_a_slot_that_is_not_clean(tmp_path: Path) -> None:
    payload, config = make_adapter(make_tiny_model(tmp_path), seed=0, rank=8)
    payload = save({name: tensor.bfloat16() for name, tensor in load(payload).items()})  # as a learner sends it
    case = EngineCase(tmp_path, dtype="bfloat16", max_lora_rank=16)
    adapter = Adapter.build(0, payload, config | {"lora_alpha": 11})
    try:
        assert run(case.engine.load_adapter(adapter)) == adapter.digest
        assert run(case.engine.held()).tensors == of_adapter(adapter, torch.bfloat16)
        layer = manager(case).modules["model.layers.1.mlp.down_proj"]
        layer.lora_a_stacked[0][0, 0, 9], layer.lora_b_stacked[0][0, 0, :, 9] = 1, 1
        extra = run(case.engine.held()).tensors.keys() - of_adapter(adapter, torch.bfloat16).keys()
        assert extra == {"model.layers.1.mlp.down_proj beyond what was sent"}
    finally:
        run(case.engine.close())


@pytest.mark.parametrize(
    ("tied", "family", "dtype"),
    [(True, "Qwen2", "bfloat16"), (True, "Qwen2", "float32"), (False, "Llama", "float32")],
)
def test_whole_weights_are_read_from_what_the_kernels_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, family: str, dtype: str
) -> None:
    models = [
        make_tiny_model(tmp_path / str(seed), seed=seed, tied=tied, family=family, hidden_size=2 * COLUMNS)
        for seed in (0, 1)
    ]
    case = EngineCase(models[0], dtype=dtype, max_lora_rank=0)

    def weights_of(version: int) -> Weights:
        from rollout.weights import Source, pack

        tensors = load((models[version % 2] / "model.safetensors").read_bytes())
        sources = {name: Source.of(tensor) for name, tensor in tensors.items()}
        return Weights.build(version, pack(sources, getattr(torch, dtype)))

    try:
        for version in range(3):
            weights = weights_of(version)
            run(case.engine.load_weights(weights))
            assert run(case.engine.held()) == Held(of_weights(weights))
        # What reload_weights alone does on a CPU where the output embedding is tied: the repacked copy stays the old.
        stays = tied and has_copy_of_head(case)
        assert stays or not tied or dtype == "bfloat16"
        monkeypatch.setattr("rollout.vllm.policies._EMBEDDINGS", ())
        run(case.engine.load_weights(weights_of(3)))
        found, expected = run(case.engine.held()).tensors.items(), of_weights(weights_of(3)).items()
        assert {name for name, _ in found ^ expected} == ({"lm_head.weight"} if stays else set())
    finally:
        run(case.engine.close())
