"""Digests of a base model's memory that a card computes as well as a CPU: sums of integers, exact in any order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements at once, as int64: 8 MiB, and as much again for their places and their products
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def digests_of_pieces(pieces: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> digest of each tensor."""
    return {name: digest_of_piece(piece) for name, piece in pieces.items()}


@torch.no_grad()
def digest_of_piece(piece: Tensor) -> str:
    """Hex digest of type, size and bits of a tensor without gaps: the sum of its elements' bits, and their sum
    weighted by position, modulo 2**64. It is made to find an accident, not an attack."""
    bits = piece.detach().reshape(-1).view(_BITS[piece.element_size()])
    positions = torch.arange(min(CHUNK, bits.numel()), device=bits.device)
    plain = weighted = 0
    for start in range(0, bits.numel(), CHUNK):
        values = bits[start : start + CHUNK].to(torch.int64)
        once = int(values.sum())
        plain += once
        weighted += int((values * positions[: len(values)]).sum()) + start * once
    told = f"{piece.dtype} {bits.numel()} {plain % 2**64} {weighted % 2**64}"
    return hashlib.sha256(told.encode()).hexdigest()[:32]
