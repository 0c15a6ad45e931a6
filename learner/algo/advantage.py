"""Rewards of the groups of one optimizer batch -> advantages. Pure numpy; one function per variant, table ADVANTAGES.

Every function takes `rewards`, one float array [G] per group (G may differ), nan where there is none, and returns one
float64 array [G] per group. A failed sample is left out of every mean and standard deviation and gets advantage 0;
the caller must not train on it. A group whose rewards are all equal, or with fewer than two left, gets exactly 0.

Standard deviations are sample standard deviations (divided by n - 1), as in TRL and verl, so that results compare.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

# Added to a standard deviation before dividing (TRL's value): rewards that differ by less than about 1e-4 are noise.
EPSILON = 1e-4


def has_signal(rewards: Float) -> bool:
    """True if at least two samples of the group [G] were scored and their rewards are not all equal."""
    scored = rewards[np.isfinite(rewards)]
    # Compared by value: the mean of equal rewards is rounded, so a computed deviation need not be exactly 0.
    return bool(scored.size >= 2 and scored.min() != scored.max())


def _centred(rewards: Float) -> Float:
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    return np.asarray(np.nan_to_num(rewards - np.nanmean(rewards)))


def group(rewards: Sequence[Float]) -> list[Float]:
    """(r - mean of its group) / (std of its group + eps): GRPO, DeepSeekMath 2402.03300, section 4.1.2."""
    return [
        _centred(one) / (np.nanstd(one, ddof=1) + EPSILON) if has_signal(one) else np.zeros_like(one) for one in rewards
    ]


def batch(rewards: Sequence[Float]) -> list[Float]:
    """(r - mean of its group) / (std of all rewards of the batch + eps): Lite-PPO 2508.08221; scale_rewards="batch" in
    TRL.

    The standard deviation is that of the rewards as they are, differences between groups included, so that it stays
    near the reward's own scale. That of the centred rewards would shrink with the share of groups that have signal, and
    blow up the advantages of the last of them.
    """
    every = np.concatenate(rewards)
    scored = every[np.isfinite(every)]
    spread = float(scored.std(ddof=1)) if scored.size >= 2 else 0.0
    return [_centred(one) / (spread + EPSILON) for one in rewards]


def none(rewards: Sequence[Float]) -> list[Float]:
    """r - mean of its group: Dr.GRPO 2503.20783, section 3."""
    return [_centred(one) for one in rewards]


ADVANTAGES: dict[str, Callable[[Sequence[Float]], list[Float]]] = {"group": group, "batch": batch, "none": none}
