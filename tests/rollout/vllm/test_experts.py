"""Numbers of a packed matrix are found where vLLM's kernel put them, and the experts of each token are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.random_families import make_family
from learner.model.export import update_of
from rollout.engine import EngineSettings
from rollout.types import Adapter, Sampling
from tests.learner.model.test_experts import chosen_in
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
