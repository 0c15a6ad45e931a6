"""A quantised checkpoint on the real vLLM and in the learner: the same weights, and one policy with an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import WrongInput
from examples.quantised_checkpoints import make_quantised
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.base import load_base
from learner.model.bases.quantised import QuantisedLinear
from learner.model.export import update_of
from learner.model.logprob import token_logprobs
from learner.model.policy import Policy
from learner.trainer.trainer import held_of
from rollout.types import Adapter, Sampling
from rollout.vllm.arguments import quantised_arguments
from rollout.vllm.engine import VllmEngine
from tests.rollout.engine_case import PROMPT, run, settings

RMS = 0.05  # nats, in bfloat16; measured 0.022 over 1,000 tokens, and 0.025 for GPTQ with scales that are not rounded
CPU = torch.device("cpu")
NUMBERS = {"w4a16": "weight_packed", "w4a16_zeros": "weight_packed", "gptq": "qweight", "awq": "qweight"}


def held_by_vllm(engine: VllmEngine, part: str) -> dict[str, torch.Tensor]:
    """The weights of each fused layer of vLLM, where it has no kernel for them and they were computed on loading."""
    (found,) = engine._thread._turns.engine.collective_rpc(
        lambda worker: {
            name.replace(".base_layer", "").removesuffix(f".{part}"): weight.data
            for name, weight in worker.model_runner.model.named_parameters()
            if name.endswith(f".{part}")
        }
    )
    weights: dict[str, torch.Tensor] = found
    return weights


def moved(path: Path) -> Policy:
    lora = LoraConfig(rank=8, alpha=16)
    policy = Policy(ModelConfig(path=str(path)), lora, checkpointing="none", seed=0, device=CPU)
    random = torch.Generator().manual_seed(3)
    policy.load({name: old + 0.05 * torch.randn(old.shape, generator=random) for name, old in policy.masters.items()})
    return policy


@pytest.mark.parametrize(
    ("kind", "towers"),
    [
        ("w4a16", "gemma3"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("awq", None),
                ("gptq", None),
                ("w4a16_zeros", None),
                ("awq", "qwen3_vl"),
                ("gptq", "mistral3"),
            )
        ),
    ],
)
def test_sampler_and_learner_hold_the_same_weights(kind: str, towers: str | None, tmp_path: Path) -> None:
    make_quantised(tmp_path, kind, towers=towers)
    policy = moved(tmp_path)
    update = update_of(policy, 0)
    assert isinstance(update, Adapter)
    engine = VllmEngine(settings(tmp_path, dtype="bfloat16"))
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        own: Any = load_base(ModelConfig(path=str(tmp_path)), CPU, lora=True)
        there = held_by_vllm(engine, NUMBERS[kind])
        for layer in range(2):
            attention, mlp = (own.model.layers[layer].get_submodule(name) for name in ("self_attn", "mlp"))
            for name, parts in {
                "self_attn.qkv_proj": [attention.q_proj, attention.k_proj, attention.v_proj],
                "self_attn.o_proj": [attention.o_proj],
                "mlp.gate_up_proj": [mlp.gate_proj, mlp.up_proj],
                "mlp.down_proj": [mlp.down_proj],
            }.items():
                if all(isinstance(part, QuantisedLinear) for part in parts):
                    held = there.pop(f"model.layers.{layer}.{name}")
                    assert torch.equal(held, torch.cat([part.whole() for part in parts]))
        assert not there
    assert run(engine.load_adapter(update)) == update.digest
    assert run(engine.held()) == held_of(policy, 0, merged=False)
    for completion in run(engine.generate(PROMPT, Sampling(n=2, max_tokens=64, seed=0))):
        ids = torch.tensor(PROMPT + completion.token_ids.tolist())
        with torch.no_grad():
            states = policy.hidden(ids[None, :-1])
            with policy.acting_as("reference"):
                bare = policy.hidden(ids[None, :-1])
        sampled = torch.from_numpy(completion.logprobs)
        apart = [
            token_logprobs(s, policy.head, ids[1:], 1.0, logits=policy.logits)[len(PROMPT) - 1 :] - sampled
            for s in (states, bare)
        ]
        adapted, base = (float(one.square().mean().sqrt()) for one in apart)
        assert adapted < RMS
        assert base > (10 if towers is None else 5) * RMS  # the adapter is in force
    run(engine.close())


def test_what_vllm_would_compute_otherwise_is_refused_before_it_loads(tmp_path: Path) -> None:
    make_quantised(tmp_path, "fp8_block", layers=1)
    with pytest.raises(WrongInput, match="weights in FP8, and vLLM rounds activations"):
        VllmEngine(settings(tmp_path, dtype="bfloat16"))
    on_a_card = quantised_arguments(settings(tmp_path, dtype="bfloat16"), cuda=True)
    assert on_a_card == {"linear_backend": "marlin"}  # weights alone have 8 bits there
    with pytest.raises(WrongInput, match="model.base: nf4 is not for a quantised"):
        quantised_arguments(settings(tmp_path, dtype="bfloat16", base="nf4"), cuda=True)
