"""What an evaluation says, from one score per completion, or None where it has none. Numbers only.

Letters: P problems, K sampled completions of each.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DRAWS = 2000  # of the bootstrap
LEVEL = 95  # per cent of its means that lie inside an interval
Z = NormalDist().inv_cdf(0.5 + LEVEL / 200)
FEW = 10  # problems below which percentiles of a bootstrap are too narrow
WILSON, BOOTSTRAP, NONE = "wilson", "bootstrap", "none"


class Estimate(NamedTuple):
    """A mean over so many problems, and its interval of 95 % with the method that it was found by (`interval`): wilson
    or bootstrap. none: there is no interval, and low and high are None."""

    value: float
    low: float | None
    high: float | None
    problems: int
    method: str = BOOTSTRAP  # which earlier versions had alone

    def between(self, mark: str) -> str:
        """Both ends, for people."""
        return "-" if self.low is None or self.high is None else f"{self.low:.3f}{mark}{self.high:.3f}"


class Sampled(NamedTuple):
    """The K completions of one problem: what each answers, and its score."""

    answers: Sequence[str]
    scores: Sequence[float | None]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n completions, c of them correct, hold a correct one: 1 - C(n-c, k) / C(n, k), unbiased for the
    chance of k fresh ones (Chen et al. 2021, 2107.03374, equation 1). Needs 1 <= k <= n and 0 <= c <= n."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k: must have 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority(sampled: Sampled) -> float | None:
    """Score of the answer that most completions give: the mean over those that give it and have one; of several such
    answers, the mean over these (self-consistency, Wang et al. 2022, 2203.11171, with ties drawn at random). None
    where one of them has no score."""
    votes = Counter(sampled.answers)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    pairs = list(zip(sampled.answers, sampled.scores, strict=True))
    scores = [[score for said, score in pairs if said == answer and score is not None] for answer in winners]
    return float(np.mean([np.mean(own) for own in scores])) if all(scores) else None


def interval(values: Sequence[float], seed: int, *, share: bool = False) -> Estimate:
    """Mean of [P] values, and its interval.

    By Wilson where all are 0 or 1. Otherwise of the means of P values drawn from them with replacement (the bootstrap,
    Efron 1979), which says nothing where all values are the same, and too little of a few problems: there a `share`,
    whose values cannot leave 0..1, has Wilson's as well, and another mean has none where all are the same.
    """
    given: npt.NDArray[np.float64] = np.asarray(values, np.float64)
    mean, count = float(given.mean()), len(given)
    same = bool((given == given[0]).all())
    if np.isin(given, (0.0, 1.0)).all() or (share and (same or count < FEW)):
        return Estimate(mean, *wilson(mean, count), count, WILSON)
    if same:
        return Estimate(mean, None, None, count, NONE)
    rng = np.random.default_rng(seed)
    means = np.array([given[rng.integers(0, count, count)].mean() for _ in range(DRAWS)])
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high), count, BOOTSTRAP)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """The interval of a share of which `count` trials have this mean (Wilson 1927, without the correction for
    continuity). Of values between 0 and 1 it is the widest that their mean allows, since no other ones vary more than
    those that are all 0 or 1."""
    centre, scale = (mean + Z * Z / (2 * count)), 1 + Z * Z / count
    half = Z * sqrt(mean * (1 - mean) / count + (Z / (2 * count)) ** 2)
    # At the ends exact, whatever the last bit of a root.
    low, high = (centre - half) / scale, (centre + half) / scale
    return (0.0 if mean == 0 else low, 1.0 if mean == 1 else high)


def summary(
    greedy: Sequence[float | None], sampled: Sequence[Sampled], threshold: float, seed: int
) -> dict[str, Estimate]:
    """Metric -> estimate, over the problems with scores enough for it: mean@K needs one, pass@k needs k; without any
    such problem there is none. `sampled`: [P], or nothing; a completion is correct for pass@k from `threshold` on."""
    values = {"greedy": [score for score in greedy if score is not None]}
    shares = set()  # metrics whose values lie between 0 and 1 for certain
    if sampled:
        count = len(sampled[0].scores)
        scored = [[score for score in one.scores if score is not None] for one in sampled]
        values[f"mean@{count}"] = [float(np.mean(own)) for own in scored if own]
        least = np.float32(threshold)  # as scores are kept: 0.9 would be more than a score of 0.9
        correct = [(len(own), int((np.asarray(own, np.float32) >= least).sum())) for own in scored]
        for k in powers_to(count):
            values[f"pass@{k}"] = [pass_at_k(n, c, k) for n, c in correct if n >= k]
            shares.add(f"pass@{k}")
        values[f"majority@{count}"] = [score for one in sampled if (score := majority(one)) is not None]
        if {score for own in scored for score in own} <= {0.0, 1.0}:
            shares |= {f"mean@{count}", f"majority@{count}"}
    return {name: interval(own, seed, share=name in shares) for name, own in values.items() if own}


def powers_to(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
