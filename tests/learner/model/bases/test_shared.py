"""A model on another process's memory: the same to the bit as on its own, and without it while that process is gone."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.errors import WrongInput
from examples.random_model import make_tiny_model
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.bases.shared import MappedBase
from learner.model.logprob import policy_logprobs
from learner.model.policy import Policy
from rollout.types import View
from tests.learner.model.test_packing_check import random_adapter
from tests.shared_bases import Owner, manifest_of, mappings, owner_of

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 200, 3, 3, 100, 17, 17, 4]])


@pytest.fixture(scope="module", params=["Llama", "Qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", family=request.param)


def policy_of(path: Path, dtype: Any, mapped: MappedBase | None = None, base: Any = "none") -> Policy:
    policy = Policy(
        ModelConfig(path=str(path), dtype=dtype, base=base),
        LoraConfig(rank=8, alpha=16),
        checkpointing="full",
        seed=0,
        device=CPU,
        mapped=mapped,
    )
    random_adapter(policy)
    return policy


def learned(policy: Policy) -> list[Tensor]:
    """Logprobs of a row, and the gradients of their sum."""
    policy.clear_gradients()
    logprobs, _ = policy_logprobs(policy.hidden(IDS[:, :-1]), policy.head, IDS[0, 1:], 1.0, logits=policy.logits)
    logprobs.sum().backward()
    policy.collect_gradients()
    gradients = [master.grad.clone() for master in policy.masters.values() if master.grad is not None]
    assert len(gradients) == len(policy.masters)
    return [logprobs.detach(), *gradients]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_and_gradients_are_those_of_an_own_copy(path: Path, dtype: str) -> None:
    owner = owner_of(path, getattr(torch, dtype))
    mapped = MappedBase(owner.manifest, CPU)
    policy = policy_of(path, dtype, mapped)
    assert same(learned(policy), learned(policy_of(path, dtype)))
    mapped.check()  # nothing has written to it


def test_it_goes_on_with_the_same_base_of_a_fresh_owner(path: Path) -> None:
    gc.collect()  # of another test in this process, which `detach` would collect, too
    others = mappings()
    owner = owner_of(path)
    mapped = MappedBase(owner.manifest, CPU)
    policy = policy_of(path, "float32", mapped)
    before = learned(policy)
    del owner
    assert same(learned(policy), before)  # its owner is gone, and it can finish its step
    mapped.detach()
    mapped.detach()
    assert mappings() == others
    fresh = owner_of(path)
    mapped.attach(fresh.manifest)
    assert same(learned(policy), before)


def test_what_is_still_held_is_not_taken_for_gone(path: Path) -> None:
    owner = owner_of(path)
    mapped = MappedBase(owner.manifest, CPU)
    policy = policy_of(path, "float32", mapped)
    view = policy.head[:3]
    with pytest.raises(RuntimeError, match=r"memory.layout: 1 of 1 mappings of the lost generator's base are in use"):
        mapped.detach()
    del view


def changed(owner: Owner, name: str = "model.norm.weight") -> Owner:
    """The same with one weight a little larger, told as if the owner had loaded it so."""
    owner.tensors[name][3] += 0.5
    return replace(owner, manifest=manifest_of(owner.file, owner.tensors))


def test_another_base_or_the_lost_ones_manifest_is_not_attached(path: Path) -> None:
    owner = owner_of(path)
    mapped = MappedBase(owner.manifest, CPU)
    mapped.detach()
    with pytest.raises(WrongInput, match="the manifest is of the generator that was lost"):
        mapped.attach(owner.manifest)
    with pytest.raises(WrongInput, match="a fresh generator holds another base than the one before"):
        mapped.attach(changed(owner_of(path)).manifest)


def test_a_write_of_the_owner_is_seen(path: Path) -> None:
    owner = owner_of(path)
    mapped = MappedBase(owner.manifest, CPU)
    changed(owner)
    with pytest.raises(RuntimeError, match="something has written to the shared base: 1 .* first model.norm.weight"):
        mapped.check()
    with pytest.raises(WrongInput, match="1 of the generator's parameters have another content here than there"):
        MappedBase(owner.manifest, CPU)


def test_another_machine_is_refused(path: Path) -> None:
    manifest = replace(owner_of(path).manifest, device="cpu of boot 1, pid:[1]")
    with pytest.raises(WrongInput, match=r"needs generator and learner on one device, got cpu of boot 1, pid:\[1\]"):
        MappedBase(manifest, CPU)


def test_weights_that_are_no_views_of_this_model_are_refused_by_name(path: Path) -> None:
    owner = owner_of(path)
    gone, shaped = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    views = {name: view for name, view in owner.manifest.views.items() if name != gone}
    views[shaped] = View(shaped, (7,), (1,), 0)
    wrong = replace(owner.manifest, views=views, refused={gone: "its pieces are reordered"})
    reason = rf"2 of \d+ are none \({gone}: its pieces are reordered; {shaped}: it has the shape \[7\] there"
    with pytest.raises(WrongInput, match=reason):
        policy_of(path, "float32", MappedBase(wrong, CPU))


def test_a_base_of_another_type_is_refused(path: Path) -> None:
    owner = owner_of(path, torch.bfloat16)
    with pytest.raises(WrongInput, match="layers.0.input_layernorm.weight: it is bfloat16 there"):
        policy_of(path, "float32", MappedBase(owner.manifest, CPU))


def test_all_of_it_is_counted(path: Path) -> None:
    owner = owner_of(path, torch.bfloat16)
    assert MappedBase(owner.manifest, CPU).nbytes == 2 * sum(tensor.numel() for tensor in owner.tensors.values())
