"""Numbers of a packed matrix are found where vLLM's kernel put them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (2 * 1024, 192)])
def test_places_are_those_of_the_kernels_packing(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of each of several experts, whatever their numbers are; the second matrix has more than 2^16 numbers."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    from rollout.vllm.experts import _places

    weights = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = cpu_prepack_moe_weight(weights, "vec")
    assert not torch.equal(packed, weights)
    places = _places(*shape, dtype, "vec").long()
    for one, own in zip(packed, weights, strict=True):
        assert torch.equal(one.flatten()[places].view(shape), own)
