"""What an evaluation says, from one score per completion, or None where it has none. Numbers only.

Letters: P problems, K sampled completions of each.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DRAWS = 2000  # of the bootstrap
LEVEL = 95  # per cent of its means that lie inside an interval


class Estimate(NamedTuple):
    """A mean over so many problems, and its bootstrap interval of 95 %."""

    value: float
    low: float
    high: float
    problems: int


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


def interval(values: Sequence[float], seed: int) -> Estimate:
    """Mean of [P] values, and the interval of the means of P values drawn from them with replacement (Efron 1979)."""
    given: npt.NDArray[np.float64] = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    means = np.array([given[rng.integers(0, len(given), len(given))].mean() for _ in range(DRAWS)])
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Estimate(float(given.mean()), float(low), float(high), len(given))


def summary(
    greedy: Sequence[float | None], sampled: Sequence[Sampled], threshold: float, seed: int
) -> dict[str, Estimate]:
    """Metric -> estimate, over the problems with scores enough for it: mean@K needs one, pass@k needs k; without any
    such problem there is none. `sampled`: [P], or nothing; a completion is correct for pass@k from `threshold` on."""
    values = {"greedy": [score for score in greedy if score is not None]}
    if sampled:
        count = len(sampled[0].scores)
        scored = [[score for score in one.scores if score is not None] for one in sampled]
        values[f"mean@{count}"] = [float(np.mean(own)) for own in scored if own]
        least = np.float32(threshold)  # as scores are kept: 0.9 would be more than a score of 0.9
        correct = [(len(own), int((np.asarray(own, np.float32) >= least).sum())) for own in scored]
        for k in powers_to(count):
            values[f"pass@{k}"] = [pass_at_k(n, c, k) for n, c in correct if n >= k]
        values[f"majority@{count}"] = [score for one in sampled if (score := majority(one)) is not None]
    return {name: interval(own, seed) for name, own in values.items() if own}


def powers_to(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
