"""Attention over a packed row on a CPU: a tile of queries at a time, against the keys that it sees and no others.

torch's kernel, given a block of segments and a mask, computes scores only to throw them away: of the ragged workload
3.4 M where 2.4 M are needed. Here a tile of queries of one segment is multiplied with the prefix and the segment's own
tokens up to the tile's last one, so that only a triangle is masked, and the query heads that share a key head are rows
of one product. Probabilities are formed again in the backward pass (FlashAttention 2205.14135, section 3.1): nothing is
kept but the queries, keys and values themselves. Types of 16 bits are computed in float32.

Letters: N tokens of the row, D and E widths of a key and a value head, K key heads, R query heads of each, T queries of
a tile, S keys that it sees.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.batch.layout import Layout, Tile

TILE = 128  # queries; with 64 and 256 the backward pass of the ragged workload is a tenth slower


def attend_tiles(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, tile: int = TILE) -> Tensor:
    """[1, N, K R, E] from query [1, K R, N, D], key [1, K, N, D] and value [1, K, N, E]; differentiable once."""
    output: Tensor = _Tiles.apply(query, key, value, layout.tiles(tile), scale)  # type: ignore[no-untyped-call]
    return output


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: list[Tile], scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.tiles, ctx.scale = tiles, scale
        row = _Row(query[0], key[0], value[0], tiles, scale)
        output = value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        for tile in tiles:
            _, _, values, weights = row.seen_by(tile)
            row.unfold(torch.bmm(weights, values), output[0, tile.start : tile.stop].transpose(0, 1))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        row = _Row(query[0], key[0], value[0], ctx.tiles, ctx.scale)
        to_query = torch.empty_like(query)
        to_key, to_value = (torch.zeros(x.shape[1:], dtype=row.dtype, device=x.device) for x in (key, value))
        for tile in ctx.tiles:
            queries, keys, values, weights = row.seen_by(tile)
            slopes = row.fold(grad[0, tile.start : tile.stop].transpose(0, 1))
            _add(torch.bmm(weights.transpose(1, 2), slopes), to_value, tile)
            to_scores = torch.ops.aten._softmax_backward_data(
                torch.bmm(slopes, values.transpose(1, 2)), weights, -1, row.dtype
            )
            _add(torch.bmm(to_scores.transpose(1, 2), queries), to_key, tile)
            row.unfold(torch.bmm(to_scores, keys).mul_(ctx.scale), to_query[0, :, tile.start : tile.stop])
        return to_query, to_key[None].to(key.dtype), to_value[None].to(value.dtype), None, None


class _Row:
    """query [K R, N, D], key [K, N, D] and value [K, N, E] of a row, and what a tile takes of them."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, tiles: list[Tile], scale: float) -> None:
        self._query, self._key, self._value, self._scale = query, key, value, scale
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        longest = max(tile.stop - tile.start for tile in tiles)
        future = torch.full((longest, longest), -torch.inf, dtype=self.dtype, device=query.device).triu_(1)
        self._future = future.repeat_interleave(len(query) // len(key), 0)  # [T R, T], to be added to scores

    def seen_by(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries [K, T R, D], scaled; keys [K, S, D]; values [K, S, E]; probabilities [K, T R, S])."""
        queries = self.fold(self._query[:, tile.start : tile.stop]).mul_(self._scale)
        keys, values = (self._gather(tensor, tile) for tensor in (self._key, self._value))
        scores = torch.bmm(queries, keys.transpose(1, 2))
        count = tile.stop - tile.start
        scores[:, :, -count:] += self._future[: queries.shape[1], :count]
        return queries, keys, values, scores.softmax(-1)

    def fold(self, part: Tensor) -> Tensor:
        """[K R, T, X] -> [K, T R, X], a copy."""
        grouped = part.view(len(self._key), -1, *part.shape[1:]).transpose(1, 2)
        return torch.empty(grouped.shape, dtype=self.dtype, device=part.device).copy_(grouped).flatten(1, 2)

    def unfold(self, rows: Tensor, place: Tensor) -> None:
        """[K, T R, X] -> into [K R, T, X]."""
        grouped = place.view(len(self._key), -1, *place.shape[1:]).transpose(1, 2)
        grouped.copy_(rows.view(grouped.shape))

    def _gather(self, tensor: Tensor, tile: Tile) -> Tensor:
        own = tensor[:, tile.own : tile.stop]
        if tile.prefix_start < tile.prefix_stop:
            own = torch.cat([tensor[:, tile.prefix_start : tile.prefix_stop], own], 1)
        return own.to(self.dtype)


def _add(part: Tensor, whole: Tensor, tile: Tile) -> None:
    """Adds [K, S, X] of a tile where its keys lie in [K, N, X]."""
    prefix = tile.prefix_stop - tile.prefix_start
    if prefix:
        whole[:, tile.prefix_start : tile.prefix_stop] += part[:, :prefix]
    whole[:, tile.own : tile.stop] += part[:, prefix:]
