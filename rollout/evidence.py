"""Whether an engine's logprobs of the probe tokens follow the learner's from policy version to policy version.

A frozen engine gives the same logprobs for ever. Between two versions of one engine, what always sets it apart from the
learner (kernels, 16 bits, an fp8 cache) cancels. Rounding does not: new weights are rounded anew, on both sides. In 16
bits that can be more than a small training step, so of two honest answers one may stand still while the other moves.
Hence a pair of versions counts only if the learner's logprobs moved FAR times as far between them as they differed from
the engine's at the first: then most of that way is policy, not rounding. A frozen engine falls further behind with each
version, until it is found out. How many versions that takes: benchmarks/engine/delivery_power.py.

Rounding is uneven: in bfloat16 the two sides' logprobs of a token of the demo's probes differ by 0.01 nats (median), of
one token in 2,000, mostly an unlikely one, by 0.5 to 1.7. Squares would let that one decide. So a way is a mean of
absolute values, and the token that lowers the engine's share most is left out: no single token stops a run.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Logprobs = npt.NDArray[np.float32]

FAR = 1.8
ARRIVED = 1 / 5  # share of the learner's way that an engine which has the policy goes at least; a frozen one goes none
FEW = 32  # tokens; with fewer a mean says little
KEPT = 16  # versions, besides the first


class Stuck(NamedTuple):
    """An engine that does not follow. share: the part of the learner's way since version `since` that it went as well;
    way: the length of that way, a mean over the tokens in nats."""

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
            way, off = learner.astype(np.float64) - learner_then, engine_then - learner_then
            if len(way) < FEW:
                continue
            self.settled |= _compare(np.zeros_like(way), way, off) is not None
            found = _compare(engine - engine_then, way, off)
            if found is not None and found[0] < min(ARRIVED, stuck.share if stuck else ARRIVED):
                stuck = Stuck(since, *found)
        (self._later if self._first else self._first).append((version, engine, learner))
        return stuck


def _compare(gone: npt.NDArray[np.floating], way: npt.NDArray[np.float64], off: Logprobs) -> tuple[float, float] | None:
    """Of `gone`, which the engine's logprobs went where the learner's went `way`: the share and the length of that way.
    None if that is too short, for an engine that was `off` by so much before."""
    along = gone * np.sign(way)
    rest = np.argsort(along - ARRIVED * np.abs(way))[1:]
    length = float(np.abs(way[rest]).mean())
    if length <= FAR * np.abs(off[rest]).mean():
        return None
    return float(along[rest].mean()) / length, length
