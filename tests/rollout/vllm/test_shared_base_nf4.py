"""A learner on the 4-bit base of a real vLLM: the same to the bit as on the one that it quantises itself. Among the
last of the folder's engines, see conftest.py."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from transformers import AutoModelForCausalLM

from learner.model.export import update_of
from learner.model.shared_base import MappedBase
from learner.trainer.trainer import answer_of
from rollout.types import (
    Adapter,
    BaseNotShared,
    Manifest,
    Quantised,
    View,
)
from rollout.vllm.engine import VllmEngine
from rollout.vllm.shared_base import quantised_of
from tests.learner.model.test_mapped_base import CPU, learned, policy_of, same
from tests.rollout.engine_case import run, settings
from tests.rollout.vllm.test_shared_base import model_of

IDS = np.random.default_rng(0).integers(0, 256, 200).tolist()


def in_bfloat16(path: Path) -> Path:
    """The same model, stored so: vLLM quantises what is stored, and a learner of its own what it has cast."""
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    return path


def start(path: Path) -> tuple[VllmEngine, Manifest]:
    engine = VllmEngine(settings(path, dtype="bfloat16", base="nf4", shares_base=True))
    return engine, run(engine.share_base())


@pytest.mark.parametrize("family", ["Qwen2", "phi3"])
def test_logprobs_and_gradients_are_those_of_an_own_copy(family: str, tmp_path: Path) -> None:
    """q, k, v and gate, up fused as vLLM loads, with biases; and fused in the checkpoint."""
    path = in_bfloat16(model_of(family, tmp_path))
    engine, manifest = start(path)
    policy, own = policy_of(path, "bfloat16", MappedBase(manifest, CPU), "nf4"), policy_of(path, "bfloat16", base="nf4")
    assert same(learned(policy), learned(own))
    assert manifest.refused == {}
    packed = sum(torch.Size(manifest.views[name].shape).numel() for name in manifest.quantised)
    scales = sum(4 * manifest.pieces[one.scales].elements for one in manifest.quantised.values())
    weights = sum(torch.Size(one.shape).numel() for one in manifest.quantised.values())
    assert len(manifest.quantised) == sum(name.endswith("_proj.weight") for name in manifest.views)
    assert packed + scales == 0.5625 * weights
    update = update_of(policy, 0)
    assert isinstance(update, Adapter)
    run(engine.load_adapter(update))
    served = run(engine.probe(IDS))
    other = policy_of(path, "bfloat16")  # the base in 16 bits: another policy
    with torch.no_grad():
        apart = [abs(served - answer_of(one, 0, IDS, merged=False).logprobs).mean() for one in (policy, other)]
    assert apart[0] < apart[1] / 2, apart  # what is left is rounding
    run(engine.close())


def test_it_cannot_be_written_a_change_is_seen_and_a_fresh_engine_takes_its_place(tmp_path: Path) -> None:
    path = in_bfloat16(model_of("Llama", tmp_path))
    engine, manifest = start(path)
    mapped = MappedBase(manifest, CPU)
    policy = policy_of(path, "bfloat16", mapped, "nf4")
    before = learned(policy)
    assert same(before, learned(policy_of(path, "bfloat16", base="nf4")))
    check_what_is_in_4_bits_there_and_not_here(path, manifest)
    quantised = manifest.quantised["model.layers.1.self_attn.k_proj.weight"]
    for piece in (quantised.scales, "model.layers.1.self_attn.qkv_proj.weight"):
        if (child := os.fork()) == 0:
            mapped._pieces[piece][0] = 1
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    mapped.check()
    where = json.loads(manifest.pieces[quantised.scales].handle)
    os.pwrite(where["fd"], b"\0\0\0\0", where["start"])  # as its owner could
    with pytest.raises(RuntimeError, match=rf"1 of the generator's parameters .* first {quantised.scales}"):
        mapped.check()
    run(engine.close())
    mapped.detach()
    fresh, manifest = start(path)
    mapped.attach(manifest)
    assert same(learned(policy), before)
    run(fresh.close())


def check_what_is_in_4_bits_there_and_not_here(path: Path, manifest: Manifest) -> None:
    with pytest.raises(BaseNotShared, match=r"14 of \d+ are none \(model.layers.0.mlp.down_proj.weight: it has the"):
        policy_of(path, "bfloat16", MappedBase(manifest, CPU))
    name = "model.embed_tokens.weight"
    embedding = Quantised(manifest.views[name].shape, 64, "model.layers.0.mlp.down_proj.weight.absmax")
    manifest = replace(manifest, quantised=manifest.quantised | {name: embedding})
    with pytest.raises(BaseNotShared, match=rf"1 of \d+ are none \({name}: it is in 4 bits there, and no weight"):
        policy_of(path, "bfloat16", MappedBase(manifest, CPU), "nf4")


def test_what_vllm_does_not_multiply_out_as_it_is_loaded_is_no_view() -> None:
    def parameter(*states: QuantState) -> torch.Tensor:
        found = torch.zeros(96, 1, dtype=torch.uint8)
        found.bnb_quant_state = dict(enumerate(states))  # type: ignore[attr-defined]
        found.bnb_shard_offsets = torch.tensor([0, 64, 96])  # type: ignore[attr-defined]
        return found

    def state(rows: int, kind: str = "nf4", *, nested: bool = False) -> QuantState:
        return quantize_4bit(torch.randn(rows, 64).bfloat16(), quant_type=kind, compress_statistics=nested)[1]

    parts = {"q": View("qkv", (64, 1), (1, 1), 0), "k": View("qkv", (32, 1), (1, 1), 64)}
    found, refused = quantised_of({"qkv": parameter(state(2), state(1))}, parts)
    assert (found["k"], refused) == (Quantised((1, 64), 64, "k.absmax"), {})
    _, refused = quantised_of({"qkv": parameter(state(2, "fp4"), state(1, nested=True))}, parts)
    assert {name: reason.partition("but ")[2] for name, reason in refused.items()} == {
        "q": "fp4, nested=False", "k": "nf4, nested=True"
    }  # fmt: skip
    whole = {"qkv": View("qkv", (96, 1), (1, 1), 0)}
    assert "together with other rows" in quantised_of({"qkv": parameter(state(2), state(1))}, whole)[1]["qkv"]
