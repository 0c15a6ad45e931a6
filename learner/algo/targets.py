"""The targets that the learner computes from a batch: the advantage of each token; the weight of each completion in the
loss, whether it is trained on, and in which update; and with PPO the returns that the value learns.

Pure functions. Letters: R completions of the batch, M their tokens, U updates.
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
    """The part of learner.config.settings.LearnerConfig that targets depend on. LearnerConfig itself cannot be imported
    here, since it imports this package."""

    @property
    def loss(self) -> LossConfig: ...

    @property
    def updates_per_batch(self) -> int: ...

    @property
    def algorithm(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a batch, for each token or for each completion."""

    advantages: npt.NDArray[np.float64]  # [M] 0 without a reward
    coefficients: npt.NDArray[np.float64]  # [R] weight of each sampled token of the completion in its update's loss
    # [R] false if the completion has no reward, is masked, or is known to have gradient 0 (never with a user's own
    # surrogate, of which that is not known)
    trained: npt.NDArray[np.bool_]
    update: npt.NDArray[np.int64]  # [R] 0 to U - 1, the update that learns from the completion


def learnable(rows: Rows, loss: LossConfig) -> npt.NDArray[np.bool_]:
    """Returns [R] whether a completion may be trained on: it has a reward and is not masked."""
    masked = rows.truncated & loss.mask_truncated
    return np.asarray(np.isfinite(rows.of_rows(np.concatenate([np.empty(0), *rows.rewards]))) & ~masked)


def targets_of(
    rows: Rows, config: Settings, max_completion_length: int, advantages: npt.NDArray[np.float64] | None = None
) -> Targets:
    """Returns the targets of a batch.

    Whole groups go to the updates in their order, as evenly as possible. Advantages are computed over the batch;
    coefficients over the trajectories of an update, in which a trajectory counts once, however many rows it has. A
    teacher (learner.algorithm: distill) has something to say of completions without a reward, too, and their advantage
    is its share of the loss alone (learner.loss.beta).

    With loss.mask_truncated (DAPO 2503.14476, section 3.4; mask_truncated_completions in TRL) a completion that was cut
    off has no tokens in the loss, but its reward counts in the advantages of its group.

    advantages: [M] PPO's advantages, with which all learnable completions are trained on; None: GRPO's are computed
        from the rewards.
    """
    loss, updates = config.loss, config.updates_per_batch
    if not rows.rewards:
        return Targets(np.empty(0), np.empty(0), np.empty(0, bool), np.empty(0, np.int64))
    rewards = np.concatenate(rows.rewards)
    distills = config.algorithm == "distill"
    scored = np.isfinite(rewards) | distills
    lengths = rows.of_trajectories(np.where(rows.truncated & loss.mask_truncated, 0, rows.counts))
    groups = np.arange(len(rows.rewards)) * updates // len(rows.rewards)
    update = np.repeat(groups, [len(group) for group in rows.rewards])
    coefficients = np.zeros(len(rewards))
    for number in range(updates):
        own = scored & (update == number)
        coefficients[own] = LOSSES[loss.kind](lengths[own], max_completion_length)
    if distills:
        nothing = np.zeros(len(rows.completions))
        return Targets(
            nothing, rows.of_rows(coefficients), ~(rows.truncated & loss.mask_truncated), rows.of_rows(update)
        )
    trained = learnable(rows, loss)
    if advantages is None:
        of_completions = rows.of_rows(np.concatenate(ADVANTAGES[loss.advantage](rows.rewards)))
        trained &= (of_completions != 0) | (loss.beta > 0) | loss.own
        advantages = np.repeat(of_completions, rows.lengths)
    return Targets(advantages, rows.of_rows(coefficients), trained, rows.of_rows(update))


# PPO's advantages for the policy and returns for the value.
#
# The KL to a reference is in the policy's loss (learner.loss.beta), as with GRPO, and not in the rewards. So the value
# predicts the reward alone, and the reward that is logged is the reward that is trained on.

Float = npt.NDArray[np.float64]

# A value depends on the micro-batch in which it is computed. ROUNDED bounds the difference, in roundings of a number of
# the values' size: for the tests' Llama in 16 bits it was 1.2 (root mean square) between packed and padded rows.
ROUNDED = 2.0


class Discounts(Protocol):
    """The part of learner.config.settings.ValueConfig that PPO's advantages depend on."""

    @property
    def gamma(self) -> float: ...

    @property
    def lam(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Assessment:
    """PPO's targets for each token of a batch; they are 0 where the token is not trained on."""

    values: Float  # [M] the value of the state before the token
    returns: Float  # [M] the target of the value: value + advantage
    advantages: Float  # [M] whitened
    trained: npt.NDArray[np.bool_]  # [M] whether the token is trained on
    known_to: float = 0.0  # approximate absolute rounding error of the values

    def metrics(self) -> dict[str, float]:
        """Returns value/mean and value/explained_variance over the trained tokens; no metric where it is undefined."""
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
    """Returns PPO's targets from the values of a batch.

    Args:
        values: [M] the value of the state before each token; read only at sampled tokens of trained completions.
        trained: [R] whether the completion is trained on.
        rounding: machine epsilon of the dtype that the values were computed in.
    """
    sampled = np.ones(len(rows.completions), np.bool_) if rows.sampled is None else rows.sampled
    own = np.repeat(trained, rows.lengths) & sampled
    known = np.where(own, values, 0.0).astype(np.float64)
    rewards = np.where(own, token_rewards(rows), 0.0)
    advantages = gae(known, rewards, sampled, rows.lengths, gamma=config.gamma, lam=config.lam) * own
    known_to = ROUNDED * rounding * float(np.sqrt(np.square(known[own]).mean())) if own.any() else 0.0
    return Assessment(known, known + advantages, whitened(advantages, own, known_to), own, known_to)


def token_rewards(rows: Rows) -> Float:
    """Returns [M] the reward of each token. A turn's reward is at the turn's last token; the rest of the trajectory's
    reward is at the last token that the policy sampled, and is nan if the trajectory has no reward."""
    rewards = np.zeros(len(rows.completions)) if rows.turn_rewards is None else rows.turn_rewards.copy()
    owner = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
    rest = np.concatenate([np.empty(0), *rows.rewards]) - np.bincount(owner, rewards, minlength=len(rows.lengths))
    places, some = rows.places(range(len(rows.lengths))), rows.counts > 0
    rewards[places[np.cumsum(rows.counts)[some] - 1]] += rest[some]
    return rewards
