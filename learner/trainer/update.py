"""What one optimizer step was, and what a batch's steps say of themselves."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from learner.algo.loss import metrics_of
from learner.algo.value_loss import value_metrics_of


class Named(NamedTuple):
    """A role's metrics, and the setting of its rate."""

    loss: str
    norm: str
    rate: str


ROLES = {
    "policy": Named("loss/total", "loss/grad_norm", "learner.learning_rate"),
    "value": Named("value/loss", "value/grad_norm", "learner.value.learning_rate"),
}


class Update(NamedTuple):
    """One optimizer step of a role."""

    parts: list[dict[str, Tensor]]  # of its micro-batches (learner.algo.loss.token_loss, value_loss.value_loss)
    norm: float  # of the gradient, before clipping
    done: bool  # false if loss or gradient was not finite


class Learned(NamedTuple):
    """A batch's updates, without those that had nothing to learn from."""

    policy: list[Update]
    value: list[Update]
    assessment: dict[str, float]  # the metrics of the values before them

    @property
    def failed(self) -> str | None:
        """The first role of which no update could be taken, by its name in ROLES."""
        for name, updates in zip(ROLES, (self.policy, self.value), strict=True):
            if updates and not any(update.done for update in updates):
                return name
        return None

    def metrics(self) -> dict[str, float]:
        """By name; those that end in /grad_norm are means over the updates."""
        told = metrics_of([part for update in self.policy for part in update.parts], max(len(self.policy), 1))
        told |= value_metrics_of([part for update in self.value for part in update.parts], len(self.value))
        if self.value:
            told["value/grad_norm"] = _norm(self.value)
        return (
            told
            | self.assessment
            | {
                "loss/grad_norm": _norm(self.policy),
                "loss/skipped_nonfinite": float(sum(not update.done for update in (*self.policy, *self.value))),
            }
        )


def _norm(updates: list[Update]) -> float:
    return float(np.mean([update.norm for update in updates])) if updates else 0.0
