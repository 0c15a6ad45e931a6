"""A learner on the base of a real vLLM: the same to the bit as on its own copy. Among the last of the folder's engines,
see conftest.py. Of every family: benchmarks.learner.model_families --shared-base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.random_families import make_family
from examples.random_model import make_tiny_model
from learner.model.export import update_of
from learner.model.shared_base import MappedBase
from learner.trainer.trainer import held_of
from rollout.base_manifest import BaseNotShared, Manifest
from rollout.types import Adapter, Sampling
from rollout.vllm.engine import VllmEngine
from tests.learner.model.test_mapped_base import CPU, learned, policy_of, same
from tests.rollout.engine_case import PROMPT, run, settings

TOLERANCE = 1e-4  # nats


def model_of(family: str, folder: Path) -> Path:
    if family in ("Llama", "Qwen2"):
        return make_tiny_model(folder, family=family)
    return make_family(folder, family)


def start(path: Path, dtype: str = "float32") -> tuple[VllmEngine, Manifest]:
    engine = VllmEngine(settings(path, dtype=dtype, shares_base=True))
    return engine, run(engine.share_base())


@pytest.mark.parametrize("family", ["Qwen2", "phi3"])
def test_logprobs_and_gradients_are_those_of_an_own_copy(family: str, tmp_path: Path) -> None:
    """With biases, and fused in the checkpoint; what the engine has rounded as it loaded."""
    path = model_of(family, tmp_path)
    engine, manifest = start(path, "bfloat16")
    policy, own = policy_of(path, "bfloat16", MappedBase(manifest, CPU)), policy_of(path, "bfloat16")
    assert same(learned(policy), learned(own))
    assert manifest.refused == {}
    run(engine.close())


def test_a_fresh_engine_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family="Llama")
    engine, manifest = start(path)
    mapped = MappedBase(manifest, CPU)
    policy = policy_of(path, "float32", mapped)
    before = learned(policy)
    assert same(before, learned(policy_of(path, "float32")))
    run(engine.close())
    mapped.detach()
    fresh, manifest = start(path)
    mapped.attach(manifest)
    assert same(learned(policy), before)
    update = update_of(policy, 0)
    assert isinstance(update, Adapter)
    assert run(fresh.load_adapter(update)) == update.digest
    assert run(fresh.held()) == held_of(policy, 0, merged=False)
    (completion,) = run(fresh.generate(PROMPT, Sampling(n=1, max_tokens=24, seed=0)))
    mapped.check()  # it has served, and its weights are what they were
    probe = run(fresh.probe(PROMPT))
    with torch.no_grad():
        from learner.trainer.trainer import answer_of

        expected = answer_of(policy, 0, PROMPT, merged=False).logprobs
    assert abs(probe - expected).max() < TOLERANCE
    assert len(completion.token_ids) > 0
    run(fresh.close())


def test_an_engine_that_repacks_its_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from rollout.vllm import shared_base

    monkeypatch.setattr(shared_base, "plain_linear_layers", nullcontext)
    engine, manifest = start(path := make_tiny_model(tmp_path, family="Llama"))
    with pytest.raises(BaseNotShared, match=r"down_proj.weight: vLLM has moved or repacked model.layers.0.mlp.down_pr"):
        policy_of(path, "float32", MappedBase(manifest, CPU))
    run(engine.close())


@pytest.mark.parametrize("wrong", [{"max_lora_rank": 0}, {"sleeps": True}])
def test_settings_that_do_not_go_with_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="shares_base needs adapters, and no sleep"):
        settings(Path("model"), shares_base=True, **wrong)
