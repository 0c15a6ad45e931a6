"""vLLM's real Triton kernels of the CUDA route, against plain torch in float64: LoRA in a step that completions of
several versions and a probe share, and the logprobs of sampled tokens. float16: a product of bfloat16 is not computed
right by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreted import compute_token_logprobs, wrapper_of

HIDDEN, RANK = 96, 16
QKV = (96, 48, 48)  # widths of the layers that are fused in one, as with grouped queries
# Rows of a step: four sequences decode with the newest adapter, one with the one before, a probe of five tokens under
# the newest, and a row without any.
NEWEST, BEFORE = 7, 3
STEP = [NEWEST] * 4 + [BEFORE] + [NEWEST] * 5 + [0]


def adapters(widths: tuple[int, ...], slots: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Of each fused layer [slots, 1, RANK, HIDDEN] and [slots, 1, width, RANK]."""
    a = tuple(torch.randn(slots, 1, RANK, HIDDEN).half() / HIDDEN**0.5 for _ in widths)
    return a, tuple(torch.randn(slots, 1, width, RANK).half() / RANK**0.5 for width in widths)


def expected(
    y: Tensor, x: Tensor, rows: list[int], slots: list[int], a: tuple[Tensor, ...], b: tuple[Tensor, ...]
) -> Tensor:
    found = y.double().clone()
    for row, adapter in enumerate(rows):
        if adapter:
            slot = slots.index(adapter)
            parts = [u[slot, 0].double() @ (v[slot, 0].double() @ x[row].double()) for v, u in zip(a, b, strict=True)]
            found[row] += torch.cat(parts)
    return found


@pytest.mark.parametrize("widths", [QKV, (200,)])
@pytest.mark.parametrize("rows", [STEP, [NEWEST] * 9, [0] * 3])
def test_a_step_of_several_adapters_and_a_probe(widths: tuple[int, ...], rows: list[int]) -> None:
    torch.manual_seed(0)
    slots = [BEFORE, NEWEST, 5]
    a, b = adapters(widths, len(slots))
    x, y = torch.randn(len(rows), HIDDEN).half(), torch.randn(len(rows), sum(widths)).half()
    wanted = expected(y, x, rows, slots, a, b)
    plain = y.clone()
    wrapper_of(rows, slots).add_lora_linear(y, x, a, b, 1.0, widths)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-3, atol=4e-3)
    without = [row for row, adapter in enumerate(rows) if not adapter]
    assert torch.equal(y[without], plain[without])


def test_the_newest_adapter_is_not_the_one_before() -> None:
    """A step under the wrong slot would be seen: the kernels do follow the mapping."""
    torch.manual_seed(0)
    slots, rows = [BEFORE, NEWEST], [NEWEST] * 3
    a, b = adapters(QKV, 2)
    x = torch.randn(3, HIDDEN).half()
    found = []
    for mapped in (rows, [BEFORE] * 3):
        y = torch.zeros(3, sum(QKV)).half()
        wrapper_of(mapped, slots).add_lora_linear(y, x, a, b, 1.0, QKV)
        found.append(y)
    assert float((found[0] - found[1]).abs().max()) > 0.5


def test_the_head_of_a_step_with_a_probe() -> None:
    """No adapter of ours touches the head: its slots are zero, and more rows than sequences must do no harm."""
    torch.manual_seed(0)
    wrapper = wrapper_of([NEWEST] * 5, [NEWEST])
    a, b = torch.zeros(1, 1, RANK, HIDDEN).half(), torch.zeros(1, 1, 200, RANK).half()
    x, y = torch.randn(5, HIDDEN).half(), torch.randn(5, 200).half()
    plain = y.clone()
    wrapper.add_lora_logits(y, x, a, b, 1.0)
    assert torch.equal(y, plain)


@pytest.mark.parametrize("vocab", [1000, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logprobs_of_sampled_tokens(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(6, vocab)).to(dtype)
    logits[0, : vocab // 2] = float("-inf")  # what a mask leaves
    ids = torch.stack([torch.arange(vocab - 6, vocab), logits.argmax(-1)], 1)
    wanted = logits.double().log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(compute_token_logprobs(logits, ids).double(), wanted, rtol=1e-6, atol=2e-6)
