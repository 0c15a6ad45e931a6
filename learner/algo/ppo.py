"""What PPO derives from a batch and the values of its tokens: advantages for the policy, returns for the value. Pure.

The KL to a reference is in the policy's loss (learner.loss.beta), as GRPO has it, and not in the rewards: the value
then tells the reward alone, and what is logged as reward is what is trained on.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from learner.algo.gae import gae, whitened
from learner.algo.value_loss import explained_variance
from learner.batch.rows import Rows

Float = npt.NDArray[np.float64]

# Of a value, by which it may be another one if its micro-batch is: in 16 bits 1.2 roundings of its size, root mean
# square, between packed and padded rows (of the tests' Llama).
ROUNDED = 2.0


class Discounts(Protocol):
    """Of learner.config.learner.ValueConfig."""

    @property
    def gamma(self) -> float: ...

    @property
    def lam(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Assessment:
    """Of each token of a batch; 0 where it is not trained on."""

    values: Float  # [M] of the state before the token
    returns: Float  # [M] what the values are to be: value and advantage
    advantages: Float  # [M] whitened
    trained: npt.NDArray[np.bool_]  # [M]
    known_to: float = 0.0  # about what the values have been rounded to

    def metrics(self) -> dict[str, float]:
        """value/mean and value/explained_variance over the trained tokens, as far as there are any."""
        values, returns = self.values[self.trained], self.returns[self.trained]
        if len(values) == 0:
            return {}
        explained = explained_variance(values, returns, self.known_to)
        return {"value/mean": float(values.mean())} | (
            {} if explained is None else {"value/explained_variance": explained}
        )


def assess(
    rows: Rows,
    values: npt.NDArray[np.floating],
    trained: npt.NDArray[np.bool_],
    config: Discounts,
    rounding: float = 2**-23,
) -> Assessment:
    """Args:
    values: [M] of the state before each token; read where a trained completion was sampled.
    trained: [R] the completions that are trained on.
    rounding: the distance from 1 to the next number of the type that the values were computed in.
    """
    sampled = np.ones(len(rows.completions), np.bool_) if rows.sampled is None else rows.sampled
    own = np.repeat(trained, rows.lengths) & sampled
    known = np.where(own, values, 0.0).astype(np.float64)
    rewards = np.where(own, token_rewards(rows), 0.0)
    advantages = gae(known, rewards, sampled, rows.lengths, gamma=config.gamma, lam=config.lam) * own
    known_to = ROUNDED * rounding * float(np.sqrt(np.square(known[own]).mean())) if own.any() else 0.0
    return Assessment(known, known + advantages, whitened(advantages, own, known_to), own, known_to)


def token_rewards(rows: Rows) -> Float:
    """[M] of each token: a turn's reward at the turn's last one, and all else that the trajectory got at the last one
    that the policy sampled; nan there without a reward."""
    rewards = np.zeros(len(rows.completions)) if rows.turn_rewards is None else rows.turn_rewards.copy()
    owner = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
    rest = np.concatenate([np.empty(0), *rows.rewards]) - np.bincount(owner, rewards, minlength=len(rows.lengths))
    places, some = rows.places(range(len(rows.lengths))), rows.counts > 0
    rewards[places[np.cumsum(rows.counts)[some] - 1]] += rest[some]
    return rewards
