"""What the learner says a generator must hold is what is in the payload, as an engine computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load

from examples.random_families import make_family
from learner.config.settings import LoraConfig
from learner.model.export import update_of
from learner.trainer.trainer import held_of
from rollout.weights import (
    COLUMNS,
    columns_of,
    digest_of_tensor,
    digests_of,
    read_of,
)
from tests.learner.model.test_policy import make_policy
from tests.learner.trainers import adapter_of, make_trainer


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
