"""The digest of whole weights, against the published vectors of its hash."""

from rollout.types import digest_of_weights

# From the test vectors of BLAKE3 (github.com/BLAKE3-team/BLAKE3), whose input is the bytes 0, 1, ..., 250, 0, 1, ...
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


def test_it_is_blake3() -> None:
    for length, digest in VECTORS.items():
        payload = bytes(i % 251 for i in range(length))
        assert digest_of_weights(payload) == digest_of_weights(memoryview(payload)) == digest
