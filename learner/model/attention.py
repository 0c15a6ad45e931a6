"""Attention over a packed row: completions without padding that share the prompt they follow.

A packed row [1, N] consists of segments. The tokens of a segment attend causally to one another and to all tokens of a
prefix elsewhere in the row, if the segment has one; they see nothing else. So G completions of T tokens with a prompt
of P tokens cost P + G T, and the gradient is exact: the gradient of the prefix's keys and values sums over the
completions (PrefixGrouper, 2506.05433).

Models call these functions through transformers' AttentionInterface, under two names, and no model is patched:
    gleaner_varlen    one FlashAttention call for the whole row (torch.nn.attention.varlen); CUDA sm80 and later, 16 bit
    gleaner_segments  everywhere else: on a CPU tiles of queries; on a GPU, and with a sliding window or a cap of the
                      scores, scaled_dot_product_attention (or `capped`) for each block of segments. A row whose scores
                      have a cap or sinks takes this way on every card
No mask function is registered with them: transformers then makes no mask, and does not search the positions for packed
rows, which would wait for the device. learner.model.packing_check proves at start-up that a model computes correctly
with these functions.

Letters: N tokens of the row, P tokens of a prefix, M tokens of a block; K key heads, R query heads per key head; D, E
widths of a key and a value head; B tiles computed at once, T queries of a tile, S keys that a tile sees.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from learner.batch.layout import Block, Layout, Tile, TileBatch, block_mask

# Parts of a packed row that are computed at once on a CPU: a tile of queries, or a batch of small tiles padded to one
# shape. In the shapes of this section P is the number of products: K for one tile, B K for a batch.


class Row:
    """Query [1, K R, N, D], key [1, K, N, D] and value [1, K, N, E] of a packed row, held as [N, heads, width].

    dtype: the dtype in which all products are computed. sinks: [K R], see `with_sinks`.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None) -> None:
        self.query, self.key, self.value = (x[0].transpose(0, 1) for x in (query, key, value))
        self.scale, self.dtype = scale, torch.promote_types(query.dtype, torch.float32)
        self.key_heads = key.shape[1]
        self.sinks = None if sinks is None else sinks.to(self.dtype)

    def parts(self, alone: Sequence[Tile], batches: Sequence[TileBatch]) -> "Iterator[Part]":
        """Yields a Part for each tile that is computed alone, and for each batch of tiles."""
        longest = max((tile.stop - tile.start for tile in alone), default=0)
        future = torch.full((longest, longest), -torch.inf, dtype=self.dtype, device=self.query.device).triu_(1)
        future = future.repeat_interleave(self.query.shape[1] // self.key_heads, 0)  # [T R, T], to be added to scores
        yield from (_OneTile(self, tile, future) for tile in alone)
        yield from (_SeveralTiles(self, batch) for batch in batches)


class Part(ABC):
    """The queries of a row that are computed at once, with the keys that they see."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def seen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (queries [P, T R, D], scaled; keys [P, S, D]; values [P, S, E]; probabilities [P, T R, S])."""
        queries = self.take(self.row.query).mul_(self.row.scale)
        keys, values = self._gather(self.row.key), self._gather(self.row.value)
        scores = torch.bmm(queries, keys.transpose(1, 2))
        self._hide(scores)
        weights = scores.softmax(-1)
        if self.row.sinks is not None:
            # Rows of scores are ordered by key head, query and head of the key head.
            heads = self.row.sinks.view(1, self.row.key_heads, 1, -1)
            taken = heads.expand(len(scores) // heads.shape[1], -1, scores.shape[1] // heads.shape[3], -1)
            others = scores.logsumexp(-1)
            weights *= torch.sigmoid(others - taken.reshape(others.shape))[..., None]
        return queries, keys, values, weights

    @abstractmethod
    def take(self, whole: Tensor) -> Tensor:
        """Returns [P, T R, X], a copy of the queries' rows in [N, K R, X]; zeros for padded queries."""

    @abstractmethod
    def put(self, rows: Tensor, whole: Tensor) -> None:
        """Writes [P, T R, X] to the queries' rows in [N, K R, X]."""

    @abstractmethod
    def add(self, rows: Tensor, whole: Tensor) -> None:
        """Adds [P, S, X] to the keys' rows in [N, K, X]."""

    @abstractmethod
    def _gather(self, whole: Tensor) -> Tensor:
        """Returns [P, S, X], the keys' rows in [N, K, X]."""

    @abstractmethod
    def _hide(self, scores: Tensor) -> None:
        """Sets the scores [P, T R, S] of keys that a query does not see to -inf, in place."""


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
        """Returns a view [K, T, R, X] of the queries' rows."""
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


# Attention over a packed row on a CPU: a tile of queries at a time, against only the keys that it sees.
#
# torch's kernel, given a block of segments and a mask, computes scores that are then masked: 3.4 M for the ragged
# workload, where 2.4 M are needed. Here a tile of queries of one segment is multiplied with the prefix and the
# segment's tokens up to the tile's last one, so that only a triangle is masked; the query heads that share a key head
# are rows of one product. Probabilities are computed again in the backward pass (FlashAttention 2205.14135, section
# 3.1), so only queries, keys and values are kept. 16-bit dtypes are computed in float32. Small tiles are computed in
# batches (learner.batch.layout).

Tiles = tuple[list[Tile], list[TileBatch]]  # tiles computed alone, and batches of the others

TILE = 128  # queries of a tile; with 64 or 256 the backward pass of the ragged workload is a tenth slower


def attend_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float,
    sinks: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """Returns the attention output [1, N, K R, E] of query [1, K R, N, D], key [1, K, N, D] and value [1, K, N, E];
    differentiable once. sinks: [K R], see `with_sinks`; they get no gradient."""
    tiles = layout.tiles(tile, query.shape[1] * query.shape[3])
    output: Tensor = _Tiles.apply(query, key, value, tiles, scale, sinks)  # type: ignore[no-untyped-call]
    return output


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scale: float, sinks: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.tiles, ctx.scale = tiles, scale
        output = value.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for part in Row(query, key, value, scale, sinks).parts(*tiles):
            _, _, values, weights = part.seen()
            part.put(torch.bmm(weights, values), output)
        return output[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, sinks = ctx.saved_tensors
        row = Row(query, key, value, ctx.scale, sinks)
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
        return to_query, to_key, to_value, None, None, None


# Attention with soft-capped scores, as in Gemma 2 (2408.00118, section 2): softmax(cap tanh(scale q k / cap)) v.
#
# No attention kernel of torch computes it, so the scores are computed here for a tile of queries at a time, and again
# in the backward pass instead of being kept. The memory is a few times heads x QUERIES x keys in float32.

QUERIES = 256  # queries of a tile


def capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """Returns the attention output [B, L, heads, D] of query [B, heads, L, D], key and value [B, heads or fewer, K, D].

    mask: [L, K], added to the scores; None: causal, with K = L.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    tile = partial(checkpoint, _tile, use_reentrant=False, preserve_rng_state=False)
    tiles = []
    for start in range(0, query.shape[2], QUERIES):
        part = query[:, :, start : start + QUERIES]
        tiles.append(tile(part, key, value, None if mask is None else mask[start : start + QUERIES], start, scale, cap))
    return torch.cat(tiles, 2).transpose(1, 2)


def _tile(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, start: int, scale: float, cap: float
) -> Tensor:
    """start: place of the first query, for causal scores."""
    scores = (query @ key.transpose(2, 3)).float() * (scale / cap)
    seen = _causal(start, query.shape[2], key) if mask is None else mask
    weights = (scores.tanh() * cap + seen).softmax(-1)
    return weights.to(value.dtype) @ value


def _causal(start: int, count: int, key: Tensor) -> Tensor:
    places = torch.arange(key.shape[2], device=key.device)
    future = places > places[start : start + count, None]
    return torch.zeros(future.shape, device=key.device).masked_fill_(future, -torch.inf)


# Attention with sinks, as in gpt-oss (2508.10925): beside the keys each head has a learned number, which is one more
# score in the softmax and has no value.
#
# So that torch's kernels compute it, it becomes a key of its own in front of the others, with the value zero. Queries
# and keys have some more dimensions. In two of them that key is 1 and all others are 0, and a query has its head's sink
# there, which two numbers of 16 bits hold more exactly than one. A query of zeros in front keeps plain causal attention
# what it is, without a mask. With a window the keys are cut to those that a tile of queries can see, so that no mask
# grows with the square of a prompt.

SINK_WIDTH = 8  # more dimensions of queries and keys: kernels need a multiple of 8
WINDOW_TILE = 512  # queries of a tile


def with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    """Returns the attention output [B, L, heads, E] of query [B, heads, L, D], key [B, heads or fewer, K, D] and value
    [B, heads or fewer, K, E].

    mask: [L, 1 + K], added to the scores, those of the sink first; None: causal, with K = L. sinks: [heads].
    """
    wanted = sinks.to(torch.promote_types(sinks.dtype, torch.float32)) / scale
    high = wanted.to(query.dtype)
    more = query.new_zeros(query.shape[1], 1, SINK_WIDTH)
    more[:, 0, 0], more[:, 0, 1] = high, wanted - high
    query = torch.cat([query, more.expand(*query.shape[:3], -1)], -1)
    width = value.shape[-1]
    key, value = (F.pad(tensor, (0, SINK_WIDTH, 1, 0)) for tensor in (key, value))
    key[:, :, 0, -SINK_WIDTH : 2 - SINK_WIDTH] = 1
    if mask is None:
        query = F.pad(query, (0, 0, 1, 0))
    output = _kernel(query, key, value, mask, scale)[..., :width]
    return output[:, 1:] if mask is None else output


def row_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, sinks: Tensor
) -> Tensor:
    """Computes causal attention, perhaps with a sliding window, of rows [B, heads, L, D], as `with_sinks` does."""
    length = query.shape[2]
    if window is None or window >= length:
        return with_sinks(query, key, value, None, scale, sinks)
    outputs, masks = [], dict[tuple[int, int], Tensor]()
    for start, own in zip(range(0, length, WINDOW_TILE), torch.split(query, WINDOW_TILE, 2), strict=True):
        before, stop = min(start, window - 1), start + own.shape[2]
        shape = own.shape[2], before
        if shape not in masks:
            masks[shape] = F.pad(block_mask(Block(None, before, [own.shape[2]]), window, query), (1, 0))
        k, v = (tensor[:, :, start - before : stop] for tensor in (key, value))
        outputs.append(with_sinks(own, k, v, masks[shape], scale, sinks))
    return torch.cat(outputs, 1)


VARLEN, SEGMENTS = "gleaner_varlen", "gleaner_segments"
# Whether varlen_attn must be told that there are fewer key heads than query heads; torch 2.11 has no such argument.
ASKS_FOR_GROUPS = "enable_gqa" in signature(varlen_attn).parameters

# Arguments that models pass to every attention function, and that change no result here. Any other argument that is set
# stands for arithmetic (position biases) that these functions do not do.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "return_dict", "seq_idx"})


def kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Returns the names of the attention implementations that can run on the device, the fastest first."""
    fast = device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)
    return [VARLEN, SEGMENTS] if fast else [SEGMENTS]


def _by_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    all_is_seen = cap is None and (window is None or window >= layout.reach)
    if all_is_seen and not query.is_cuda:
        return attend_tiles(query, key, value, layout, scale, sinks)
    # The row is split once, since the backward pass of a slice would fill a whole row with zeros.
    queries, keys, values = (torch.split(tensor, layout.sizes, 2) for tensor in (query, key, value))
    outputs = []
    for index, block in enumerate(layout.blocks):
        q, k, v = queries[index], keys[index], values[index]
        if block.prefix is not None:
            before = layout.before(index, None if sinks is None else window)
            begin = block.prefix_length - before
            k, v = (torch.cat([x[block.prefix][:, :, begin:], x[index]], 2) for x in (keys, values))
        if sinks is None:
            outputs.append(_attend(q, k, v, layout.mask(index, window, query), scale, cap))
        elif block.prefix is None:
            outputs.append(row_with_sinks(q, k, v, scale, window, sinks))
        else:
            outputs.append(with_sinks(q, k, v, layout.mask_with_sink(index, window, query), scale, sinks))
    return torch.cat(outputs, 1)


def _by_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    if cap is not None or sinks is not None:  # FlashAttention's kernel has neither
        return _by_segments(query, key, value, layout, scale, window, cap, sinks)
    ragged = layout.ragged(query.device)
    rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [N, heads, D]
    q, k, v = next(rows), *(ragged.keys.of(tensor) for tensor in rows)
    reach = -1 if window is None else window - 1  # the kernel does not count the query's own key
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if ASKS_FOR_GROUPS else {}
    output = varlen_attn(
        q, k, v, ragged.query_ends, ragged.key_ends, ragged.longest_query, ragged.longest_key,
        scale=scale, window_size=(reach, 0), **grouped,
    )  # fmt: skip
    assert isinstance(output, Tensor)  # it would be a tuple if the logsumexp were asked for
    return output.unsqueeze(0)


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes plain causal attention, perhaps with a sliding window, of rows [B, heads, L, D]."""
    if sinks is not None:
        return row_with_sinks(query, key, value, scale, window, sinks)
    length = query.shape[2]
    mask = None if window is None or window >= length else block_mask(Block(None, 0, [length]), window, query)
    return _attend(query, key, value, mask, scale, cap)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """Returns the attention output [B, L, heads, D] of query [B, heads, L, D]; causal unless there is a mask."""
    return _kernel(query, key, value, mask, scale) if cap is None else capped(query, key, value, mask, scale, cap)


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """As `_attend`, by torch's kernel."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and mask is not None and query.is_cuda:  # on CUDA only the slow kernel takes both
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        grouped = False
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return output.transpose(1, 2)


def _interface(packed: Any) -> Any:
    """Returns an attention function with transformers' signature that calls `packed` for packed rows."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        packed_layout: Layout | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        strange = sorted(name for name, x in others.items() if x is not None and name not in HARMLESS)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if s_aux is not None and (s_aux.requires_grad or softcap is not None):
            raise NotImplementedError("sinks are packed if they are not trained, and scores have no cap beside them")
        if strange or attention_mask is not None or dropout or not causal:
            raise NotImplementedError(
                f"only plain causal attention is packed, got {', '.join(strange) or f'{dropout=}, {causal=}'}"
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if packed_layout is None:
            return _plain(query, key, value, scale, sliding_window, softcap, s_aux), None
        return packed(query, key, value, packed_layout, scale, sliding_window, softcap, s_aux), None

    return attention


AttentionInterface.register(VARLEN, _interface(_by_varlen))
AttentionInterface.register(SEGMENTS, _interface(_by_segments))
