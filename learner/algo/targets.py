"""What the learner derives from a batch: of each token its advantage, and of each completion its weight in the loss,
whether it is trained on, and in which update.

Pure. Letters: R completions of the batch, M their tokens, U updates.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from learner.algo.advantage import ADVANTAGES
from learner.algo.coefficients import LOSSES
from learner.algo.loss_config import LossConfig
from learner.batch.rows import Rows


class Settings(Protocol):
    """What targets depend on of learner.config.learner.LearnerConfig, which is made from this package's tables."""

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
