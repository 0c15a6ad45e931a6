"""A model with experts, one with fused layers, one with linear attention and the text part of a checkpoint with towers,
in the learner and on the real vLLM (all families: benchmarks.learner.model_families, tests/families). Among the last of
the folder's engines, see conftest.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.random_families import make_family
from examples.random_towers import CHECKPOINTS, make_checkpoint
from learner.model.export import update_of
from learner.model.logprob import token_logprobs
from learner.trainer.trainer import held_of
from rollout.types import Adapter, Sampling
from rollout.vllm.engine import VllmEngine
from tests.learner.model.test_export import adapted
from tests.learner.model.test_packing_check import random_adapter
from tests.learner.model.test_policy import make_policy
from tests.rollout.engine_case import PROMPT, run, settings

TOLERANCE = 1e-4  # nats; measured 2e-6
ATTENTION = {"qkv_proj", "o_proj"}
LAYERS = {  # as vLLM fuses them
    "qwen3_moe": ATTENTION,
    "qwen3_next": ATTENTION,
    "glm4": {*ATTENTION, "gate_up_proj", "down_proj"},
    "gemma4_dense": {*ATTENTION, "gate_up_proj", "down_proj"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_sampler_and_learner_are_one_policy(name: str, tmp_path: Path) -> None:
    if name in CHECKPOINTS:
        policy = make_policy(str(make_checkpoint(tmp_path / "model", name)))
        random_adapter(policy)
    else:
        policy = adapted(name, tmp_path / "model")
    update = update_of(policy, 0)
    assert isinstance(update, Adapter)
    engine = VllmEngine(settings(tmp_path / "model"))
    assert run(engine.load_adapter(update)) == update.digest
    (wrapped,) = engine._thread._turns.engine.collective_rpc(
        lambda worker: list(worker.model_runner.lora_manager._adapter_manager.modules)
    )
    assert {module.rpartition(".")[2] for module in wrapped} == LAYERS[name]  # no embedding, no head
    assert run(engine.held()) == held_of(policy, 0, merged=False)
    for completion in run(engine.generate(PROMPT, Sampling(n=2, max_tokens=24, seed=0))):
        ids = torch.tensor(PROMPT + completion.token_ids.tolist())
        with torch.no_grad():
            states = policy.hidden(ids[None, :-1])
            with policy.acting_as("reference"):
                bare = policy.hidden(ids[None, :-1])
        own, base = (token_logprobs(s, policy.head, ids[1:], 1.0, logits=policy.logits) for s in (states, bare))
        sampled = torch.from_numpy(completion.logprobs)
        assert float((own[len(PROMPT) - 1 :] - sampled).abs().max()) < TOLERANCE
        assert float((base[len(PROMPT) - 1 :] - sampled).abs().max()) > 0.1  # the adapter is in force
    run(engine.close())


def test_a_family_that_vllm_serves_without_lora_is_refused(tmp_path: Path) -> None:
    import transformers

    path = make_family(tmp_path, "granite")
    config = transformers.GPTJConfig(n_embd=64, n_layer=1, n_head=2, vocab_size=260)
    transformers.GPTJForCausalLM(config).save_pretrained(path)
    with pytest.raises(
        ValueError, match=r"model.path: vLLM serves GPTJForCausalLM \(.*\) without LoRA; set learner.mode"
    ):
        VllmEngine(settings(path))
