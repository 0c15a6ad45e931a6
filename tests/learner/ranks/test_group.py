"""What a rank is told when what it exchanges is given up. One process over gloo stands for a card's NCCL."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import init_process_group, is_initialized

from cluster.actor import Unusable
from learner.ranks.group import Group


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
