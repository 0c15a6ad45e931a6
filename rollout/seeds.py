"""Seeds of what is sampled: the same for the same place in a run, whoever samples it and when."""

import hashlib


def seed_of(*parts: object) -> int:
    """47 bits of them, so that neighbours (seed + j) never meet."""
    return int.from_bytes(hashlib.sha256("-".join(map(str, parts)).encode()).digest()[:6]) >> 1


def group_seed(run_seed: int, position: int, attempt: int) -> int:
    """Sampling seed of a group."""
    return seed_of(run_seed, position, attempt)
