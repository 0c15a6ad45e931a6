"""A digest of memory sees what an accident does to it, whatever the pieces in which it is read."""

from __future__ import annotations

import pytest
import torch

from rollout import shared_base


def test_one_bit_two_places_type_and_size_are_seen() -> None:
    piece = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = shared_base.digest_of_piece(piece)
    assert shared_base.digest_of_piece(piece.clone().view(10, 100)) == before
    flipped, swapped, sign = piece.clone(), piece.clone(), torch.zeros(4)
    flipped.view(torch.int16)[513] ^= 1
    swapped[[3, 900]] = swapped[[900, 3]]
    others = [flipped, swapped, piece[:-1], piece.view(torch.float16)]
    assert len({before, *map(shared_base.digest_of_piece, others)}) == 5
    assert shared_base.digest_of_piece(sign) != shared_base.digest_of_piece(-sign)


def test_pieces_in_which_it_is_read_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    whole = shared_base.digest_of_piece(piece)
    monkeypatch.setattr(shared_base, "CHUNK", 7)
    assert shared_base.digest_of_piece(piece) == whole
