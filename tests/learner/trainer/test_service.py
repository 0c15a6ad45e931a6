"""Reward models on the policy's base, against transformers' sequence classification with PEFT, one row at a time.
What the learner says a generator must hold is what is in the payload, as an engine computes with it. Work on a base
that may be away: it waits for it, and other work does not wait for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load

from examples.random_families import make_family
from examples.random_model import make_tiny_model
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.bases.shared import MappedBase
from learner.model.export import update_of
from learner.model.policy import Policy
from learner.trainer import trainer
from learner.trainer.trainer import CHECK_EVERY, BaseThread, Sender, held_of
from rollout.schema import ragged, rewards_of, with_part
from rollout.types import Adapter, Weights, WeightsInFile
from rollout.weights import (
    COLUMNS,
    WeightsReader,
    columns_of,
    digest_of_tensor,
    digests_of,
    read_of,
)
from tests.learner.model.test_policy import make_policy
from tests.learner.model.test_reference import theirs
from tests.learner.trainers import adapter_of, distance, gradient, make_trainer
from tests.shared_bases import Owner, owner_of

PAD = 0  # of the tiny model


@pytest.fixture(scope="module")
def models(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of other ranks and layers than the policy's."""
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("one", "two")]
    theirs(tiny_path).save_pretrained(folders[0])
    theirs(tiny_path, r=4, target_modules=["k_proj", "up_proj"]).save_pretrained(folders[1])
    return folders


def wanted(path: str, folder: str, groups: list[pa.Table]) -> list[float]:
    model = theirs(path, folder)
    rows = [
        np.concatenate(row)
        for group in groups
        for row in zip(ragged(group, "prompt_ids"), ragged(group, "completion_ids"), strict=True)
    ]
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor(row[None], dtype=torch.int64)).logits[0, 0]) for row in rows]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("budget", [16, 8192])
async def test_scores_are_transformers_whatever_the_micro_batches(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], models: list[str], packed: bool, budget: int
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path, reward_adapters=models, token_budget=budget)
    assert trainer._policy.packed
    trainer._policy.packed = packed
    for adapter in trainer._policy.scored.values():
        adapter.pad = PAD
    found = await trainer.score(groups)
    for said, folder in zip(found, models, strict=True):
        expected = wanted(tiny_path, folder, groups)
        assert np.std(expected) > 1e-2
        np.testing.assert_allclose(said, expected, atol=1e-5)
    np.testing.assert_allclose(await trainer.score(groups[::-1]), _reversed(found, groups), atol=1e-5)


def _reversed(found: list[list[float]], groups: list[pa.Table]) -> list[list[float]]:
    stops = np.cumsum([len(group) for group in groups])
    starts = stops - [len(group) for group in groups]
    return [
        [x for start, stop in zip(starts[::-1], stops[::-1], strict=True) for x in one[start:stop]] for one in found
    ]


async def test_the_gradient_is_that_of_the_same_rewards_from_a_function(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], models: list[str]
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path, reward_adapters=models[:1])
    (scores,) = await trainer.score(groups)
    scored, by_function, begin = [], [], 0
    for group in groups:
        own = scores[begin : begin + len(group)]
        begin += len(group)
        scored.append(with_part(group, "model", 0.5, own))
        sums = [None if np.isnan(r) else r + 0.5 * s for r, s in zip(rewards_of(group), own, strict=True)]
        index = group.schema.get_field_index("reward")
        by_function.append(group.set_column(index, group.schema.field(index), pa.array(sums, pa.float32())))
    plain: Any = make_trainer(tiny_path, adapter=adapter_path)
    expected = await gradient(plain, by_function)
    assert distance(expected, await gradient(make_trainer(tiny_path, adapter=adapter_path), groups)) > 1e-2
    assert distance(await gradient(trainer, scored), expected) == 0.0


async def test_a_reward_model_is_no_part_of_what_is_saved_or_served(
    tiny_path: str, adapter_path: str, models: list[str], tmp_path: Path
) -> None:
    plain, with_model = (
        make_trainer(tiny_path, adapter=adapter_path, reward_adapters=folders) for folders in ([], models)
    )
    served = [await adapter_of(trainer) for trainer in (plain, with_model)]
    assert served[0].digest == served[1].digest
    saved = [await trainer.save(tmp_path / str(i)) for i, trainer in enumerate((plain, with_model))]
    assert saved[0]["adapter_model.safetensors"] == saved[1]["adapter_model.safetensors"]


# What the learner says a generator must hold is what is in the payload, as an engine computes with it.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("learner", [{}, {"push": "merged"}, {"mode": "full"}])
async def test_it_is_what_the_payload_holds(
    tiny_path: str, groups: list[pa.Table], dtype: str, learner: dict[str, Any]
) -> None:
    # A factor of 11 / 8, which is rounded in 16 bits.
    trainer = make_trainer(tiny_path, dtype=dtype, lora=LoraConfig(rank=8, alpha=11), **learner)
    await trainer.step(groups)
    update, held = await adapter_of(trainer), (await trainer.probe([1, 2, 3])).held
    sent = load(bytes(update.payload))
    assert held.tensors.keys() == sent.keys()
    assert held.unread == ()
    assert (await trainer.probe([1, 2, 3])).held == held  # to ask changes nothing
    for name, tensor in sent.items():
        assert tensor.dtype == getattr(torch, dtype)
        in_use = tensor * (11 / 8) if ".lora_B." in name else tensor
        if learner and tensor.dim() == 2:
            chosen = columns_of(1, tensor.shape[1])
            assert len(chosen) == min(COLUMNS, tensor.shape[1])
            in_use = tensor[:, chosen] + 0.0
        assert held.tensors[name] == digest_of_tensor(in_use)
    await trainer.step(groups)
    later = (await trainer.probe([1, 2, 3])).held
    assert sum(later.tensors[name] != digest for name, digest in held.tensors.items()) > len(sent) / 2


def test_a_digest_is_of_type_shape_and_every_bit() -> None:
    values = torch.tensor([0.0, 1.0, 2.0, 3.0])
    others = [values.reshape(2, 2), values.bfloat16(), torch.tensor([-0.0, 1.0, 2.0, 3.0]), values[[0, 2, 1, 3]]]
    assert len({digest_of_tensor(tensor) for tensor in [values, *others]}) == 5
    turned = torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])
    assert digest_of_tensor(torch.arange(6.0).reshape(2, 3).T) == digest_of_tensor(turned)


def test_large_tensors_are_hashed_as_small_ones_are() -> None:
    tensors = {f"{size}-{i}": torch.full((size // 4,), float(i)) for i in range(5) for size in (400, 1 << 20)}
    assert digests_of(tensors.items()) == {name: digest_of_tensor(tensor) for name, tensor in tensors.items()}


def test_the_columns_that_are_read_are_a_matter_of_the_version_and_its_zeros_have_no_sign() -> None:
    chosen = columns_of(3, 1000)
    assert len(chosen) == len(chosen.unique()) == COLUMNS
    assert torch.equal(chosen, chosen.sort().values)
    assert torch.equal(chosen, columns_of(3, 1000))
    assert not torch.equal(chosen, columns_of(4, 1000))
    assert columns_of(3, 5).tolist() == [0, 1, 2, 3, 4]
    weight = -torch.arange(3000.0).reshape(3, 1000)
    assert torch.equal(read_of(weight, 3, weight.dtype), weight[:, chosen])
    zeros = read_of(torch.full((2, 100), -0.0), 3, torch.float32)
    assert not torch.signbit(zeros).any()
    assert torch.equal(read_of(weight[0], 3, weight.dtype), weight[0])


def test_an_adapter_of_fused_layers_is_held_under_the_names_that_it_is_sent_with(tmp_path: Path) -> None:
    policy = make_policy(str(make_family(tmp_path, "glm4")))
    assert held_of(policy, 1, merged=False).tensors.keys() == load(bytes(update_of(policy, 1).payload)).keys()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_a_whole_model_those_bits_are_held_that_are_sent(dtype: str, tiny_path: str) -> None:
    model = ModelConfig.model_validate({"path": tiny_path, "dtype": dtype})
    policy = Policy(model, None, checkpointing="none", seed=0, device=torch.device("cpu"))
    sent = load(bytes(update_of(policy, 4).payload))
    expected = {name: digest_of_tensor(read_of(weight, 4, weight.dtype)) for name, weight in sent.items()}
    assert {weight.dtype for weight in sent.values()} == {getattr(torch, dtype)}
    assert held_of(policy, 4, merged=False).tensors == expected


@pytest.mark.parametrize(("whole", "merged"), [(True, False), (False, True)])
async def test_whole_weights_that_stay_with_the_learner_are_those_that_would_be_sent(
    whole: bool, merged: bool, tiny_path: str
) -> None:
    model = ModelConfig.model_validate({"path": tiny_path, "dtype": "float32"})
    policy = make_policy(tiny_path)
    if whole:
        policy = Policy(model, None, checkpointing="none", seed=0, device=torch.device("cpu"))
    sender, read = Sender(policy, merged=merged), []
    try:
        sent, away = sender.outgoing(3, stays=False)[0].value, sender.outgoing(3, stays=True)[0].value
        assert isinstance(sent, Weights)
        assert isinstance(away, WeightsInFile)

        async def load(weights: Weights) -> str:
            read.append(bytes(weights.payload))
            return weights.digest

        assert await WeightsReader().load(away, load) == sent.digest
        assert read == [bytes(sent.payload)]
        assert isinstance(Sender(make_policy(tiny_path), merged=False).outgoing(3, stays=True)[0].value, Adapter)
    finally:
        sender._file.close()


# Work on a base that may be away: it waits for it, and other work does not wait for it.


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", family="Llama")


@pytest.fixture
def owner(path: Path) -> Owner:
    return owner_of(path)


async def test_work_under_way_is_finished_and_later_work_waits(path: Path, owner: Owner) -> None:
    thread = BaseThread(MappedBase(owner.manifest, torch.device("cpu")))
    gate, done = asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def slow() -> None:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        done.append("under way")

    under_way = asyncio.create_task(thread.compute(slow))
    await asyncio.sleep(0)
    detached = asyncio.create_task(thread.detach())
    await asyncio.sleep(0)
    later = asyncio.create_task(thread.compute(lambda: done.append("later")))
    await asyncio.sleep(0.05)
    assert not detached.done()  # the step comes first
    gate.set()
    await asyncio.gather(under_way, detached)
    await thread.run(lambda: done.append("without the base"))
    before = thread.progress(on_cpu=False)
    await asyncio.sleep(0.05)
    assert thread.progress(on_cpu=False) >= before + 0.04  # whoever waits for the base does not hang
    assert done == ["under way", "without the base"]
    fresh = owner_of(path)
    await thread.attach(fresh.manifest)
    await later
    assert done[-1] == "later"
    stopped = thread.progress(on_cpu=False)
    assert before < stopped < before + 60  # it does not fall, which would look like no progress
    await asyncio.sleep(0.02)
    assert thread.progress(on_cpu=False) == stopped


async def test_work_is_done_in_one_thread_in_the_order_of_the_calls() -> None:
    thread, done = BaseThread(None), list[int]()
    assert thread.computed() == 0.0  # it has not begun

    def work(number: int) -> int:
        time.sleep(0.02 if number == 0 else 0.0)
        done.append(number)
        return threading.get_ident()

    assert len(set(await asyncio.gather(*(thread.run(partial(work, number)) for number in range(4))))) == 1
    assert done == [0, 1, 2, 3]


async def test_work_that_was_waiting_waits_again_if_the_base_goes_before_its_turn(path: Path, owner: Owner) -> None:
    thread = BaseThread(MappedBase(owner.manifest, torch.device("cpu")))
    await thread.detach()
    done: list[str] = []
    waiting = asyncio.create_task(thread.compute(lambda: done.append("computed")))
    await asyncio.sleep(0)
    thread._there.set()  # attached, and lost again in the same turn of the event loop
    thread._there.clear()
    await asyncio.sleep(0.02)
    assert done == []
    fresh = owner_of(path)
    await thread.attach(fresh.manifest)
    await waiting
    assert done == ["computed"]


def test_the_base_is_looked_at_every_so_many_versions(owner: Owner) -> None:
    thread = BaseThread(MappedBase(owner.manifest, torch.device("cpu")))
    owner.tensors["model.norm.weight"][0] += 1
    thread.check(CHECK_EVERY + 1)
    with pytest.raises(RuntimeError, match="something has written to the shared base"):
        thread.check(2 * CHECK_EVERY)
    trainer.BaseThread(None).check(CHECK_EVERY)  # its own base
