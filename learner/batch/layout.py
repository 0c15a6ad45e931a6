"""Where completions lie in a packed row, the blocks and tiles in which learner.model.attention computes the row, and
the pieces in which learner.model.recurrence does.

`Layout` is the entry: it holds the segments of a row and makes masks, tiles, FlashAttention's arguments or pieces of
them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tiles of short completions are computed in batches, since the overhead of a call takes longer than a small tile.

# A tile is small up to SMALL = queries * keys * width. A batch of small tiles is 3 to 1.1 times faster than single
# calls, for a width of 128 to 384 (all heads of a token together). With larger tiles the padding costs more than the
# calls; with fewer than FEWEST tiles the copies do.
SMALL, FEWEST = 2**20, 8

# Most scores that one head computes in a batch of tiles, padding included: in number, and as a multiple of the scores
# that are needed.
MOST_SCORES, MOST_PADDED = 2**16, 3


class Tile(NamedTuple):
    """Queries [start, stop) of the segment that begins at `own`. They see the prefix [prefix_start, prefix_stop), and
    the segment up to themselves."""

    start: int
    stop: int
    own: int
    prefix_start: int
    prefix_stop: int


class TileBatch(NamedTuple):
    """B tiles, padded to T queries and S keys. The keys of a tile are the prefix, then the segment's own tokens up to
    the tile's last query.

    Padding repeats the tile's last token. The output of a padded query is dropped, and no query sees a padded key.
    """

    keys: Tensor  # [B S] int64, index of each key in the row
    hidden: Tensor  # [B, 1, T, 1, S] bool, true for a key that the query does not see
    real: Tensor  # [M] int64, indices in [B T] of the queries that are not padding
    places: Tensor  # [M] int64, index of those queries in the row

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, T, S)."""
        tiles, _, queries, _, keys = self.hidden.shape
        return tiles, queries, keys


def batched(tiles: Sequence[Tile], width: int) -> tuple[list[Tile], list[TileBatch]]:
    """Returns the tiles that are computed alone, and the others in batches.

    width: numbers of all heads of a token together.
    """
    small = [tile for tile in tiles if math.prod(_size(tile)) * width <= SMALL]
    # Prompts have as many keys as queries, so they are batched apart from completions, which have more keys.
    prompts = [tile for tile in small if tile.prefix_start == tile.prefix_stop]
    completions = [tile for tile in small if tile.prefix_start < tile.prefix_stop]
    parts = [part for kind in (prompts, completions) for part in _alike(sorted(kind, key=_size))]
    batches = [part for part in parts if len(part) >= FEWEST]
    together = {tile for part in batches for tile in part}
    return [tile for tile in tiles if tile not in together], [_batch(part) for part in batches]


def _size(tile: Tile) -> tuple[int, int]:
    """Returns (keys, queries)."""
    return tile.prefix_stop - tile.prefix_start + tile.stop - tile.own, tile.stop - tile.start


def _alike(tiles: Sequence[Tile]) -> list[list[Tile]]:
    """Divides the tiles, in their order, into parts whose padding is within the limits."""
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


# Segments that share a prefix are computed in one call of the kernel, as long as together they have no more tokens than
# the prefix, or than BLOCK. At most half of the scores that the call computes are then masked out.
BLOCK = 128


class Segment(NamedTuple):
    """Tokens [start, stop) of a row, which attend causally to one another and to all of [prefix_start, prefix_stop).
    The prefix is empty if its two ends are equal."""

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0


class Block(NamedTuple):
    """Neighbouring segments that share a prefix, or one segment without a prefix."""

    prefix: int | None  # index of the block that is the prefix
    prefix_length: int
    lengths: list[int]  # tokens of each segment


class Layout:
    """The segments of a packed row, and a cache of what layers derive from them, which all of them share.

    Args:
        segments: none is empty, and in order they cover the row from 0; a prefix is a whole segment without a prefix.

    Attributes:
        reach: most tokens that a query sees, itself included.
        blocks: the segments, joined into blocks.
        sizes: tokens of each block.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = list(segments)
        self.reach = max(own.stop - own.start + own.prefix_stop - own.prefix_start for own in self.segments)
        self.blocks = _blocks(self.segments)
        self.sizes = [sum(block.lengths) for block in self.blocks]
        self._made: dict[Any, Any] = {}

    def mask(self, index: int, window: int | None, like: Tensor) -> Tensor | None:
        """Returns the attention bias [M, P + M] of a block of M tokens with a prefix of P: 0 where a query sees a key,
        else -inf. It is None if plain causal attention does the same.

        index: index of the block. window: tokens of the sliding window; None: there is none. like: a tensor that gives
        dtype and device.
        """
        block = self.blocks[index]
        if window is not None and window >= self.reach:
            window = None  # so that layers with a window and layers without share their masks
        if block.prefix is None and (window is None or window >= block.lengths[0]):
            return None
        key = index, window, like.dtype
        if key not in self._made:
            self._made[key] = block_mask(block, window, like)
        made: Tensor = self._made[key]
        return made

    def before(self, index: int, window: int | None) -> int:
        """Returns how many of the last tokens of its prefix a block can see."""
        length = self.blocks[index].prefix_length
        return length if window is None else min(length, window - 1)

    def mask_with_sink(self, index: int, window: int | None, like: Tensor) -> Tensor:
        """Returns the attention bias [M, 1 + before + M] of a block that has a prefix: as `mask`, of those tokens of
        the prefix that the block can see, and behind a first column for what every query sees."""
        key = index, window, like.dtype, "sink"
        if key not in self._made:
            seen = self.blocks[index]._replace(prefix_length=self.before(index, window))
            self._made[key] = F.pad(block_mask(seen, window, like), (1, 0))
        made: Tensor = self._made[key]
        return made

    def tiles(self, size: int, width: int) -> tuple[list[Tile], list[TileBatch]]:
        """Returns the queries of each segment in tiles of `size`: tiles that are computed alone, and batches of the
        others (see `batched`)."""
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
        """Returns the segments as FlashAttention's arguments."""
        if "ragged" not in self._made:
            self._made["ragged"] = _ragged(self.segments, device)
        made: Ragged = self._made["ragged"]
        return made

    def preceded(self, before: int, device: torch.device) -> "Preceded":
        """Returns the segments, before each of which are the last `before` tokens of its prefix."""
        key = "preceded", before
        if key not in self._made:
            self._made[key] = _preceded(self.segments, before, device)
        made: Preceded = self._made[key]
        return made

    def pieces(self, chunk: int, device: torch.device) -> "Pieces":
        """Returns the segments in pieces that begin at multiples of `chunk` tokens."""
        key = "pieces", chunk
        if key not in self._made:
            self._made[key] = _pieces(self.segments, chunk, device)
        made: Pieces = self._made[key]
        return made


class Gather(NamedTuple):
    """Which of N rows to take, some of them several times: prompts, once for each completion."""

    taken: Tensor  # [M] int64, indices of rows
    first: Tensor  # [N] int64, a place of each row in `taken`; any for a row that is not taken
    uses: list[tuple[Tensor, Tensor]]  # rows [R] that are taken U times, and their places [U, R]; for each U but 1

    def of(self, rows: Tensor) -> Tensor:
        """Returns [M, ...] of [N, ...]; differentiable once.

        The gradient of a row is summed in float32, in an order that depends on shapes alone. The backward pass of
        index_select would add in the dtype of the rows on a card, so that the error of a prompt's gradient grows with
        the number of completions, and in another order each time."""
        found: Tensor = _Gathered.apply(rows, self)  # type: ignore[no-untyped-call]
        return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return rows.index_select(0, gather.taken)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gather: Gather = ctx.gather
        to_rows = grad.index_select(0, gather.first)
        for rows, places in gather.uses:
            slopes = grad.index_select(0, places.flatten()).view(*places.shape, *grad.shape[1:])
            to_rows.index_copy_(0, rows, slopes.sum(0))  # torch sums 16 bits in float32
        return to_rows, None


def _gather(taken: npt.NDArray[np.int64], count: int, device: torch.device) -> Gather:
    """taken: at least one. count: N."""
    counts = np.bincount(taken, minlength=count)
    places = np.argsort(taken, kind="stable")  # row by row
    begins = counts.cumsum() - counts
    uses = []
    for number in set(counts.tolist()) - {1}:
        rows = np.flatnonzero(counts == number)
        uses.append((rows, places[begins[rows] + np.arange(number)[:, None]]))
    first = places[np.minimum(begins, len(taken) - 1)]
    moved = [(torch.from_numpy(rows).to(device), torch.from_numpy(own).to(device)) for rows, own in uses]
    return Gather(torch.from_numpy(taken).to(device), torch.from_numpy(first).to(device), moved)


class Ragged(NamedTuple):
    """Segments as FlashAttention's arguments. Keys are gathered, so that each segment has its prefix before it."""

    keys: Gather  # sum of P + T keys of the row
    query_ends: Tensor  # [S + 1] int32, cumulative lengths
    key_ends: Tensor  # [S + 1] int32
    longest_query: int
    longest_key: int


def _blocks(segments: list[Segment]) -> list[Block]:
    blocks: list[Block] = []
    places: dict[tuple[int, int], int] = {}  # index of the block of each segment that may be a prefix
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
    return Ragged(
        _gather(np.concatenate(keys), segments[-1].stop, device),
        query_ends,
        key_ends,
        int(queries.max()),
        int(widths.max()),
    )


class Preceded(NamedTuple):
    """The tokens of a row of N tokens, with tokens of the prefix before each segment. Place N stands for a token that
    does not exist, since a prefix may be empty, or shorter than what is asked of it."""

    tokens: Gather  # N + S W tokens of the row: S segments, W tokens before each
    own: Tensor  # [N] int64, place among these tokens of each token of the row


def _preceded(segments: list[Segment], before: int, device: torch.device) -> Preceded:
    nothing, begin = segments[-1].stop, 0
    places: list[npt.NDArray[np.int64]] = []
    own: list[npt.NDArray[np.int64]] = []
    for start, stop, prefix_start, prefix_stop in segments:
        last = np.arange(prefix_stop - before, prefix_stop)
        places += [np.where(last < prefix_start, nothing, last), np.arange(start, stop)]
        begin += before
        own.append(np.arange(begin, begin + stop - start))
        begin += stop - start
    return Preceded(
        _gather(np.concatenate(places), nothing + 1, device), torch.from_numpy(np.concatenate(own)).to(device)
    )


# Segments of different lengths are computed in batches of pieces. A batch ends where no more than this share of its
# rows goes on. So at most a quarter of a batch is padding (beside the last chunk of each segment), and the number of
# batches grows with the logarithm of the number of segments.
GOES_ON = 0.75

Size = tuple[int, int]  # rows of a batch, and tokens of each row


class Pieces(NamedTuple):
    """The segments of a row of N tokens, cut into batches of pieces for a recurrence, which hands on the state at the
    end of a piece. Those without a prefix come first, then those that go on from the state at the end of their prefix.

    In both parts segments are sorted by their length, the longest first. The rows of a batch are the next tokens of the
    first of them, with padding where one has ended.
    """

    order: Tensor  # [X] int64, index in the row of each token of the batches, batch after batch; N stands for padding
    places: Tensor  # [N] int64, index in `order` of each token of the row
    whole: list[Size]  # the batches of segments without a prefix
    following: list[Size]  # the batches of segments with a prefix
    owners: Gather | None  # for each segment with a prefix that prefix, among those without; None: there are none


def _pieces(segments: list[Segment], chunk: int, device: torch.device) -> Pieces:
    by_length = sorted(segments, key=lambda own: own.start - own.stop)
    whole = [own for own in by_length if own.prefix_start == own.prefix_stop]
    following = [own for own in by_length if own.prefix_start < own.prefix_stop]
    nothing = segments[-1].stop
    batches: list[npt.NDArray[np.int64]] = []
    sizes: list[list[Size]] = []
    for part in (whole, following):
        cuts = list(_cuts([own.stop - own.start for own in part], chunk))
        start, stop = np.array(part, np.int64).reshape(-1, len(Segment._fields))[:, :2, None].swapaxes(0, 1)
        tokens = [start[:rows] + np.arange(first, after) for rows, first, after in cuts]
        batches += [np.where(own < stop[: len(own)], own, nothing) for own in tokens]
        sizes.append([(rows, after - first) for rows, first, after in cuts])
    order = np.concatenate([batch.ravel() for batch in batches])
    real = np.flatnonzero(order < nothing)
    places = np.empty(nothing, np.int64)
    places[order[real]] = real
    numbers = {own[:2]: number for number, own in enumerate(whole)}
    owners = [numbers[own[2:]] for own in following]
    gather = _gather(np.array(owners, np.int64), len(whole), device) if owners else None
    of_order, of_places = (torch.from_numpy(values).to(device) for values in (order, places))
    return Pieces(of_order, of_places, sizes[0], sizes[1], gather)


def _cuts(lengths: Sequence[int], chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yields (rows, first token, token after the last) of each batch of segments of these lengths, the longest
    first."""
    first = 0
    while rows := sum(length > first for length in lengths):
        after = min(-(-lengths[int(GOES_ON * rows)] // chunk) * chunk, lengths[0])
        yield rows, first, after
        first = after
