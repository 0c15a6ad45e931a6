"""Whether an engine's answers go where the learner's go, over all the versions since the probe tokens were chosen.

An engine that is frozen answers today as it did then. Between two versions of the same engine what sets it apart from
the learner (kernels, 16 bits, an fp8 cache) cancels, but for rounding: new weights, new roundings, on both sides. In 16
bits that is more than a small step: of two honest answers one may then stand still while the other moves. So a pair of
versions says something only if the learner went FAR times as far between them as its logprobs were off the engine's at
the first: then most of its way is policy, not rounding. A frozen engine falls behind further with each version, until
it shows. How many that takes: benchmarks/engine/delivery_power.py.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Logprobs = npt.NDArray[np.float32]

FAR = 2.0
ARRIVED = 1 / 3  # of the learner's way, at least, by an engine that has the policy
FEW = 32  # tokens; with fewer a mean says little
KEPT = 16  # versions, besides the first


class Stuck(NamedTuple):
    """The share of the learner's way since version `since` that the engine went, and that way's rms in nats."""

    since: int
    share: float
    way: float


class Evidence:
    """Of one worker. Forgets everything when the probe tokens change.

    settled: whether a frozen engine would have been found out by now, on these tokens.
    """

    def __init__(self) -> None:
        self.settled = False
        self._ids: tuple[int, ...] = ()
        self._first: list[tuple[int, Logprobs, Logprobs]] = []
        self._later: deque[tuple[int, Logprobs, Logprobs]] = deque(maxlen=KEPT)

    def add(self, version: int, ids: tuple[int, ...], engine: Logprobs, learner: Logprobs) -> Stuck | None:
        """[N-1] logprobs of the N tokens, of both. The version since which the engine has least gone with the
        learner; None if it has, or nothing can be said yet."""
        if ids != self._ids:
            self._ids, self.settled = ids, False
            self._first.clear()
            self._later.clear()
        stuck = None
        for since, engine_then, learner_then in [*self._first, *self._later]:
            way = learner.astype(np.float64) - learner_then
            if len(way) < FEW or _rms(way) <= FAR * _rms(engine_then - learner_then):
                continue
            self.settled = True
            share = float((engine - engine_then) @ way / (way @ way))
            if share < min(ARRIVED, stuck.share if stuck else ARRIVED):
                stuck = Stuck(since, share, _rms(way))
        (self._later if self._first else self._first).append((version, engine, learner))
        return stuck


def _rms(values: npt.NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
