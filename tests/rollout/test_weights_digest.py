"""The digest of whole weights, against hashlib step by step."""

import hashlib

from rollout.types import digest_of_pieces

PIECE = 1 << 24


def test_it_is_of_the_digests_of_pieces() -> None:
    payload = bytes(range(256)) * (2 * PIECE // 256) + b"rest"
    pieces = [payload[:PIECE], payload[PIECE : 2 * PIECE], b"rest"]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    assert digest_of_pieces(payload) == digest_of_pieces(memoryview(payload)) == expected
    assert digest_of_pieces(payload[:-1] + b"T") != expected
