"""What ranks send each other arrives, and nothing else can be sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from learner.ranks.group import packed, unpacked


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
