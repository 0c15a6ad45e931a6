"""Which rank takes which micro-batch: a pure function that every rank computes for itself."""

from collections.abc import Sequence


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The places of each rank's micro-batches, in order; some ranks have none where there are fewer than ranks.

    The largest first, each to the rank that has least so far, the lowest of equals: the fullest has at most 4/3 of the
    least that is possible (Graham 1969), and no more than the emptiest and one micro-batch together.

    Args:
        sizes: tokens of each micro-batch, padding included.
    """
    own: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        rank = min(range(ranks), key=filled.__getitem__)
        own[rank].append(place)
        filled[rank] += sizes[place]
    return [sorted(places) for places in own]
