"""Attention over a packed row on a CPU: a tile of queries at a time, against the keys that it sees and no others.

torch's kernel, given a block of segments and a mask, computes scores only to throw them away: of the ragged workload
3.4 M where 2.4 M are needed. Here a tile of queries of one segment is multiplied with the prefix and the segment's own
tokens up to the tile's last one, so that only a triangle is masked, and the query heads that share a key head are rows
of one product. Probabilities are formed again in the backward pass (FlashAttention 2205.14135, section 3.1): nothing is
kept but the queries, keys and values themselves. Types of 16 bits are computed in float32. Small tiles are computed
several at once (learner.batch.tile_batches).

Letters: N tokens of the row, D and E widths of a key and a value head, K key heads, R query heads of each, B tiles at
once, T queries of a tile, S keys that it sees.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.batch.layout import Layout
from learner.batch.tile_batches import Tile, TileBatch
from learner.model.attention_parts import Row

Tiles = tuple[list[Tile], list[TileBatch]]  # alone, in batches

TILE = 128  # queries; with 64 and 256 the backward pass of the ragged workload is a tenth slower


def attend_tiles(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, tile: int = TILE) -> Tensor:
    """[1, N, K R, E] from query [1, K R, N, D], key [1, K, N, D] and value [1, K, N, E]; differentiable once."""
    tiles = layout.tiles(tile, query.shape[1] * query.shape[3])
    output: Tensor = _Tiles.apply(query, key, value, tiles, scale)  # type: ignore[no-untyped-call]
    return output


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.tiles, ctx.scale = tiles, scale
        output = value.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for part in Row(query, key, value, scale).parts(*tiles):
            _, _, values, weights = part.seen()
            part.put(torch.bmm(weights, values), output)
        return output[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        row = Row(query, key, value, ctx.scale)
        to_query = query.new_empty(row.query.shape)
        to_key, to_value = (torch.zeros(x.shape, dtype=row.dtype, device=x.device) for x in (row.key, row.value))
        for part in row.parts(*ctx.tiles):
            queries, keys, values, weights = part.seen()
            slopes = part.take(grad[0])
            part.add(torch.bmm(weights.transpose(1, 2), slopes), to_value)
            to_scores = torch.ops.aten._softmax_backward_data(
                torch.bmm(slopes, values.transpose(1, 2)), weights, -1, row.dtype
            )
            part.add(torch.bmm(to_scores.transpose(1, 2), queries), to_key)
            part.put(torch.bmm(to_scores, keys).mul_(ctx.scale), to_query)
        to_inputs = to_query, to_key.to(key.dtype), to_value.to(value.dtype)
        to_query, to_key, to_value = (x.transpose(0, 1)[None] for x in to_inputs)
        return to_query, to_key, to_value, None, None
