"""Which problems were issued, are done, or must be issued again: the data ledger of a run.

Order is a pure function of (seed, epoch), so a position identifies a group for ever. The state is a low-water mark and
the sparse set of positions done above it; it is committed together with the weights, which makes each problem count
exactly once along the surviving line of checkpoints.
"""

import heapq
from collections.abc import Iterable


class Cursor:
    """Hands out positions; knows what to hand out again."""

    def __init__(self) -> None:
        self.restore(0, ())

    def restore(self, low: int, done: Iterable[int]) -> None:
        """Continues from a saved state; everything that was not consumed by then is issued again."""
        self.low = low  # every position below is done
        self._done = set(done)
        self._next = low
        self._again: list[tuple[int, int]] = []  # heap of (position, attempt)

    def issue(self) -> tuple[int, int]:
        """The next (position, attempt): what failed or went stale first, then the stream in order."""
        if self._again:
            return heapq.heappop(self._again)
        self._next = max(self._next, self.low)  # finishing one position may close a gap up to restored ones
        while self._next in self._done:
            self._next += 1
        self._next += 1
        return self._next - 1, 0

    def again(self, position: int, attempt: int) -> None:
        """This attempt was lost or dropped: the position will be issued once more."""
        heapq.heappush(self._again, (position, attempt + 1))

    def finish(self, position: int) -> None:
        """The learner has consumed this position; doing that twice is a bug."""
        if position < self.low or position in self._done:
            raise ValueError(f"cursor: position {position} was consumed twice")
        self._done.add(position)
        while self.low in self._done:
            self._done.remove(self.low)
            self.low += 1

    @property
    def consumed(self) -> int:
        """How many positions the learner has consumed."""
        return self.low + len(self._done)

    def state(self) -> dict[str, object]:
        """JSON-able arguments for `restore`."""
        return {"low": self.low, "done": sorted(self._done)}
