"""Where completions lie in a packed row, and the blocks of attention that follow from it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Tiles of attention that are computed at once: where completions are short, each for itself is mostly calls.

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


# Segments that share a prefix are computed by one call of the kernel, as long as together they have no more tokens than
# the prefix, or than this many. The call replaces several, and at most half of the scores it computes are masked out.
BLOCK = 128


class Segment(NamedTuple):
    """Tokens [start, stop) of a row, which attend to [prefix_start, prefix_stop) too (empty if they are equal)."""

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0


class Block(NamedTuple):
    """Neighbouring segments that share a prefix, or one segment without."""

    prefix: int | None  # index of the block that is the prefix
    prefix_length: int
    lengths: list[int]  # of its segments


class Layout:
    """The segments of a row, and what the kernels make of them: once for a row, then shared by all layers.

    Args:
        segments: tile the row from 0, in order, none empty; a prefix is a whole segment without a prefix.

    Attributes:
        reach: most tokens that a query sees, itself included.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = list(segments)
        self.reach = max(own.stop - own.start + own.prefix_stop - own.prefix_start for own in self.segments)
        self.blocks = _blocks(self.segments)
        self.sizes = [sum(block.lengths) for block in self.blocks]
        self._made: dict[Any, Any] = {}

    def mask(self, index: int, window: int | None, like: Tensor) -> Tensor | None:
        """[M, P + M], 0 where a query of the block sees a key of prefix and block, else -inf; None if just causal."""
        block = self.blocks[index]
        if block.prefix is None and (window is None or window >= block.lengths[0]):
            return None
        key = index, window, like.dtype
        if key not in self._made:
            self._made[key] = block_mask(block, window, like)
        made: Tensor = self._made[key]
        return made

    def tiles(self, size: int, width: int) -> tuple[list[Tile], list[TileBatch]]:
        """The queries of each segment, `size` at a time: those that are computed alone, and the others in batches."""
        key = "tiles", size, width
        if key not in self._made:
            tiles = [
                Tile(start, min(start + size, own.stop), own.start, own.prefix_start, own.prefix_stop)
                for own in self.segments
                for start in range(own.start, own.stop, size)
            ]
            self._made[key] = batched(tiles, width)
        made: tuple[list[Tile], list[TileBatch]] = self._made[key]
        return made

    def ragged(self, device: torch.device) -> "Ragged":
        """The same for FlashAttention."""
        if "ragged" not in self._made:
            self._made["ragged"] = _ragged(self.segments, device)
        made: Ragged = self._made["ragged"]
        return made


class Ragged(NamedTuple):
    """Segments as FlashAttention wants them; keys are gathered, so that each segment has its prefix before it."""

    keys: Tensor  # [sum of P + T] int64, places in the row
    query_ends: Tensor  # [S + 1] int32, cumulative lengths
    key_ends: Tensor  # [S + 1] int32
    longest_query: int
    longest_key: int


def _blocks(segments: list[Segment]) -> list[Block]:
    blocks: list[Block] = []
    places: dict[tuple[int, int], int] = {}  # of the segments that may be prefixes
    before: Segment | None = None
    for segment in segments:
        length, prefix = segment.stop - segment.start, segment[2:]
        prefix_length = prefix[1] - prefix[0]
        if prefix_length == 0:
            places[segment[:2]] = len(blocks)
            blocks.append(Block(None, 0, [length]))
        elif before and prefix == before[2:] and sum(blocks[-1].lengths) + length <= max(prefix_length, BLOCK):
            blocks[-1].lengths.append(length)
        else:
            blocks.append(Block(places[prefix], prefix_length, [length]))
        before = segment
    return blocks


def block_mask(block: Block, window: int | None, like: Tensor) -> Tensor:
    lengths = np.array(block.lengths)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    places = block.prefix_length + np.arange(len(owners)) - np.repeat(lengths.cumsum() - lengths, lengths)
    owner, place = (torch.from_numpy(values).to(like.device) for values in (owners, places))
    distance = place[:, None] - torch.cat([torch.arange(block.prefix_length, device=like.device), place])
    seen = distance >= 0
    seen[:, block.prefix_length :] &= owner[:, None] == owner
    if window is not None:
        seen &= distance < window
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def _ragged(segments: list[Segment], device: torch.device) -> Ragged:
    keys = [part for s in segments for part in (np.arange(*s[2:]), np.arange(*s[:2]))]
    queries = np.array([s.stop - s.start for s in segments])
    widths = queries + np.array([s.prefix_stop - s.prefix_start for s in segments])
    ends = (np.concatenate([[0], lengths.cumsum()]).astype(np.int32) for lengths in (queries, widths))
    query_ends, key_ends = (torch.from_numpy(values).to(device) for values in ends)
    places = torch.from_numpy(np.concatenate(keys)).to(device)
    return Ragged(places, query_ends, key_ends, int(queries.max()), int(widths.max()))
