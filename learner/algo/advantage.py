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


# The weight of a completion's tokens in the loss of an optimizer batch: what learner.loss.kind chooses. Pure numpy.
#
# A function gets [completions] T, the tokens of every completion of the batch that has a reward, and returns
# [completions] the coefficient of each of its tokens. It is worked out over the whole optimizer batch before that is
# split, so that the gradient does not depend on the split. Completions that are skipped since their gradient is exactly
# 0 still count. Tokens of a truncated completion are no tokens of the loss with loss.mask_truncated: T counts the
# others, so that dapo is the mean over them and grpo that of each completion's, while dr_grpo's constant stays what it
# is; in the number of completions one counts even if none of it is trained on.

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


# Generalised advantage estimation over the tokens that the policy sampled. Pure numpy.
#
# A token is an action, and its state all that stands before it. What an environment answers lies between two actions,
# and is neither: the token that follows the last one of a turn is the first of the next turn. Letters: as in
# learner.batch.micro_batch.

# A standard deviation below them is that of rounding: of rewards and values near 1 (what GRPO adds to one before it
# divides), and, as a share of the mean, of great ones.
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
    """[M] advantages: the sum over k of (gamma lam)^k delta of the token k later, delta = r + gamma V' - V, with the
    value V' of the next token's state, 0 behind the last. Schulman et al. 1506.02438, equation 16.

    A trajectory ends with its last token whether it was cut off or not: there is no state behind it to be valued, and
    its reward was given for what there is.

    Args:
        values: [M] of the state before each token; what stands where the mask is false is not read.
        rewards: [M] of each token, likewise; nan makes nan of its trajectory up to there.
        mask: [M] whether the policy sampled the token; 0 is returned where it did not.
        lengths: [R] tokens of each trajectory, which follow each other.
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)[mask]
    counts = np.bincount(owner, minlength=len(lengths))
    place = owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    # A row for each trajectory, with a column of zeros behind the last token: T steps for all trajectories at once.
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
    """Whether so few of [T] are there, or they differ by so little, that a division by their standard deviation would
    make differences of what is none. known_to: what the numbers are made of has been rounded to about that."""
    if len(numbers) < 2:
        return True
    return bool(numbers.std() < max(LEAST, LEAST_SHARE * abs(numbers.mean()), known_to))


def whitened(advantages: Float, trained: npt.NDArray[np.bool_], known_to: float = 0.0) -> Float:
    """[M] those of the trained tokens, of mean 0 and standard deviation 1, as in TRL's PPO and OpenRLHF; else 0, and 0
    of all where they differ by no more than rounding (is_noise).

    The scale of an advantage is the reward's, and shrinks as the value learns to tell it; a learning rate that is right
    for one is then right for all. The mean is what the value is wrong by as a whole, which early on is most of it. Of
    equal advantages nothing is left but the last bits of the values, which depend on how the batch was packed: divided
    by their own deviation they would be a gradient of full size.
    """
    result = np.zeros_like(advantages)
    own = advantages[trained]
    if not is_noise(own, known_to):
        result[trained] = (own - own.mean()) / own.std()
    return result
