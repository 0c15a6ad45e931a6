"""What vLLM computes with, read back: bit for bit what was sent, and not what was not. One model over two processes:
what it holds, samples and scores is what one process does.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load, save

from examples.random_model import make_adapter, make_tiny_model
from rollout.engine import EngineDied
from rollout.types import Adapter, EngineError, Held, Sampling, Weights
from rollout.vllm.read_back import agreed
from rollout.weights import (
    COLUMNS,
    WeightsFile,
    WeightsReader,
    digest_of_tensor,
    digests_of,
    read_of,
)
from tests.rollout.engine_case import PROMPT, TOLERANCE, EngineCase, run
from tests.rollout.vllm.test_engine import logprobs, weights_of


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
        newest = case.engine._thread.windows[0].newest
        assert newest is not None
        slot = loras.lora_index_to_id.index(newest.lora_id)
        loras.modules["model.layers.1.self_attn.qkv_proj"].lora_b_stacked[2][slot, 0, 0, 0] += 1
        changed = [name for name, digest in run(case.engine.held()).tensors.items() if held.tensors[name] != digest]
        assert changed == ["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    finally:
        run(case.engine.close())


def test_an_adapter_of_layers_without_kernels_is_refused(tmp_path: Path) -> None:
    """vLLM itself would load it, and leave those layers out."""
    model = make_tiny_model(tmp_path / "m", family="Llama")
    case = EngineCase(model, targets=["q_proj", "o_proj"], lora_targets=("q_proj",))
    with pytest.raises(EngineError, match=r"^adapter v0: vLLM has no place for 4 of its tensors, first .*o_proj.*;"):
        run(case.push())
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
    [
        (True, "Qwen2", "bfloat16"),
        pytest.param(True, "Qwen2", "float32", marks=pytest.mark.long),
        (False, "Llama", "float32"),
    ],
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


# One model over two processes: what it holds, samples and scores is what one process does.

SAME = Sampling(n=2, max_tokens=60, seed=7)
LAYER = "model.layers.1.mlp.down_proj"  # split by its inputs: of an adapter A is split, and B whole in both


def change(worker: Any, rank: int, name: str) -> None:
    """Runs in vLLM's workers: one weight of an adapter's slots in one of them."""
    layer = worker.model_runner.lora_manager._adapter_manager.modules[LAYER]
    if layer.tp_rank == rank:
        getattr(layer, name)[0][:, 0, 0, 0] += 1


def shards() -> list[psutil.Process]:
    """Those of this process that compute."""
    children = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "VLLM::Worker" in " ".join(child.cmdline())]


def alone_sampled(model: Path, versions: int) -> list[list[int]]:
    """What one process samples from the last of these versions. It ends before another engine starts: vLLM keeps its
    process groups by process, and two engines of one process that end at a time destroy the same ones."""
    case = EngineCase(model)
    try:
        for _ in range(versions):
            run(case.push())
        return [c.token_ids.tolist() for c in run(case.engine.generate(PROMPT, SAME))]
    finally:
        run(case.engine.close())


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_processes_are_one_model_and_one_that_dies_ends_both(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, family="Llama", kv_heads=2)
    of_one = alone_sampled(model, versions=4)
    case = EngineCase(model, shards=2)
    try:
        assert len(shards()) == 2
        for pid in (os.getpid(), *(shard.pid for shard in shards())):
            named = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]
            assert [line for line in named if not line.endswith("(deleted)") and "sem.mp-" not in line] == []
        for version in range(4):  # more than there are slots
            run(case.push())
            held = run(case.engine.held())
            assert held.tensors == of_adapter(case.adapters[version], torch.float32)
            assert held.unread == ()
        ids = [*PROMPT, 3, 5, 7]
        assert np.abs(run(case.engine.probe(ids)) - case.logprobs(3, ids)).max() < TOLERANCE
        for completion in run(case.engine.generate(PROMPT, Sampling(n=4, max_tokens=40, seed=0))):
            case.check(completion, PROMPT, 3)
        assert [c.token_ids.tolist() for c in run(case.engine.generate(PROMPT, SAME))] == of_one
        for rank, stack, wrong in ((1, "lora_a_stacked", "lora_A"), (1, "lora_b_stacked", "lora_B")):
            case.engine._thread._turns.engine.collective_rpc(change, args=(rank, stack))
            found = run(case.engine.held()).tensors
            assert f"base_model.model.{LAYER}.{wrong}.weight" in {k for k, v in found.items() if held.tensors[k] != v}
        os.kill(shards()[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"the end of one of its 2 processes .*; restart its worker"):
            run(case.engine.probe(ids))
    finally:
        run(case.engine.close())
    assert shards() == []


def forget_last_row(worker: Any, rank: int, path: str) -> None:
    """Runs in vLLM's workers: one row of a layer's weight becomes zero in one of them, as its kernel has it."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    module = worker.model_runner.get_model().get_submodule(path)
    if worker.rank == rank:
        weight = module.cpu_linear(torch.eye(module.input_size), module.weight, None).T.contiguous()
        weight[-1] = 0
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(module, remove_weight=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("family", "tied", "last"),
    [("Qwen2", True, "v_proj"), ("Phi3", False, "qkv_proj")],  # the second fused
)
@pytest.mark.long
def test_whole_weights_reach_both_processes(tmp_path: Path, family: str, tied: bool, last: str) -> None:
    models = [make_tiny_model(tmp_path / str(seed), family=family, tied=tied, kv_heads=2, seed=seed) for seed in (0, 1)]
    case, ids = EngineCase(models[0], shards=2, max_lora_rank=0), [*PROMPT, 3, 5, 7]
    file, reader = WeightsFile(), WeightsReader()
    try:
        for version, model in ((1, models[1]), (2, models[0]), (3, models[1]), (4, models[0])):
            weights = weights_of(model, version)
            if version > 2:  # in the learner's memory
                assert run(reader.load(file.copy(weights), case.engine.load_weights)) == weights.digest
            else:
                assert run(case.engine.load_weights(weights)) == weights.digest
            held = run(case.engine.held())
            assert held == Held(of_weights(weights))
            assert np.abs(run(case.engine.probe(ids)) - logprobs(model, ids)).max() < TOLERANCE
        fused = "model.layers.1.self_attn.qkv_proj"
        case.engine._thread._turns.engine.collective_rpc(forget_last_row, args=(1, fused))
        found = run(case.engine.held()).tensors
        assert {k for k, v in found.items() if held.tensors[k] != v} == {f"model.layers.1.self_attn.{last}.weight"}
    finally:
        run(case.engine.close())


def test_what_shards_do_not_agree_on_is_nobodys_digest() -> None:
    one, other = Held({"a": "1", "b": "2"}, ("c",)), Held({"a": "1", "b": "3", "d": "4"}, ("c",))
    apart = "differs between shards"
    assert agreed([one, other]) == Held({"a": "1", "b": apart, "d": apart}, ("c",))
    assert agreed([one]) == one
