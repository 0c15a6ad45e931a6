"""RMSNorm by vLLM's kernel: the values of vLLM's operations of torch, and which inputs it leaves to those."""

from __future__ import annotations

import pytest
import torch
from vllm.ir.ops import fused_add_rms_norm, rms_norm
from vllm.platforms import current_platform

from rollout.vllm.cpu import PROVIDER, install_cpu_norm

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="on cards vLLM takes its kernel by itself")


@pytest.mark.parametrize("shape", [(1, 64), (33, 96), (5, 3, 32)])
def test_it_is_the_norm(shape: tuple[int, ...]) -> None:
    install_cpu_norm()
    install_cpu_norm()  # twice is once
    torch.manual_seed(0)
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    normed, summed = rms_norm.impls, fused_add_rms_norm.impls
    torch.testing.assert_close(normed[PROVIDER].impl_fn(x, weight, 1e-6), normed["native"].impl_fn(x, weight, 1e-6))
    expected = summed["native"].impl_fn(x, residual, weight, 1e-6)
    torch.testing.assert_close(summed[PROVIDER].impl_fn(x.clone(), residual.clone(), weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (33, 96), (5, 3, 32)])
def test_in_16_bits_it_rounds_where_torch_does(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    install_cpu_norm()
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(size).to(dtype) for size in (shape, shape, shape[-1:]))
    normed, summed = rms_norm.impls, fused_add_rms_norm.impls
    found = (normed[PROVIDER].impl_fn(x, weight, 1e-6), *summed[PROVIDER].impl_fn(x, residual, weight, 1e-6))
    expected = (normed["native"].impl_fn(x, weight, 1e-6), *summed["native"].impl_fn(x, residual, weight, 1e-6))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        # Sums in another order may fall on the other side of a rounding: a few of thousands, by one step of the type.
        assert (one != other).float().mean() < 0.01
        torch.testing.assert_close(one, other, atol=0, rtol=2 * torch.finfo(dtype).eps)


def test_what_the_kernel_would_read_or_round_otherwise_is_left_to_torch() -> None:
    install_cpu_norm()
    x, weight = torch.randn(4, 64), torch.randn(64)
    fits, fits_sum = rms_norm.impls[PROVIDER].supports_args, fused_add_rms_norm.impls[PROVIDER].supports_args
    assert fits(x, weight, 1e-6)
    assert fits_sum(x, x, weight, 1e-6)
    assert not fits_sum(x, x.bfloat16(), weight, 1e-6)
    parts = torch.randn(4, 128)[:, :64]  # rows with something between them, as of queries split from keys
    for other in ((parts, weight), (x, None), (x.bfloat16(), weight)):
        assert not fits(*other, 1e-6)
    assert not fits(x, weight, 1e-6, 32)
    assert not fits(torch.randn(4, 40), torch.randn(40), 1e-6)  # two and a half vectors
    assert not fits_sum(x, parts, weight, 1e-6)
