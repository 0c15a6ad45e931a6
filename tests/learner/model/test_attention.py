"""Attention in tiles of queries against the plain formula in float64, over any segments, heads and widths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.batch.layout import Layout, Segment
from learner.model import attention
from learner.model.attention import TILE, attend_tiles, row_with_sinks
from tests.peak import peak_bytes

Family = tuple[int, list[int]]  # tokens of a prompt, tokens of its completions


def layout_of(families: list[Family]) -> Layout:
    segments, end = [], 0
    for prompt, completions in families:
        prefix = end, end + prompt
        segments.append(Segment(*prefix))
        end += prompt
        for length in completions:
            segments.append(Segment(end, end + length, *prefix))
            end += length
    return Layout(segments)


def plain(
    inputs: tuple[Tensor, ...], layout: Layout, scale: float, sinks: Tensor | None = None, window: int | None = None
) -> Tensor:
    """softmax(scale q k + mask) v with the whole mask, one head at a time as the other heads were not there. sinks:
    [heads], one more score of each query, for nothing. window: of a row of one segment."""
    query, key, value = inputs
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    mask = torch.full((tokens, tokens), -torch.inf, dtype=query.dtype)
    for own in layout.segments:
        for token in range(own.start, own.stop):
            mask[token, own.prefix_start : own.prefix_stop] = 0
            mask[token, own.start if window is None else max(own.start, token + 1 - window) : token + 1] = 0
    heads = []
    for i in range(query.shape[1]):
        scores = scale * query[0, i] @ key[0, i // groups].t() + mask
        if sinks is not None:
            scores = torch.cat([scores, sinks[i].to(scores.dtype).expand(tokens, 1)], 1)
        heads.append(scores.softmax(-1)[:, :tokens] @ value[0, i // groups])
    return torch.stack(heads, 1)[None]


def slopes(output: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return torch.autograd.grad(output, inputs, weights)


def made(
    layout: Layout, kv_heads: int, groups: int, widths: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as a model makes them: [1, tokens, heads, width], transposed."""
    torch.manual_seed(len(layout.segments))
    tokens = layout.segments[-1].stop
    shapes = ((kv_heads * groups, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
    q, k, v = (torch.randn(1, tokens, *shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes)
    return q, k, v


@settings(max_examples=40)
@given(
    families=st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(1, 9), max_size=12)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    widths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    tile=st.integers(1, 8),
    sunk=st.booleans(),
)
def test_values_and_gradients_are_the_plain_formulas(
    families: list[Family], kv_heads: int, groups: int, widths: tuple[int, int], tile: int, sunk: bool
) -> None:
    layout = layout_of(families)
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        inputs = made(layout, kv_heads, groups, widths, dtype)
        sinks = torch.randn(kv_heads * groups).double() if sunk else None
        exact = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
        found, wanted = attend_tiles(*inputs, layout, 0.6, sinks, tile), plain(exact, layout, 0.6, sinks)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), wanted, atol=bound, rtol=bound)
        for one, other in zip(slopes(found, inputs), slopes(wanted, exact), strict=True):
            assert (one - other).norm() <= bound * (1 + other.norm())


@pytest.mark.parametrize("window", [None, 3, 1, 20])
@pytest.mark.parametrize("width", [8, 5])
def test_sinks_are_a_key_of_their_own_for_kernels_that_have_none(
    width: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With groups of heads, and with windows that reach over tiles of queries."""
    monkeypatch.setattr(attention, "WINDOW_TILE", 4)
    layout, sinks = layout_of([(11, [])]), torch.tensor([-3.0, 0.0, 2.0, 9.0, -40.0, 1.0]).double()
    inputs = made(layout, 2, 3, (width, width), torch.float64)
    found, wanted = row_with_sinks(*inputs, 0.6, window, sinks), plain(inputs, layout, 0.6, sinks, window)
    assert torch.allclose(found, wanted, atol=1e-13, rtol=1e-13)
    for one, other in zip(slopes(found, inputs), slopes(wanted, inputs), strict=True):
        assert torch.allclose(one, other, atol=1e-13, rtol=1e-13)


def test_a_sink_of_16_bits_is_not_rounded_by_a_scale_that_is_no_power_of_two() -> None:
    layout, sinks = layout_of([(64, [])]), torch.tensor([8.0, 20.0])
    inputs = made(layout, 2, 1, (16, 16), torch.bfloat16)
    exact = tuple(tensor.detach().double() for tensor in inputs)
    wanted = plain(exact, layout, 0.3, sinks)
    found = row_with_sinks(*inputs, 0.3, None, sinks.bfloat16()).double()
    assert ((found - wanted).norm(dim=(1, 3)) / wanted.norm(dim=(1, 3))).max() < 5e-3


def test_short_segments_are_computed_together_and_long_ones_alone() -> None:
    """Eight or more tiles of like shape, each with fewer products than its calls are worth; every tile once."""
    layout = layout_of([(30, [20, 9, 11, 10, 12, 10, 9, 20]), (30, [10, 150])])
    narrow, wide = layout.tiles(TILE, 64), layout.tiles(TILE, 65536)
    for alone, batches in (narrow, wide):
        places = [place for tile in alone for place in range(tile.start, tile.stop)]
        places += [place for batch in batches for place in batch.places.tolist()]
        assert sorted(places) == list(range(layout.segments[-1].stop))
    assert [batch.shape for batch in narrow[1]] == [(9, 20, 50)]
    assert sorted(tile.stop - tile.start for tile in narrow[0]) == [22, 30, 30, 128]
    assert wide[1] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """As if everything were in float32 until the end, over several tiles of the real size."""
    layout = layout_of([(150, [40, 300, 1])])
    half = made(layout, 2, 3, (16, 16), dtype)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in half)
    found, wanted = attend_tiles(*half, layout, 0.25), plain(exact, layout, 0.25)
    for one, other in ((found, wanted), *zip(slopes(found, half), slopes(wanted, exact), strict=True)):
        assert one.dtype == dtype
        assert (one - other).norm() <= 0.6 * torch.finfo(dtype).eps * other.norm()


def test_memory_is_gradients_and_tiles() -> None:
    """No [tokens, tokens] scores: beside what it gives, a few tiles of queries x keys."""
    layout = layout_of([(200, [300] * 12)])
    inputs = made(layout, 2, 2, (8, 8), torch.float32)
    weights = torch.randn(1, layout.segments[-1].stop, 4, 8)
    tile = TILE * 4 * 500 * 4
    given_back = 4 * (2 * weights.numel() + 2 * inputs[1].numel())  # output and gradients
    found = peak_bytes(lambda: torch.autograd.grad(attend_tiles(*inputs, layout, 0.3), inputs, weights))
    assert found < given_back + 4.5 * tile
