"""Compute threads of a command that computes in its own process, beside whatever else the machine does."""

import os


def sleeping(count: int | None = None) -> None:
    """Has OpenMP's threads sleep while they wait for one another; `count`: how many there are, where it must be that.

    By default they spin: on cores that others use as well, each waits at full load for one that has no core, and a
    forward pass takes six times as long. What is computed is the same to the bit. To be called before torch loads; what
    the user's environment says of the waiting stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)
