"""What the learner derives from a batch: of each token its advantage, and of each completion its weight in the loss,
whether it is trained on, and in which update.

Pure. Letters: R completions of the batch, M their tokens, U updates.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from learner.algo.advantage import ADVANTAGES, LOSSES, gae, whitened
from learner.algo.loss import explained_variance
from learner.algo.surrogates import LossConfig
from learner.batch.micro_batch import Rows


class Settings(Protocol):
    """What targets depend on of learner.config.settings.LearnerConfig, which is made from this package's tables."""

    @property
    def loss(self) -> LossConfig: ...

    @property
    def updates_per_batch(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Targets:
    """Of each token, or of each completion."""

    advantages: npt.NDArray[np.float64]  # [M] 0 without a reward
    coefficients: npt.NDArray[np.float64]  # [R] weight of each of its sampled tokens in the loss of its update
    # [R] false without a reward, if it is masked, or if its gradient is exactly 0, as with a loss of one's own none is
    trained: npt.NDArray[np.bool_]
    update: npt.NDArray[np.int64]  # [R] 0 to U - 1, the update that learns from it


def learnable(rows: Rows, loss: LossConfig) -> npt.NDArray[np.bool_]:
    """[R] whether a completion may be trained on at all: it has a reward and is not masked."""
    masked = rows.truncated & loss.mask_truncated
    return np.asarray(np.isfinite(rows.of_rows(np.concatenate([np.empty(0), *rows.rewards]))) & ~masked)


def targets_of(
    rows: Rows, config: Settings, max_completion_length: int, advantages: npt.NDArray[np.float64] | None = None
) -> Targets:
    """Whole groups go to the updates in their order, as evenly as possible. An advantage is worked out over the batch,
    a coefficient over the trajectories of the update, which is an optimizer batch of its own: however many rows a
    trajectory has, it counts once.

    advantages: [M] PPO's, with which all that is learnable trains; None: GRPO's of the groups.

    With loss.mask_truncated (DAPO 2503.14476, section 3.4; mask_truncated_completions in TRL) a completion that was cut
    off has no tokens in the loss; its reward counts in the advantages of its group all the same.
    """
    loss, updates = config.loss, config.updates_per_batch
    if not rows.rewards:
        return Targets(np.empty(0), np.empty(0), np.empty(0, bool), np.empty(0, np.int64))
    rewards = np.concatenate(rows.rewards)
    scored = np.isfinite(rewards)
    lengths = rows.of_trajectories(np.where(rows.truncated & loss.mask_truncated, 0, rows.counts))
    groups = np.arange(len(rows.rewards)) * updates // len(rows.rewards)
    update = np.repeat(groups, [len(group) for group in rows.rewards])
    coefficients = np.zeros(len(rewards))
    for number in range(updates):
        own = scored & (update == number)
        coefficients[own] = LOSSES[loss.kind](lengths[own], max_completion_length)
    trained = learnable(rows, loss)
    if advantages is None:
        of_completions = rows.of_rows(np.concatenate(ADVANTAGES[loss.advantage](rows.rewards)))
        trained &= (of_completions != 0) | (loss.beta > 0) | loss.own
        advantages = np.repeat(of_completions, rows.lengths)
    return Targets(advantages, rows.of_rows(coefficients), trained, rows.of_rows(update))


# What PPO derives from a batch and the values of its tokens: advantages for the policy, returns for the value. Pure.
#
# The KL to a reference is in the policy's loss (learner.loss.beta), as GRPO has it, and not in the rewards: the value
# then tells the reward alone, and what is logged as reward is what is trained on.

Float = npt.NDArray[np.float64]

# Of a value, by which it may be another one if its micro-batch is: in 16 bits 1.2 roundings of its size, root mean
# square, between packed and padded rows (of the tests' Llama).
ROUNDED = 2.0


class Discounts(Protocol):
    """Of learner.config.settings.ValueConfig."""

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
