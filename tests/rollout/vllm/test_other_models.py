"""A model with experts, one with fused layers, one with linear attention and the text part of a checkpoint with towers,
in the learner and on the real vLLM (all families: benchmarks.learner.model_families, tests/families). Among the last of
the folder's engines, see conftest.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.random_families import make_family
from examples.random_towers import CHECKPOINTS, make_checkpoint
from learner.model.export import update_of
from learner.model.logprob import token_logprobs
from learner.trainer.trainer import held_of
from rollout.types import Adapter, Sampling, Weights
from rollout.vllm.engine import VllmEngine
from tests.learner.model.test_experts import policy_of, saved
from tests.learner.model.test_export import adapted
from tests.learner.model.test_packing_check import random_adapter
from tests.learner.model.test_policy import make_policy
from tests.rollout.engine_case import PROMPT, run, settings

TOLERANCE = 1e-4  # nats; measured 2e-6
TURNED = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "gpt_oss": "model.layers.1.mlp.experts.3.down_proj",
}
ATTENTION = {"qkv_proj", "o_proj"}
LAYERS = {  # as vLLM fuses them
    "qwen3_moe": ATTENTION,
    "qwen3_next": ATTENTION,
    "glm4": {*ATTENTION, "gate_up_proj", "down_proj"},
    "gemma4_dense": {*ATTENTION, "gate_up_proj", "down_proj"},
}


@pytest.mark.parametrize(
    "name", ["qwen3_next", *(pytest.param(n, marks=pytest.mark.long) for n in ("gemma4_dense", "qwen3_moe", "glm4"))]
)
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


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_merged_experts_arrive_and_are_read_back(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, since vLLM by itself packs experts on the first load only. Those of qwen3_moe are padded when packed."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    path = saved(kind, tmp_path / "model")
    policy, engine = policy_of(path), VllmEngine(settings(tmp_path / "model", max_lora_rank=0))
    for version in (0, 1):
        with torch.no_grad():
            for weight in policy.masters.values():
                weight.mul_(-0.5)
        policy.sync()
        update = update_of(policy, version, merged=True)
        assert isinstance(update, Weights)
        assert run(engine.load_weights(update)) == update.digest
        held, wanted = run(engine.held()), held_of(policy, version, merged=True)
        assert held == wanted
        assert not held.unread
        for completion in run(engine.generate(PROMPT, Sampling(n=2, max_tokens=24, seed=0))):
            ids = torch.tensor(PROMPT + completion.token_ids.tolist())
            with torch.no_grad():
                states = policy.hidden(ids[None, :-1])
            own = token_logprobs(states, policy.head, ids[1:], 1.0, logits=policy.logits)[len(PROMPT) - 1 :]
            assert float((own - torch.from_numpy(completion.logprobs)).abs().max()) < TOLERANCE

    def turn_one(worker: Any) -> None:
        layers = dict(worker.model_runner.get_model().named_modules())
        layers["model.layers.1.mlp.experts.routed_experts"].w2_weight[3].neg_()

    engine._thread._turns.engine.collective_rpc(turn_one)
    found = run(engine.held()).tensors
    assert [name for name in wanted.tensors if found[name] != wanted.tensors[name]] == [TURNED[kind]]
    if kind == "gpt_oss":  # in which nothing is padded, so that weights in the wrong order load without an error
        upstream = vars(UnquantizedFusedMoEMethod.process_weights_after_loading)["__wrapped__"]
        monkeypatch.setattr(UnquantizedFusedMoEMethod, "process_weights_after_loading", upstream)
        run(engine.load_weights(Weights.build(2, update.payload)))
        wanted = held_of(policy, 2, merged=True)
        wrong = {name for name, digest in run(engine.held()).tensors.items() if digest != wanted.tensors[name]}
        assert len(wrong) == 2 * 4 * 2  # both tensors of four experts in two layers
        assert all(".experts." in name and not name.endswith("_bias") for name in wrong)
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
