"""What a rank is told when what it exchanges is given up. One process over gloo stands for a card's NCCL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import init_process_group, is_initialized

from cluster.actor import Unusable
from learner.ranks.group import Group, interface_of, packed, unpacked


def test_what_was_abandoned_is_another_rank_s_loss_until_they_meet_again() -> None:
    group, values = Group(0, 1, "cuda"), torch.tensor([3, 4])
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group.sum(values)
    assert (values.tolist(), group.gather("mine")) == ([3, 4], ["mine"])
    group.abandon()
    for exchange in (lambda: group.sum(values), lambda: group.gather("mine"), lambda: group.broadcast(b"mine", 0)):
        with pytest.raises(Unusable, match="another rank is gone"):
            exchange()
    group.leave()
    assert not is_initialized()


def test_gloo_is_told_the_interface_that_has_the_address_of_the_node() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"Ray names this node 192\.0\.2\.1, and no network interface here has that"):
        interface_of("192.0.2.1")  # of documentation, which nobody has


# What ranks send each other arrives, and nothing else can be sent.


def test_values_and_tensors_arrive_to_the_bit() -> None:
    tensors = [torch.tensor(3), torch.tensor([0.1, math.nan]), torch.zeros(0), torch.tensor([[True], [False]])]
    found: Any = unpacked(packed(("words", 2, [0.1, -math.inf], {"parts": [{"a": one} for one in tensors]})))
    assert found[:3] == ["words", 2, [0.1, -math.inf]]
    for one, tensor in zip(found[3]["parts"], tensors, strict=True):
        assert one["a"].dtype == tensor.dtype
        assert torch.equal(one["a"].nan_to_num(7), tensor.nan_to_num(7))


def test_an_object_is_refused() -> None:
    with pytest.raises(TypeError, match="a rank sends no object"):
        packed([object()])
