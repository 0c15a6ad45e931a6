"""Attention with soft-capped scores, as Gemma 2 has it (2408.00118, section 2): softmax(cap tanh(scale q k / cap)) v.

No attention kernel of torch does it, so the scores are formed here, of a tile of queries at a time, and once more in
the backward pass instead of being kept: what is held is one tile, heads x QUERIES x keys in float32 a few times over.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERIES = 256  # of a tile


def capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """[B, L, heads, D] from query [B, heads, L, D], key and value [B, heads or fewer, K, D]; mask [L, K] to be added,
    None: causal, with K = L."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    tile = partial(checkpoint, _tile, use_reentrant=False, preserve_rng_state=False)
    tiles = []
    for start in range(0, query.shape[2], QUERIES):
        rows = slice(start, min(start + QUERIES, query.shape[2]))
        seen = _causal(rows, key) if mask is None else mask[rows]
        part = query[:, :, rows]
        tiles.append(tile(part, key, value, seen, scale, cap))
    return torch.cat(tiles, 2).transpose(1, 2)


def _tile(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    scores = (query @ key.transpose(2, 3)).float() * (scale / cap)
    weights = (scores.tanh() * cap + mask).softmax(-1)
    return weights.to(value.dtype) @ value


def _causal(rows: slice, key: Tensor) -> Tensor:
    places = torch.arange(key.shape[2], device=key.device)
    future = places > places[rows, None]
    return torch.zeros(future.shape, device=key.device).masked_fill_(future, -torch.inf)
