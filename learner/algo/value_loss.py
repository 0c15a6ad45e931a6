"""The value's loss, one token at a time, and how well it told what came. Pure functions."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from learner.algo.gae import is_noise


@torch.no_grad()
def value_loss(
    values: Float[Tensor, " N"],
    returns: Float[Tensor, " N"],
    old: Float[Tensor, " N"],
    *,
    weight: float,
    clip: float | None,
) -> tuple[Float[Tensor, " N"], dict[str, Tensor]]:
    """dL/dvalue of a micro-batch (L is a share of the update's loss) and what its metrics are made of.

    L = weight / 2 * the sum of max((v - R)^2, (clipped v - R)^2), where the clipped v is at most `clip` from the value
    before the batch's first update: once v has come that far towards R it has no gradient, so one batch cannot pull the
    value away from the others. Of PPO's authors' code (openai/baselines, ppo2/model.py), and TRL's (cliprange_value).

    Args:
        returns: R, what the values are to be.
        weight: 1 / (tokens of the update), worked out before it is split.
        clip: None: no bound, the squared error alone.
    """
    error = values - returns
    near = values if clip is None else values.clamp(old - clip, old + clip)  # exactly v where it does not hold
    held = (near - returns).square() > error.square()
    slope = weight * torch.where(held, 0.0, error)
    loss = 0.5 * weight * torch.maximum(error.square(), (near - returns).square()).sum()
    return slope, {"loss": loss, "clipped": held.count_nonzero(), "tokens": torch.tensor(float(len(values)))}


def value_metrics_of(parts: Iterable[dict[str, Tensor]], updates: int) -> dict[str, float]:
    """The parts of all micro-batches -> value/ metrics; none if no token was trained. The loss is the mean over the
    updates that the batch was split into."""
    all_parts = list(parts)
    if not all_parts:
        return {}
    sums = {name: float(sum(float(part[name]) for part in all_parts)) for name in all_parts[0]}
    return {"value/loss": sums["loss"] / updates, "value/clip_fraction": sums["clipped"] / sums["tokens"]}


def explained_variance(
    values: npt.NDArray[np.floating], returns: npt.NDArray[np.floating], known_to: float = 0.0
) -> float | None:
    """[T], [T] -> 1 - var(R - V) / var(R): 1 of a value that tells the returns, 0 of one that tells nothing, below 0 of
    one that misleads; None where all returns are equal, but for rounding (learner.algo.gae.is_noise)."""
    return None if is_noise(returns, known_to) else 1 - float(np.var(returns - values)) / float(np.var(returns))
