"""Tiles of attention that are computed at once: where completions are short, each for itself is mostly calls."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Products of a tile's queries with its keys, up to which its calls take longer than they: then a batch is faster, 3 to
# 1.1 times for heads of 128 to 384 numbers together. Of larger tiles the padding costs more than the calls, and of
# fewer tiles the copies.
SMALL, FEWEST = 2**20, 8

# Of the scores that one head has of the tiles of a batch, with padding: at most so many, and at most so many times
# those that are needed.
MOST_SCORES, MOST_PADDED = 2**16, 3


class Tile(NamedTuple):
    """Queries [start, stop) of a segment that begins at `own`; they see the prefix and the segment up to themselves."""

    start: int
    stop: int
    own: int
    prefix_start: int
    prefix_stop: int


class TileBatch(NamedTuple):
    """B tiles, padded to T queries and S keys: the prefix, then the segment's own tokens up to the tile's last one.

    Padding repeats the tile's last token. What a padded query sees counts nowhere, and no query sees a padded key.
    """

    keys: Tensor  # [B S] int64, places in the row
    hidden: Tensor  # [B, 1, T, 1, S] bool: keys that a query does not see
    real: Tensor  # [M] int64: which of the B T queries are no padding
    places: Tensor  # [M] int64, theirs in the row

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, T, S)."""
        tiles, _, queries, _, keys = self.hidden.shape
        return tiles, queries, keys


def batched(tiles: Sequence[Tile], width: int) -> tuple[list[Tile], list[TileBatch]]:
    """Those that are computed alone, and the others in batches. width: of all heads of a token together."""
    small = [tile for tile in tiles if math.prod(_size(tile)) * width <= SMALL]
    prompts = [tile for tile in small if tile.prefix_start == tile.prefix_stop]  # not like completions: square
    completions = [tile for tile in small if tile.prefix_start < tile.prefix_stop]
    parts = [part for kind in (prompts, completions) for part in _alike(sorted(kind, key=_size))]
    batches = [part for part in parts if len(part) >= FEWEST]
    together = {tile for part in batches for tile in part}
    return [tile for tile in tiles if tile not in together], [_batch(part) for part in batches]


def _size(tile: Tile) -> tuple[int, int]:
    """(keys, queries)."""
    return tile.prefix_stop - tile.prefix_start + tile.stop - tile.own, tile.stop - tile.start


def _alike(tiles: Sequence[Tile]) -> list[list[Tile]]:
    """In their order, in parts that may be batches."""
    parts: list[list[Tile]] = []
    needed = longest = 0
    for tile in tiles:
        keys, queries = _size(tile)
        longest, needed = max(longest, queries), needed + keys * queries
        padded = (len(parts[-1]) + 1) * longest * keys if parts else 0
        if not parts or padded > min(MOST_SCORES, MOST_PADDED * needed):
            parts.append([])
            longest, needed = queries, keys * queries
        parts[-1].append(tile)
    return parts


def _batch(tiles: Sequence[Tile]) -> TileBatch:
    start, stop, own, prefix_start, prefix_stop = np.array(tiles).T[:, :, None]
    keys, queries = (max(sizes) for sizes in zip(*map(_size, tiles), strict=True))
    query, key = np.arange(queries), np.arange(keys)
    prefix = prefix_stop - prefix_start
    query_places = np.minimum(start + query, stop - 1)
    key_places = np.where(key < prefix, prefix_start + key, np.minimum(own + key - prefix, stop - 1))
    real = np.flatnonzero(start + query < stop)
    hidden = key > (prefix + start - own + query)[:, :, None]
    return TileBatch(
        torch.from_numpy(key_places.ravel()),
        torch.from_numpy(hidden[:, None, :, None]),
        torch.from_numpy(real),
        torch.from_numpy(query_places.ravel()[real]),
    )
