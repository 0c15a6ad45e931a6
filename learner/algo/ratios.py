"""What bounds the importance ratio: of every variant the weight of a token in the gradient. Pure functions of tensors.

Notation as in learner.loss: lp, mu, rho = exp(lp - mu), A. A variant is a function w, and the gradient of a token is
c * w * A * d lp. Its bounds (caps, bands, clip ranges) are loss.epsilon, .delta, .cap and .band; numbers in the text
below are the papers' (learner.learner_config.BOUNDS).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.batch.micro_batch import MicroBatch
from learner.learner_config import Bounds, LossConfig

MAX_LOG_RATIO = 20.0  # a sampler's placeholder such as -9999 must not become an infinite ratio


@dataclass(frozen=True, slots=True)
class Weighted:
    """What a ratio function says of each token, all [N] and free of gradient."""

    weight: Tensor  # w: the gradient of the token is c * w * A * d lp
    objective: Tensor  # its value, reported as loss/total
    clipped: Tensor  # bool: capped, clipped or masked


Ratio = Callable[[Tensor, Tensor, Tensor, Bounds], Weighted]  # log rho [N], A [N], T [completions], bounds


def masked(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds) -> Weighted:
    """w = min(rho, 2) where 0.5 <= rho <= 5, else 0: the cap of `truncated` within the band of `icepop`.

    The default, for one update per batch: rho then differs from 1 by engine mismatch and staleness alone. A token far
    outside says that sampler and learner disagree, which the band drops; what is left has its variance bounded by the
    cap. Neither paper does both.
    """
    ratio = log_ratio.exp()
    inside = _inside(ratio, bounds["band"])
    weight = torch.where(inside, ratio.clamp(max=bounds["cap"]), 0.0)
    return Weighted(weight, weight * advantage, ~inside | (ratio > bounds["cap"]))


def truncated(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds) -> Weighted:
    """w = min(rho, 2): truncated importance sampling (Ionides 2008), to the sampler as by Yao et al. 2025 (TIS)."""
    return _capped(log_ratio.exp(), advantage, bounds["cap"])


def icepop(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds) -> Weighted:
    """w = rho where 0.5 <= rho <= 5, else 0. IcePop (2510.18855); as an equation: INTELLECT-3 2512.16144, 1."""
    return _banded(log_ratio.exp(), advantage, bounds["band"])


def cispo(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds) -> Weighted:
    """w = min(rho, 5): no token loses its gradient, however far it is. MiniMax-M1 2506.13585, equations 4 and 5, which
    like the paper's runs has no lower bound."""
    return _capped(log_ratio.exp(), advantage, bounds["cap"])


def sequence_mask(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds) -> Weighted:
    """w = s where 0 <= s <= 3, else 0; s = product of rho over the completion, one for all of its tokens.

    TRL's default against its vLLM (vllm_importance_sampling_mode="sequence_mask", Liu et al. 2025, "When Speed Kills
    Stability"). Unbiased but for what is masked; the more tokens, the further s strays from 1 with the same mismatch
    per token, so long completions are the first to go.
    """
    return _banded(_by_completion(log_ratio, lengths, "sum").exp(), advantage, bounds["band"])


def sequence_truncate(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds) -> Weighted:
    """w = min(s, 3), s as in `sequence_mask`: vllm_importance_sampling_mode="sequence_truncate" in TRL."""
    return _capped(_by_completion(log_ratio, lengths, "sum").exp(), advantage, bounds["cap"])


def gspo(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds) -> Weighted:
    """w = s where PPO's clip of s does not hold, else 0; s = exp(mean of log rho over the completion), one for all of
    its tokens. GSPO 2507.18071, equations 5 and 7. Its mean over completions is that of loss.kind: grpo; with another
    kind long completions weigh more.
    """
    return _clipped(_by_completion(log_ratio, lengths, "mean").exp(), advantage, bounds)


def clip(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Bounds) -> Weighted:
    """PPO's min(rho A, clip(rho, 1 - low, 1 + high) A), 1707.06347 equation 7, with DAPO's separate high (2503.14476).

    w = rho where the unclipped branch is the minimum and 0 where the clip holds, which is what autograd gives.
    """
    return _clipped(log_ratio.exp(), advantage, bounds)


def _by_completion(log_ratio: Tensor, lengths: Tensor, reduction: str) -> Tensor:
    """[N] the sum or mean over its completion, for each token."""
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
    """With the second clip for A < 0, where PPO's minimum has no upper bound: there the ratio counts as at most delta.
    Dual-clip PPO (Ye et al. 1912.09729, equation 5); INTELLECT-2 2505.07291, section 3.4; `delta` in TRL.

    Without it one token of a gap of 5 nats between learner and sampler weighs 148 times another.
    """
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
    "clip": clip,
}


def weigh(logprobs: Tensor, batch: MicroBatch, config: LossConfig, proximal: Tensor | None) -> Weighted:
    """By config.ratio, of the ratio to the sampler; or decoupled, with [N] logprobs of the policy that the batch began
    with: then the ratio is to that policy, and how far it is from the sampler only weighs the token, capped."""
    near, bounds = batch.behavior if proximal is None else proximal, config.bounds
    weighted = RATIOS[config.ratio](log_ratio_of(logprobs, near), batch.advantages, batch.lengths, bounds)
    if proximal is None:
        return weighted
    stale, cap = log_ratio_of(proximal, batch.behavior).exp(), bounds["cap"]
    share = stale.clamp(max=cap)
    return Weighted(share * weighted.weight, share * weighted.objective, weighted.clipped | (stale > cap))


def log_ratio_of(logprobs: Tensor, behavior: Tensor) -> Tensor:
    """[N] log rho, kept finite."""
    return (logprobs - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
