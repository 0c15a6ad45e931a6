"""Numbers of a packed matrix are found where vLLM's kernel put them, and the experts of each token are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples.random_families import make_family
from learner.model.export import update_of
from rollout.engine import EngineSettings
from rollout.types import Adapter, Sampling
from rollout.vllm.read_back import _keys_by_module, _slots
from rollout.weights import header_of
from tests.learner.model.test_experts import chosen_in, policy_of, saved
from tests.learner.model.test_packing_check import random_adapter
from tests.learner.model.test_policy import make_policy

pytest.importorskip("vllm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (2 * 1024, 192)])
def test_places_are_those_of_the_kernels_packing(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of each of several experts, whatever their numbers are; the second matrix has more than 2^16 numbers."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    from rollout.vllm.experts import _places

    weights = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = cpu_prepack_moe_weight(weights, "vec")
    assert not torch.equal(packed, weights)
    places = _places(*shape, dtype, "vec").long()
    for one, own in zip(packed, weights, strict=True):
        assert torch.equal(one.flatten()[places].view(shape), own)


@pytest.mark.parametrize(
    "name",
    ["mixtral", *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen3_moe", "gpt_oss", "qwen3_next"))],
)
def test_an_adapter_of_experts_has_vllms_names(name: str, tmp_path: Path) -> None:
    from vllm.model_executor.layers.fused_moe import MoERunner

    from rollout.vllm.engine import VllmEngine
    from tests.rollout.engine_case import run, settings

    policy = policy_of(saved(name, tmp_path / "model"))
    update = update_of(policy, 0)
    assert isinstance(update, Adapter)
    engine = VllmEngine(settings(tmp_path / "model", max_lora_rank=0))

    def named(worker: Any) -> tuple[set[str], set[str]]:
        model = worker.model_runner.get_model()
        there = {name for name, module in model.named_modules() if isinstance(module, MoERunner)}
        sent = _keys_by_module(model, frozenset(header_of(update.payload)[0]))
        return there, {module for module in sent if ".experts" in module}

    ((there, sent),) = engine._thread._turns.engine.collective_rpc(named)
    run(engine.close())
    assert sent == there | {f"{module}.base_layer" for module in there}
    assert len(there) == policy.config.num_hidden_layers


E, R, HIDDEN, INNER = 3, 2, 8, 6


def slots_on_a_card(as_one: bool, sent: dict[str, torch.Tensor]) -> Any:
    """vLLM's LoRA layer of a layer's experts with the pairs in slot 1. Its kernel, which a CPU lacks, is left out;
    what takes the pairs apart and fills the slots is vLLM's own."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager

    kind = FusedMoE3DWithLoRA if as_one else FusedMoEWithLoRA
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    parallel = SimpleNamespace(use_ep=False, ep_rank=0)
    layer.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN, num_local_experts=E, num_experts=E, moe_parallel_config=parallel,
        intermediate_size_per_partition=INNER,
    )  # fmt: skip
    layer.tp_size, layer.tp_rank, layer.device, layer._w13_slices = 1, 0, torch.device("cpu"), 1 if as_one else 2
    layer.enable_moe_shared_loras = False
    layer.create_lora_weights(2, LoRAConfig(max_lora_rank=8, max_loras=2, lora_dtype=torch.float32), GPT_OSS)
    pairs = {
        name: LoRALayerWeights(name, R, 2 * R, sent[f"{name}.lora_A"], sent[f"{name}.lora_B"].clone())
        for name in ("experts.base_layer", "experts")
    }
    for pair in pairs.values():
        pair.optimize()  # as on loading: alpha / r goes into B
    manager = SimpleNamespace(
        _get_lora_layer_weights=lambda model, name: model.get(name), _is_3d_moe_model=as_one,
        model=SimpleNamespace(config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])),
    )  # fmt: skip
    filled: Any = LoRAModelManager._stack_moe_lora_weights if as_one else LoRAModelManager._convert_3d_to_2d_moe_lora
    model = _Pairs(pairs)
    filled(manager, model, layer, "experts")
    layer.set_lora(1, pairs["experts"].lora_a, pairs["experts"].lora_b)
    return layer


GPT_OSS: Any = SimpleNamespace(architectures=["GptOssForCausalLM"])


class _Pairs(dict[str, Any]):
    """Pairs by name, as vLLM's LoRAModel has them."""

    @property
    def loras(self) -> dict[str, Any]:
        return self


@pytest.mark.parametrize("as_one", [False, True])
def test_an_adapter_of_experts_is_read_back_from_the_slots_of_a_card(as_one: bool) -> None:
    """And they hold what PEFT adds to each expert's matrix, alpha / r = 2 times B_e A_e."""
    random = torch.Generator().manual_seed(3)
    shapes = {
        "experts.base_layer.lora_A": (E * R, HIDDEN), "experts.base_layer.lora_B": (2 * INNER, R * E),
        "experts.lora_A": (E * R, INNER), "experts.lora_B": (HIDDEN, R * E),
    }  # fmt: skip
    sent = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    layer = slots_on_a_card(as_one, sent)

    keys = {name: {True: f"{name}.lora_A", False: f"{name}.lora_B"} for name in ("experts.base_layer", "experts")}
    manager = SimpleNamespace(modules={"experts": layer}, packed_modules={"experts": ["experts.0.gate_proj"]})
    found = dict(_slots(manager, 1, keys, R))
    assert found.keys() == sent.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, sent[name] * (2 if name.endswith("B") else 1)), name
    for e in range(E):
        a, b = sent["experts.base_layer.lora_A"].view(E, R, HIDDEN)[e], sent["experts.base_layer.lora_B"][:, e::E]
        rows = torch.cat([stack[1, e] for stack in layer.w13_lora_b_stacked])
        assert torch.allclose(rows @ layer.w13_lora_a_stacked[-1][1, e], 2 * b @ a, atol=1e-5)

    layer.adapter_enabled[1] = 0  # then vLLM's kernel passes over the slot
    assert "experts beyond what was sent" in dict(_slots(manager, 1, keys, R))
    layer.adapter_enabled[1] = 1
    layer.w2_lora_b_stacked[0][1, 2, 0, R] = 1.0  # a column beyond the rank
    assert "experts beyond what was sent" in dict(_slots(manager, 1, keys, R))
    layer.w2_lora_b_stacked[0][1, 2, 0, R] = 0.0
    layer.w13_lora_a_stacked[-1][1, 0, 0, 0] += 1.0
    wrong = dict(_slots(manager, 1, keys, R))
    assert as_one != ("experts beyond what was sent" in wrong)  # the second copy of A is not the first
    assert as_one != torch.equal(wrong["experts.base_layer.lora_A"], sent["experts.base_layer.lora_A"])
    assert set(dict(_slots(manager, 1, {}, R))) == {"experts beyond what was sent"}  # an adapter of other layers


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_completions_tell_the_experts_of_all_their_tokens(name: str, tmp_path: Path) -> None:
    """Also of a prompt that another completion has computed, and of one that another request has. gpt-oss has layers
    with windows, whose groups of the KV cache forget tokens."""
    from rollout.vllm.engine import VllmEngine
    from tests.rollout.engine_case import run, settings

    policy = make_policy(str(make_family(tmp_path, name)))
    random_adapter(policy)
    update = update_of(policy, 0)
    assert isinstance(update, Adapter)
    engine = VllmEngine(settings(tmp_path, dtype="float32", records_experts=True))
    run(engine.load_adapter(update))
    prompt = list(range(40, 90))
    found = run(engine.generate(prompt, Sampling(n=4, max_tokens=40, seed=1)))
    found += run(engine.generate([*prompt, 7], Sampling(n=1, max_tokens=20, seed=9)))
    run(engine.close())
    chosen, differing, count = chosen_in(policy), 0, 0
    for own, asked in zip(found, [prompt] * 4 + [[*prompt, 7]], strict=True):
        ids = torch.tensor([[*asked, *own.token_ids.tolist()]])[:, :-1]
        with torch.no_grad():
            policy.hidden(ids)
        assert own.experts is not None
        assert own.experts.shape[:2] == (ids.shape[1], len(chosen))
        for layer, there in chosen.items():
            here = np.sort(own.experts[:, layer], -1)
            differing += int((here != np.sort(there.numpy(), -1)).any(-1).sum())
            count += len(here)
    assert count > 400
    assert differing <= count // 200  # where two experts suit a token alike


@pytest.mark.long
def test_a_request_that_is_preempted_tells_each_token_once(tmp_path: Path) -> None:
    """A KV cache for a few of the sequences: others give theirs up and are computed again."""
    from rollout.vllm.engine import VllmEngine
    from tests.rollout.engine_case import run, settings

    policy = make_policy(str(make_family(tmp_path, "qwen3_moe")))
    update = update_of(policy, 0)
    assert isinstance(update, Adapter)
    engine = VllmEngine(
        settings(tmp_path, dtype="float32", records_experts=True, kv_cache_bytes=150 << 10, max_model_len=128)
    )
    scheduler = engine._thread._turns.engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, list[str]()

    def noted(request: Any, *more: Any, **others: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *more, **others)

    scheduler._preempt_request = noted
    run(engine.load_adapter(update))
    found = run(engine.generate(list(range(40, 60)), Sampling(n=8, max_tokens=100, seed=1)))
    run(engine.close())
    assert preempted
    for one in found:
        assert one.experts is not None
        assert len(one.experts) == 20 + len(one.token_ids) - 1


@pytest.mark.parametrize("more", [{"shards": 2}, {"form": "{}", "truncates": True}])
def test_experts_are_recorded_on_one_device_without_a_form(more: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "model": "m", "dtype": "float32", "max_model_len": 8, "kv_cache_bytes": 1, "max_num_seqs": 1,
        "max_lora_rank": 0, "adapter_window": 2, "seed": 0, "records_experts": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="records_experts needs one shard and no form"):
        EngineSettings(**given | more)
