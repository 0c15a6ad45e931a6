"""Attention over a packed row: completions without padding that share the prompt they follow.

A packed row [1, N] is tiled by segments. The tokens of a segment attend to a prefix elsewhere in the row, if it has
one, and causally to themselves; nothing else is seen. So G completions of P + T tokens cost P + G T, and the gradient
is exact: that of the prefix's keys and values sums over the completions (PrefixGrouper, 2506.05433).

It reaches a model through transformers' AttentionInterface, under two names, and no model is patched:
    gleaner_varlen    one FlashAttention call for the whole row (torch.nn.attention.varlen); CUDA sm80 and later, 16 bit
    gleaner_segments  scaled_dot_product_attention per block of segments; everywhere else
No mask function is registered beside them: transformers then makes no mask, and does not search the positions for
packed rows, which would wait for the device. learner.packing proves at start-up that a model honours all this.
Letters: N tokens of the row, D head dimension, S segments, P tokens of a prefix, M tokens of a block.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from learner.capped_attention import capped

VARLEN, SEGMENTS = "gleaner_varlen", "gleaner_segments"

# Segments of one prefix are computed together while they hold no more tokens than it, or than this many: one call of
# the kernel then replaces several, and the scores that it computes in vain are at most as many as those it needs.
BLOCK = 128

# What models hand to every attention function and what changes nothing here; any other argument that is set stands for
# arithmetic (sinks, position biases) that is not done here.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "return_dict"})


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
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = list(segments)
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
            self._made[key] = _mask(block, window, like)
        made: Tensor = self._made[key]
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


def kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Names of attention implementations that may run here, the fastest first."""
    fast = device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)
    return [VARLEN, SEGMENTS] if fast else [SEGMENTS]


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


def _mask(block: Block, window: int | None, like: Tensor) -> Tensor:
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


def _by_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> Tensor:
    # One split: the backward pass of as many slices would fill a whole row with zeros for each.
    queries, keys, values = (torch.split(tensor, layout.sizes, 2) for tensor in (query, key, value))
    outputs = []
    for index, block in enumerate(layout.blocks):
        k, v = keys[index], values[index]
        if block.prefix is not None:
            k, v = torch.cat([keys[block.prefix], k], 2), torch.cat([values[block.prefix], v], 2)
        outputs.append(_attend(queries[index], k, v, layout.mask(index, window, query), scale, cap))
    return torch.cat(outputs, 1)


def _by_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> Tensor:
    if cap is not None:  # which the kernel does not know
        return _by_segments(query, key, value, layout, scale, window, cap)
    ragged = layout.ragged(query.device)
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, heads, D]
    q, k, v = next(rows), *(tensor.index_select(0, ragged.keys) for tensor in rows)
    reach = -1 if window is None else window - 1  # the kernel counts the keys before the query's own
    output = varlen_attn(
        q, k, v, ragged.query_ends, ragged.key_ends, ragged.longest_query, ragged.longest_key,
        scale=scale, window_size=(reach, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(output, Tensor)  # a tuple only if the logsumexp is asked for
    return output[None]


def _plain(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None = None
) -> Tensor:
    """Rows [B, heads, L, D] that are causal and nothing else."""
    length = query.shape[2]
    mask = None if window is None or window >= length else _mask(Block(None, 0, [length]), window, query)
    return _attend(query, key, value, mask, scale, cap)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """[B, L, heads, D] from [B, heads, L, D]; causal unless there is a mask."""
    if cap is not None:
        return capped(query, key, value, mask, scale, cap)
    grouped = query.shape[1] != key.shape[1]
    if grouped and mask is not None and query.is_cuda:  # there no kernel but the slow one takes both
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        grouped = False
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return output.transpose(1, 2)


def _interface(packed: Any) -> Any:
    """An attention function as transformers calls it, around one that computes packed rows."""

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
        packed_layout: Layout | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        strange = sorted(name for name, x in others.items() if x is not None and name not in HARMLESS)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if strange or attention_mask is not None or dropout or not causal:
            raise NotImplementedError(
                f"only plain causal attention is packed, got {', '.join(strange) or f'{dropout=}, {causal=}'}"
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if packed_layout is None:
            return _plain(query, key, value, scale, sliding_window, softcap), None
        return packed(query, key, value, packed_layout, scale, sliding_window, softcap), None

    return attention


AttentionInterface.register(VARLEN, _interface(_by_varlen))
AttentionInterface.register(SEGMENTS, _interface(_by_segments))
