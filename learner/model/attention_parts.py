"""What attention over a packed row computes at once: a tile of queries, or several small ones padded to one shape.

Letters as in learner.model.segment_attention, and P: K for one tile, B K for several.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from learner.batch.tile_batches import Tile, TileBatch


class Row:
    """Of query [1, K R, N, D], key [1, K, N, D] and value [1, K, N, E], token by token. dtype: of all products."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        self.query, self.key, self.value = (x[0].transpose(0, 1) for x in (query, key, value))
        self.scale, self.dtype = scale, torch.promote_types(query.dtype, torch.float32)
        self.key_heads = key.shape[1]

    def parts(self, alone: Sequence[Tile], batches: Sequence[TileBatch]) -> "Iterator[Part]":
        longest = max((tile.stop - tile.start for tile in alone), default=0)
        future = torch.full((longest, longest), -torch.inf, dtype=self.dtype, device=self.query.device).triu_(1)
        future = future.repeat_interleave(self.query.shape[1] // self.key_heads, 0)  # [T R, T], to be added to scores
        yield from (_OneTile(self, tile, future) for tile in alone)
        yield from (_SeveralTiles(self, batch) for batch in batches)


class Part(ABC):
    def __init__(self, row: Row) -> None:
        self.row = row

    def seen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries [P, T R, D], scaled; keys [P, S, D]; values [P, S, E]; probabilities [P, T R, S])."""
        queries = self.take(self.row.query).mul_(self.row.scale)
        keys, values = self._gather(self.row.key), self._gather(self.row.value)
        scores = torch.bmm(queries, keys.transpose(1, 2))
        self._hide(scores)
        return queries, keys, values, scores.softmax(-1)

    @abstractmethod
    def take(self, whole: Tensor) -> Tensor:
        """[P, T R, X], a copy of what belongs to the queries in [N, K R, X]; zeros for padded ones."""

    @abstractmethod
    def put(self, rows: Tensor, whole: Tensor) -> None:
        """Writes [P, T R, X] to where the queries are in [N, K R, X]."""

    @abstractmethod
    def add(self, rows: Tensor, whole: Tensor) -> None:
        """Adds [P, S, X] to what is where the keys are in [N, K, X]."""

    @abstractmethod
    def _gather(self, whole: Tensor) -> Tensor:
        """[P, S, X], what belongs to the keys in [N, K, X]."""

    @abstractmethod
    def _hide(self, scores: Tensor) -> None:
        """Of [P, T R, S], those of keys that a query does not see become -inf."""


class _OneTile(Part):
    def __init__(self, row: Row, tile: Tile, future: Tensor) -> None:
        super().__init__(row)
        self._queries, self._own = slice(tile.start, tile.stop), slice(tile.own, tile.stop)
        self._prefix, self._future = slice(tile.prefix_start, tile.prefix_stop), future
        self._count, self._before = tile.stop - tile.start, tile.prefix_stop - tile.prefix_start

    def take(self, whole: Tensor) -> Tensor:
        grouped = self._grouped(whole)
        return torch.empty(grouped.shape, dtype=self.row.dtype, device=whole.device).copy_(grouped).flatten(1, 2)

    def put(self, rows: Tensor, whole: Tensor) -> None:
        grouped = self._grouped(whole)
        grouped.copy_(rows.view(grouped.shape))

    def add(self, rows: Tensor, whole: Tensor) -> None:
        found = rows.transpose(0, 1)
        if self._before:
            whole[self._prefix] += found[: self._before]
        whole[self._own] += found[self._before :]

    def _grouped(self, whole: Tensor) -> Tensor:
        """[K, T, R, X], a view."""
        return whole[self._queries].view(self._count, self.row.key_heads, -1, whole.shape[-1]).transpose(0, 1)

    def _gather(self, whole: Tensor) -> Tensor:
        own = whole[self._own]
        if self._before:
            own = torch.cat([whole[self._prefix], own])
        return own.transpose(0, 1).to(self.row.dtype)

    def _hide(self, scores: Tensor) -> None:
        scores[:, :, -self._count :] += self._future[: scores.shape[1], : self._count]


class _SeveralTiles(Part):
    def __init__(self, row: Row, batch: TileBatch) -> None:
        super().__init__(row)
        self._batch = batch
        self._tiles, self._count, self._seen = batch.shape

    def take(self, whole: Tensor) -> Tensor:
        rows = whole.new_zeros(self._tiles * self._count, *whole.shape[1:], dtype=self.row.dtype)
        rows.index_copy_(0, self._batch.real, whole.index_select(0, self._batch.places).to(rows.dtype))
        grouped = rows.view(self._tiles, self._count, self.row.key_heads, -1, rows.shape[-1])
        return grouped.transpose(1, 2).reshape(self._tiles * self.row.key_heads, -1, rows.shape[-1])

    def put(self, rows: Tensor, whole: Tensor) -> None:
        grouped = rows.view(self._tiles, self.row.key_heads, self._count, -1, rows.shape[-1])
        found = grouped.transpose(1, 2).reshape(-1, *whole.shape[1:]).index_select(0, self._batch.real)
        whole.index_copy_(0, self._batch.places, found.to(whole.dtype))

    def add(self, rows: Tensor, whole: Tensor) -> None:
        grouped = rows.view(self._tiles, self.row.key_heads, self._seen, -1)
        whole.index_add_(0, self._batch.keys, grouped.transpose(1, 2).reshape(-1, *whole.shape[1:]))

    def _gather(self, whole: Tensor) -> Tensor:
        rows = whole.index_select(0, self._batch.keys).to(self.row.dtype)
        return rows.view(self._tiles, self._seen, *whole.shape[1:]).transpose(1, 2).reshape(
            -1, self._seen, whole.shape[-1]
        )  # fmt: skip

    def _hide(self, scores: Tensor) -> None:
        grouped = scores.view(self._tiles, self.row.key_heads, self._count, -1, self._seen)
        grouped.masked_fill_(self._batch.hidden, -torch.inf)
