"""kv_cache_dtype fp8 on the real vLLM. Last of the folder's engines, see conftest.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from examples.random_model import make_tiny_model
from rollout.delivery import TOLERANCE, difference
from rollout.types import Sampling
from tests.rollout import engine_case
from tests.rollout.engine_case import PROMPT, EngineCase, run

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vLLM's fp8 cache on a CPU needs AVX-512"
)


def test_the_cache_holds_more_and_what_is_said_is_what_was_sampled_from(tmp_path: Path) -> None:
    own = EngineCase(make_tiny_model(tmp_path, family="Llama"), kv_cache_dtype="fp8", kv_cache_bytes=4 << 20)
    vllm = own.engine._thread._turns.engine.vllm_config
    model, cache = vllm.model_config.hf_config, vllm.cache_config
    token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim  # bytes: one a number, not four
    assert cache.num_gpu_blocks == (4 << 20) // (token * cache.block_size)
    run(_check(own))
    run(own.engine.close())


async def _check(own: EngineCase) -> None:
    await own.push()
    completions = await own.engine.generate(PROMPT, Sampling(n=4, max_tokens=64, seed=0))
    for completion in completions:
        ids = PROMPT + completion.token_ids.tolist()
        exact, said = own.logprobs(own.newest, ids), await own.engine.probe(ids)
        off = np.abs(said - exact).max()
        assert off > 10 * engine_case.TOLERANCE  # it is in force
        assert difference(said, exact, "fp8") < TOLERANCE["fp8"]  # and within what a push is allowed
        # Decoded token by token or read at once: the same cache.
        assert np.abs(completion.logprobs - said[len(PROMPT) - 1 :]).max() < off
