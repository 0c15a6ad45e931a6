"""Advantages and loss coefficients of an optimizer batch: GRPO's advantages (table ADVANTAGES), the weight of a token
in the loss (table LOSSES), and PPO's generalised advantage estimation. Pure functions of numpy arrays.

A function of ADVANTAGES takes `rewards`, one float array [G] per group (G may differ), nan where a completion has no
reward, and returns one float64 array [G] per group. A completion without a reward is left out of every mean and
standard deviation and gets advantage 0; the caller must not train on it. A group whose rewards are all equal, or with
fewer than two rewards, gets exactly 0. Standard deviations are sample standard deviations (divided by n - 1), as in TRL
and verl, so that results compare.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

# EPSILON is added to a standard deviation before dividing (TRL's value): rewards that differ by less than about 1e-4
# are noise.
EPSILON = 1e-4


def has_signal(rewards: Float) -> bool:
    """Whether at least two completions of the group [G] have a reward and their rewards are not all equal."""
    scored = rewards[np.isfinite(rewards)]
    # Rewards are compared by value, since the mean of equal rewards is rounded and their deviation may not be 0.
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

    The standard deviation is that of the rewards as they are, with differences between groups, so that it stays near
    the reward's scale. The standard deviation of centred rewards would shrink with the share of groups that have
    signal, and make the advantages of the last such groups very large.
    """
    every = np.concatenate(rewards)
    scored = every[np.isfinite(every)]
    spread = float(scored.std(ddof=1)) if scored.size >= 2 else 0.0
    return [_centred(one) / (spread + EPSILON) for one in rewards]


def none(rewards: Sequence[Float]) -> list[Float]:
    """r - mean of its group: Dr.GRPO 2503.20783, section 3."""
    return [_centred(one) for one in rewards]


ADVANTAGES: dict[str, Callable[[Sequence[Float]], list[Float]]] = {"group": group, "batch": batch, "none": none}


# The functions of LOSSES, from which learner.loss.kind chooses: the weight of a token in the loss of an optimizer
# batch.
#
# A function gets [completions] T, the number of tokens of every completion of the batch that has a reward, and returns
# [completions] the coefficient of each token of the completion. Coefficients are computed over the whole optimizer
# batch before it is split into micro-batches, so that the gradient does not depend on the split. Completions that are
# skipped since their gradient is exactly 0 still count. With loss.mask_truncated a truncated completion has T = 0, but
# still counts in the number of completions.

Lengths = npt.NDArray[np.int64]
Coefficients = npt.NDArray[np.float64]


def dapo(lengths: Lengths, max_completion_length: int) -> Coefficients:
    """1 / (completion tokens of the batch): every token weighs the same. DAPO 2503.14476, equation 8."""
    return np.full(len(lengths), 1.0 / max(int(lengths.sum()), 1))


def dr_grpo(lengths: Lengths, max_completion_length: int) -> Coefficients:
    """1 / (completions * max_completion_length): a constant, hence unbiased. Dr.GRPO 2503.20783, section 3."""
    return np.full(len(lengths), 1.0 / max(len(lengths) * max_completion_length, 1))


def grpo(lengths: Lengths, max_completion_length: int) -> Coefficients:
    """1 / (T * completions): mean over the sequence, then over completions. DeepSeekMath 2402.03300, equation 3."""
    return 1.0 / (np.maximum(lengths, 1) * max(len(lengths), 1))


LOSSES: dict[str, Callable[[Lengths, int], Coefficients]] = {"dapo": dapo, "dr_grpo": dr_grpo, "grpo": grpo}


# Generalised advantage estimation over the tokens that the policy sampled.
#
# A token is an action; its state is all that stands before it. The tokens of an environment's answer are no actions:
# the last action of a turn is followed by the first action of the next turn. Letters: as in learner.batch.micro_batch.

# A standard deviation below LEAST (GRPO's EPSILON), or below LEAST_SHARE of the mean, is taken for rounding noise.
LEAST, LEAST_SHARE = 1e-4, 1e-5


def gae(
    values: npt.NDArray[np.floating],
    rewards: Float,
    mask: npt.NDArray[np.bool_],
    lengths: npt.NDArray[np.int64],
    *,
    gamma: float,
    lam: float,
) -> Float:
    """Returns [M] advantages: the sum over k of (gamma lam)^k delta of the token k later, where delta = r + gamma V' -
    V and V' is the value of the next token's state, 0 after the last token. Schulman et al. 1506.02438, equation 16.

    A trajectory ends with its last token whether it was cut off or not: there is no later state that could be valued,
    and the reward was given for the trajectory as it is.

    Args:
        values: [M] the value of the state before each token; read only where the mask is true.
        rewards: [M] the reward of each token; read only where the mask is true. A nan makes the advantages of its
            trajectory nan up to that token.
        mask: [M] whether the policy sampled the token; the advantage of other tokens is 0.
        lengths: [R] tokens of each trajectory; trajectories follow each other.
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)[mask]
    counts = np.bincount(owner, minlength=len(lengths))
    place = owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    # The arrays have a row for each trajectory and a column of zeros after the last token, so that one loop over the T
    # tokens computes all trajectories at once.
    value, reward = (np.zeros((len(lengths), counts.max(initial=0) + 1)) for _ in range(2))
    value[place], reward[place] = values[mask], rewards[mask]
    found = np.zeros_like(value)
    for step in range(value.shape[1] - 2, -1, -1):
        delta = reward[:, step] + gamma * value[:, step + 1] - value[:, step]
        found[:, step] = delta + gamma * lam * found[:, step + 1]
    result = np.zeros(len(mask))
    result[mask] = found[place]
    return result


def is_noise(numbers: npt.NDArray[np.floating], known_to: float = 0.0) -> bool:
    """Whether [T] numbers are fewer than two, or differ by no more than rounding, so that dividing them by their
    standard deviation would only scale up noise. known_to: absolute rounding error of the numbers."""
    if len(numbers) < 2:
        return True
    return bool(numbers.std() < max(LEAST, LEAST_SHARE * abs(numbers.mean()), known_to))


def whitened(advantages: Float, trained: npt.NDArray[np.bool_], known_to: float = 0.0) -> Float:
    """Returns [M] the advantages of the trained tokens, shifted and scaled to mean 0 and standard deviation 1 as in
    TRL's PPO and OpenRLHF. Other tokens get 0, and all tokens do if the advantages are noise (is_noise).

    Unscaled advantages have the scale of the reward, and shrink as the value learns to predict it; whitened, one
    learning rate suits all. The mean is the value's average error, which early on is most of an advantage. If all
    advantages are equal, they differ only in the last bits of the values, which depend on how the batch was packed:
    divided by their standard deviation, that noise would make a gradient of full size.

    known_to: absolute rounding error of the advantages.
    """
    result = np.zeros_like(advantages)
    own = advantages[trained]
    if not is_noise(own, known_to):
        result[trained] = (own - own.mean()) / own.std()
    return result
