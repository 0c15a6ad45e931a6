"""The gradient of a shared prompt's rows, which each completion takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.batch.layout import Layout, Segment, _gather

CPU = torch.device("cpu")
PROMPT, COMPLETION = 5, 3


def layout_of(completions: int) -> Layout:
    ends = range(PROMPT, PROMPT + completions * COMPLETION, COMPLETION)
    return Layout([Segment(0, PROMPT), *(Segment(end, end + COMPLETION, 0, PROMPT) for end in ends)])


@pytest.mark.parametrize("completions", [4, 16, 64])
def test_the_gradient_of_a_shared_prompt_is_rounded_once(completions: int) -> None:
    keys = layout_of(completions).ragged(CPU).keys
    slopes = torch.randn(len(keys.taken), 2, 8, generator=torch.Generator().manual_seed(completions)).bfloat16()
    rows = torch.zeros(PROMPT + completions * COMPLETION, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    found = torch.autograd.grad(keys.of(rows), rows, slopes)[0]
    exact = torch.zeros(rows.shape, dtype=torch.float64).index_add_(0, keys.taken, slopes.double())
    one_by_one = torch.zeros_like(found)  # a card's index_add, in one of its orders
    for row, slope in zip(keys.taken.tolist(), slopes, strict=True):
        one_by_one[row] += slope
    assert torch.equal(found, exact.bfloat16())
    assert torch.equal(found[PROMPT:], one_by_one[PROMPT:])
    error, others = (((x.double() - exact)[:PROMPT].norm() / exact[:PROMPT].norm()) for x in (found, one_by_one))
    assert error < 2**-9
    assert others > 1.3 * error


@given(index=st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_rows_may_be_taken_any_number_of_times(index: list[int]) -> None:
    gather = _gather(torch.tensor(index).numpy(), 11, CPU)
    rows = torch.randn(11, 2, dtype=torch.float64, requires_grad=True)
    found, wanted = gather.of(rows), rows[index]
    assert torch.equal(found, wanted)
    slopes = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(x, rows, slopes) for x in (found, wanted)), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_layers_whose_window_is_longer_than_what_is_seen_share_masks_with_those_without() -> None:
    layout, like = layout_of(4), torch.zeros(1)
    whole = layout.mask(1, None, like)
    assert whole is not None
    assert layout.mask(1, PROMPT + COMPLETION, like) is whole
    narrow = layout.mask(1, PROMPT, like)
    assert narrow is not None
    assert not torch.equal(narrow, whole)
