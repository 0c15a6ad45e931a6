"""Generalised advantage estimation over the tokens that the policy sampled. Pure numpy.

A token is an action, and its state all that stands before it. What an environment answers lies between two actions, and
is neither: the token that follows the last one of a turn is the first of the next turn. Letters: as in
learner.batch.rows.
"""

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

# Added to the standard deviation before dividing: advantages that differ by less are noise.
EPSILON = 1e-8


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


def whitened(advantages: Float, trained: npt.NDArray[np.bool_]) -> Float:
    """[M] those of the trained tokens, of mean 0 and standard deviation 1, as in TRL's PPO and OpenRLHF; else 0.

    The scale of an advantage is the reward's, and shrinks as the value learns to tell it; a learning rate that is right
    for one is then right for all. The mean is what the value is wrong by as a whole, which early on is most of it.
    """
    result = np.zeros_like(advantages)
    own = advantages[trained]
    if len(own) > 1:
        result[trained] = (own - own.mean()) / (own.std() + EPSILON)
    return result
