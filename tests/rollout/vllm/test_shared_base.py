"""A learner on the base of a real vLLM: the same to the bit as on its own copy. Among the last of the folder's engines,
see conftest.py. Of every family: benchmarks.learner.model_families --shared-base."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.errors import WrongInput
from examples.random_families import make_family
from examples.random_model import make_tiny_model
from learner.model.bases.shared import MappedBase
from learner.model.export import update_of
from learner.trainer.trainer import answer_of, held_of
from rollout.shared_base import SharedFile
from rollout.types import Adapter, Manifest, Quantised, Sampling, View
from rollout.vllm.engine import VllmEngine
from rollout.vllm.shared_base import ViewRecorder, quantised_of
from tests.learner.model.bases.test_shared import (
    CPU,
    learned,
    policy_of,
    same,
)
from tests.rollout.engine_case import PROMPT, run, settings

TOLERANCE = 1e-4  # nats


def model_of(family: str, folder: Path) -> Path:
    if family in ("Llama", "Qwen2"):
        return make_tiny_model(folder, family=family)
    return make_family(folder, family)


def start(path: Path, dtype: str = "float32") -> tuple[VllmEngine, Manifest]:
    engine = VllmEngine(settings(path, dtype=dtype, shares_base=True))
    return engine, run(engine.share_base())


@pytest.mark.parametrize("family", ["Qwen2", pytest.param("phi3", marks=pytest.mark.long)])
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
    with pytest.raises(WrongInput, match=r"down_proj.weight: vLLM has moved or repacked model.layers.0.mlp.down_pr"):
        policy_of(path, "float32", MappedBase(manifest, CPU))
    run(engine.close())


@pytest.mark.parametrize("wrong", [{"max_lora_rank": 0}, {"sleeps": True}])
def test_settings_that_do_not_go_with_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="shares_base needs adapters, and no sleep"):
        settings(Path("model"), shares_base=True, **wrong)


# What is noted of a load: views that are the checkpoint's tensors bit for bit, and reasons where there is none.

Tensors = dict[str, Tensor]


def recorded(
    sizes: dict[str, tuple[int, ...]], sources: Tensors, load: Callable[[Tensors, Tensors], None]
) -> tuple[Tensors, dict[str, View], dict[str, str]]:
    """Parameters in one piece of memory, as on a CPU, after a load; views, and why there are no more."""
    empty = [torch.empty(size, dtype=torch.bfloat16) for size in sizes.values()]
    file = SharedFile(empty)
    parameters = {name: file.place(tensor) for name, tensor in zip(sizes, empty, strict=True)}
    recorder = ViewRecorder(parameters.items())
    with recorder:
        for name, tensor in sources.items():
            recorder.source(name, tensor)
        load(parameters, sources)
    return parameters, *recorder.views()


def read(parameters: Tensors, view: View) -> Tensor:
    piece = parameters[view.parameter]
    return piece.as_strided(view.shape, view.strides, piece.storage_offset() + view.offset)


def fused_and_padded(to: Tensors, of: Tensors) -> None:
    to["qkv"][:8].copy_(of["q"])
    to["qkv"][8:10].copy_(of["k"])
    to["qkv"].narrow(0, 10, 2).copy_(of["v"])
    to["embedding"][:50].copy_(of["words"])
    to["embedding"][50:].fill_(0)
    to["turned"].copy_(of["turned"].t())
    for half in (slice(0, 3), slice(3, 8)):
        to["halves"][:, half].copy_(of["halves"][:, half])
    to["norm"].copy_(of["norm"])
    to["norm"].copy_(of["norm"])  # once more
    to["one"].copy_(of["scalar"].view(1))


def test_fused_padded_turned_and_rounded_tensors_are_read_back_bit_for_bit() -> None:
    shapes = {"q": (8, 6), "k": (2, 6), "v": (2, 6), "words": (50, 4), "turned": (5, 3), "halves": (4, 8), "norm": (9,)}
    # Some of one file, as a reader of safetensors may give them.
    file = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parts = file.split([torch.Size(shape).numel() for shape in shapes.values()] + [1000 - sum(
        torch.Size(shape).numel() for shape in shapes.values())])  # fmt: skip
    sources = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=False)}
    sources["scalar"] = torch.tensor(0.1)
    sizes = {"qkv": (12, 6), "embedding": (64, 4), "turned": (3, 5), "halves": (4, 8), "norm": (9,), "one": (1,)}
    parameters, views, refused = recorded(sizes, sources, fused_and_padded)
    assert refused == {}
    for name, source in sources.items():
        assert torch.equal(read(parameters, views[name]), source.bfloat16()), name


def reordered(to: Tensors, of: Tensors) -> None:
    heads = of["a"].view(4, 2, 6)
    to["p"].copy_(torch.cat([heads[:, 0], heads[:, 1]]))


def by_pieces(to: Tensors, of: Tensors) -> None:
    for row in (0, 2, 4, 6):
        to["p"][row : row + 2].copy_(of["a"][6 - row : 8 - row])


def in_part(to: Tensors, of: Tensors) -> None:
    to["p"][:7].copy_(of["a"][:7])


def in_two_places(to: Tensors, of: Tensors) -> None:
    to["p"][:4].copy_(of["a"][:4])
    to["other"][:4].copy_(of["a"][4:])


def joined(to: Tensors, of: Tensors) -> None:
    to["p"].view(48).copy_(of["a"].flatten())


def changed_before(to: Tensors, of: Tensors) -> None:
    to["p"].copy_(of["a"] + 1)


def changed_after(to: Tensors, of: Tensors) -> None:
    to["p"].copy_(of["a"])
    to["p"][2:3].mul_(2)


def written_over(to: Tensors, of: Tensors) -> None:
    to["p"].copy_(of["a"])
    to["p"][5:].copy_(of["b"])


def spread(to: Tensors, of: Tensors) -> None:
    to["other"].copy_(of["b"][:1])


@pytest.mark.parametrize(
    ("load", "name", "reason"),
    [
        (reordered, "a", "not copied into a parameter as it is"),
        (by_pieces, "a", "its pieces are reordered"),
        (in_part, "a", "not every element of it is copied"),
        (in_two_places, "a", "its parts lie in 2 parameters, other, p"),
        (joined, "a", "its dimensions are joined"),
        (changed_before, "a", "not copied into a parameter as it is"),
        (changed_after, "a", "p was written over by mul_"),
        (written_over, "a", "p was written over by b"),
        (spread, "b", r"spread from \[1, 6\] over \[8, 6\]"),
    ],
)
def test_what_is_no_view_is_refused_with_the_reason(
    load: Callable[[Tensors, Tensors], None], name: str, reason: str
) -> None:
    sources = {"a": torch.randn(8, 6), "b": torch.randn(3, 6)}
    _, views, refused = recorded({"p": (8, 6), "other": (8, 6)}, sources, load)
    assert name not in views
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refused[name])


def test_memory_that_is_used_again_is_not_taken_for_the_tensor_that_was_there() -> None:
    parameters = {"p": torch.empty(4096), "other": torch.empty(4096)}
    recorder = ViewRecorder(parameters.items())
    with recorder:
        source = torch.randn(4096)
        recorder.source("a", source)
        parameters["p"].copy_(source)
        del source
        for _ in range(50):  # of which some get the storage that has just been given back
            parameters["other"].copy_(torch.randn(4096))
    assert recorder.views() == ({"a": View("p", (4096,), (1,), 0)}, {})


# A learner on the 4-bit base of a real vLLM: the same to the bit as on the one that it quantises itself. Among the
# last of the folder's engines, see conftest.py.

IDS = np.random.default_rng(0).integers(0, 256, 200).tolist()


def in_bfloat16(path: Path) -> Path:
    """The same model, stored so: vLLM quantises what is stored, and a learner of its own what it has cast."""
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    return path


def start_in_4_bits(path: Path) -> tuple[VllmEngine, Manifest]:
    engine = VllmEngine(settings(path, dtype="bfloat16", base="nf4", shares_base=True))
    return engine, run(engine.share_base())


@pytest.mark.parametrize("family", ["Qwen2", pytest.param("phi3", marks=pytest.mark.long)])
def test_logprobs_and_gradients_in_4_bits_are_those_of_an_own_copy(family: str, tmp_path: Path) -> None:
    """q, k, v and gate, up fused as vLLM loads, with biases; and fused in the checkpoint."""
    path = in_bfloat16(model_of(family, tmp_path))
    engine, manifest = start_in_4_bits(path)
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
    engine, manifest = start_in_4_bits(path)
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
    fresh, manifest = start_in_4_bits(path)
    mapped.attach(manifest)
    assert same(learned(policy), before)
    run(fresh.close())


def check_what_is_in_4_bits_there_and_not_here(path: Path, manifest: Manifest) -> None:
    with pytest.raises(WrongInput, match=r"14 of \d+ are none \(model.layers.0.mlp.down_proj.weight: it has the"):
        policy_of(path, "bfloat16", MappedBase(manifest, CPU))
    name = "model.embed_tokens.weight"
    embedding = Quantised(manifest.views[name].shape, 64, "model.layers.0.mlp.down_proj.weight.absmax")
    manifest = replace(manifest, quantised=manifest.quantised | {name: embedding})
    with pytest.raises(WrongInput, match=rf"1 of \d+ are none \({name}: it is in 4 bits there, and no weight"):
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
