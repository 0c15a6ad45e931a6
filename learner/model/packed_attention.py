"""Attention over a packed row: completions without padding that share the prompt they follow.

A packed row [1, N] is tiled by segments. The tokens of a segment attend to a prefix elsewhere in the row, if it has
one, and causally to themselves; nothing else is seen. So G completions of P + T tokens cost P + G T, and the gradient
is exact: that of the prefix's keys and values sums over the completions (PrefixGrouper, 2506.05433).

It reaches a model through transformers' AttentionInterface, under two names, and no model is patched:
    gleaner_varlen    one FlashAttention call for the whole row (torch.nn.attention.varlen); CUDA sm80 and later, 16 bit
    gleaner_segments  everywhere else: on a CPU tiles of queries (learner.model.segment_attention); on a card, and where
                      a window or a cap limits what is seen, scaled_dot_product_attention per block of segments
No mask function is registered beside them: transformers then makes no mask, and does not search the positions for
packed rows, which would wait for the device. learner.model.packing_check proves at start-up that a model honours all
this. Letters: N tokens of the row, D head dimension, S segments, P tokens of a prefix, M tokens of a block.
"""

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from learner.batch.layout import Block, Layout, block_mask
from learner.model.capped_attention import capped
from learner.model.segment_attention import attend_tiles

VARLEN, SEGMENTS = "gleaner_varlen", "gleaner_segments"
ASKS_FOR_GROUPS = "enable_gqa" in signature(varlen_attn).parameters  # torch 2.11 takes fewer key heads without a word

# What models hand to every attention function and what changes nothing here; any other argument that is set stands for
# arithmetic (sinks, position biases) that is not done here.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "return_dict"})


def kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Names of attention implementations that may run here, the fastest first."""
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
) -> Tensor:
    all_is_seen = cap is None and (window is None or window >= layout.reach)
    if all_is_seen and not query.is_cuda:
        return attend_tiles(query, key, value, layout, scale)
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
    rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [N, heads, D]
    q, k, v = next(rows), *(tensor.index_select(0, ragged.keys) for tensor in rows)
    reach = -1 if window is None else window - 1  # the kernel counts the keys before the query's own
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if ASKS_FOR_GROUPS else {}
    output = varlen_attn(
        q, k, v, ragged.query_ends, ragged.key_ends, ragged.longest_query, ragged.longest_key,
        scale=scale, window_size=(reach, 0), **grouped,
    )  # fmt: skip
    assert isinstance(output, Tensor)  # a tuple only if the logsumexp is asked for
    return output.unsqueeze(0)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None = None
) -> Tensor:
    """Rows [B, heads, L, D] that are causal and nothing else."""
    length = query.shape[2]
    mask = None if window is None or window >= length else block_mask(Block(None, 0, [length]), window, query)
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
