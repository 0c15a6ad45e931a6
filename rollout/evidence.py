"""Whether an engine's logprobs of the probe tokens follow the learner's from policy version to policy version.

A frozen engine gives the same logprobs for ever. Between two versions of one engine, what always sets it apart from the
learner (kernels, 16 bits, an fp8 cache) cancels. Rounding does not: new weights are rounded anew, on both sides. In 16
bits that can be more than a small training step, so of two honest answers one may stand still while the other moves.
Hence a pair of versions counts only if the learner's logprobs moved FAR times as far between them as they differed from
the engine's at the first: then most of that way is policy, not rounding. A frozen engine falls further behind with each
version, until it is found out. How many versions that takes: benchmarks/engine/delivery_power.py.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Logprobs = npt.NDArray[np.float32]

FAR = 2.0
ARRIVED = 1 / 3  # share of the learner's way that an engine which has the policy goes at least
FEW = 32  # tokens; with fewer a mean says little
KEPT = 16  # versions, besides the first


class Stuck(NamedTuple):
    """An engine that does not follow. share: the part of the learner's way since version `since` that it went as well;
    way: the length of that way, rms in nats."""

    since: int
    share: float
    way: float


class Evidence:
    """The logprobs of one worker and the learner so far; other probe tokens begin anew.

    settled: whether a frozen engine would have been found out by now, on these tokens.
    """

    def __init__(self) -> None:
        self.settled = False
        self._ids: tuple[int, ...] = ()
        self._first: list[tuple[int, Logprobs, Logprobs]] = []
        self._later: deque[tuple[int, Logprobs, Logprobs]] = deque(maxlen=KEPT)

    def add(self, version: int, ids: tuple[int, ...], engine: Logprobs, learner: Logprobs) -> Stuck | None:
        """Takes both sides' [N-1] logprobs of the N tokens. Returns the version since which the engine has followed the
        learner least, if that is too little; None if it has followed, or if nothing can be said yet."""
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
