"""Generalised advantage estimation over the tokens that the policy sampled. Pure numpy.

A token is an action, and its state all that stands before it. What an environment answers lies between two actions, and
is neither: the token that follows the last one of a turn is the first of the next turn. Letters: as in
learner.batch.rows.
"""

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

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
