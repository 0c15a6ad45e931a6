"""The gradient of every surrogate, derived by hand: what autograd of learner.algo.surrogates is compared with.

Notation as in learner.algo.loss: lp, mu, rho = exp(lp - mu), A. The gradient of a token is c * w * A * d lp, and a
variant is its weight w(rho, A). These were the program's own formulas before it asked autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algo.surrogates import Bounds

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Weighted:
    """What a ratio function says of each token, all [N] and free of gradient."""

    weight: Tensor  # w: the gradient of the token is c * w * A * d lp
    objective: Tensor
    clipped: Tensor  # bool: capped, clipped or masked


# log rho [N], A [N], T [completions], bounds, lp [N]
Ratio = Callable[[Tensor, Tensor, Tensor, Bounds, Tensor], Weighted]


def masked(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = min(rho, cap) within the band, else 0."""
    ratio = log_ratio.exp()
    inside = _inside(ratio, bounds["band"])
    weight = torch.where(inside, ratio.clamp(max=bounds["cap"]), 0.0)
    return Weighted(weight, weight * advantage, ~inside | (ratio > bounds["cap"]))


def truncated(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = min(rho, cap)."""
    return _capped(log_ratio.exp(), advantage, bounds["cap"])


def icepop(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = rho within the band, else 0."""
    return _banded(log_ratio.exp(), advantage, bounds["band"])


def cispo(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = min(rho, cap)."""
    return _capped(log_ratio.exp(), advantage, bounds["cap"])


def sequence_mask(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = s within the band, else 0; s = product of rho over the completion, one for all of its tokens."""
    return _banded(_by_completion(log_ratio, lengths, "sum").exp(), advantage, bounds["band"])


def sequence_truncate(
    log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor
) -> Weighted:
    """w = min(s, cap), s as in `sequence_mask`."""
    return _capped(_by_completion(log_ratio, lengths, "sum").exp(), advantage, bounds["cap"])


def gspo(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = s where PPO's clip of s does not hold, else 0; s = exp(mean of log rho over the completion)."""
    return _clipped(_by_completion(log_ratio, lengths, "mean").exp(), advantage, bounds)


def gmpo(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = q where the token's own clip does not hold, else 0; q = exp(mean of the clipped log rho)."""
    ratio, low, high = log_ratio.exp(), 1 - bounds["epsilon"][0], 1 + bounds["epsilon"][1]
    above, below = (advantage > 0) & (ratio > high), (advantage <= 0) & (ratio < low)
    logs = torch.where(above, math.log(high), torch.where(below, torch.tensor(low, dtype=ratio.dtype).log(), log_ratio))
    q, held = _by_completion(logs, lengths, "mean").exp(), (above | below) & (advantage != 0)
    return Weighted(torch.where(held, 0.0, q), q * advantage, held)


def sapo(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = 4 p (1 - p) rho with p = sigmoid(tau (rho - 1)): equation 9 of the paper."""
    ratio, (high, low) = log_ratio.exp(), bounds["temperature"]
    tau = torch.where(advantage > 0, torch.tensor(high, dtype=ratio.dtype), low)
    p = 1 / (1 + (-tau * (ratio - 1)).exp())
    return Weighted(4 * p * (1 - p) * ratio, 4 / tau * p * advantage, torch.zeros_like(ratio, dtype=torch.bool))


def dppo(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = min(rho, cap), or 0 where the probability has moved by more than the divergence towards the advantage."""
    moved, ratio = logprobs.exp() - (logprobs - log_ratio).exp(), log_ratio.exp()
    up, down = (advantage > 0) & (moved > bounds["divergence"]), (advantage < 0) & (-moved > bounds["divergence"])
    weight = torch.where(up | down, 0.0, ratio.clamp(max=bounds["cap"]))
    return Weighted(weight, weight * advantage, up | down | (ratio > bounds["cap"]))


def clip(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds, logprobs: Tensor) -> Weighted:
    """w = rho where the unclipped branch of PPO's minimum is chosen, and 0 where the clip holds."""
    return _clipped(log_ratio.exp(), advantage, bounds)


def _by_completion(log_ratio: Tensor, lengths: Tensor, reduction: str) -> Tensor:
    each = torch.segment_reduce(log_ratio, reduction, lengths=lengths)
    return torch.repeat_interleave(each, lengths, output_size=len(log_ratio))


def _inside(ratio: Tensor, band: tuple[float, float]) -> Tensor:
    return (ratio >= band[0]) & (ratio <= band[1])


def _banded(ratio: Tensor, advantage: Tensor, band: tuple[float, float]) -> Weighted:
    inside = _inside(ratio, band)
    weight = torch.where(inside, ratio, 0.0)
    return Weighted(weight, weight * advantage, ~inside)


def _capped(ratio: Tensor, advantage: Tensor, cap: float) -> Weighted:
    weight = ratio.clamp(max=cap)
    return Weighted(weight, weight * advantage, ratio > cap)


def _clipped(ratio: Tensor, advantage: Tensor, bounds: Bounds) -> Weighted:
    low, high, delta = 1 - bounds["epsilon"][0], 1 + bounds["epsilon"][1], bounds["delta"]
    held = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & ((ratio < low) | (ratio > delta)))
    objective = torch.minimum(ratio.clamp(max=delta) * advantage, ratio.clamp(low, high) * advantage)
    return Weighted(torch.where(held, 0.0, ratio), objective, held)


RATIOS: dict[str, Ratio] = {
    "masked": masked,
    "truncated": truncated,
    "icepop": icepop,
    "cispo": cispo,
    "sequence_mask": sequence_mask,
    "sequence_truncate": sequence_truncate,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo": dppo,
    "clip": clip,
}


def weigh(
    ratio: str, logprobs: Tensor, behavior: Tensor, advantages: Tensor, lengths: Tensor, bounds: Bounds,
    proximal: Tensor | None = None,
) -> Weighted:  # fmt: skip
    """By the ratio to the sampler; or decoupled, with [N] logprobs of the policy that the batch began with."""
    near = behavior if proximal is None else proximal
    weighted = RATIOS[ratio](_log_ratio(logprobs, near), advantages, lengths, bounds, logprobs)
    if proximal is None:
        return weighted
    stale, cap = _log_ratio(proximal, behavior).exp(), bounds["cap"]
    share = stale.clamp(max=cap)
    return Weighted(share * weighted.weight, share * weighted.objective, weighted.clipped | (stale > cap))


def _log_ratio(logprobs: Tensor, behavior: Tensor) -> Tensor:
    return (logprobs - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
