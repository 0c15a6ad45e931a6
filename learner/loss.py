"""GRPO's loss, one token at a time. Pure: everything here is a function of tensors.

Notation: lp = logprob of a completion token under the policy being trained, mu = the same number as the sampler
recorded it, rho = exp(lp - mu), A = advantage of the completion, c = coefficient of the token. The loss is, over the
tokens of an optimizer batch,
    sum of  c * ( -objective(rho, A) + beta * kl ).

Only gradients train, and d objective / d lp = w(rho, A) * A; so a variant of GRPO is a function w, and what is computed
here is dL/dlp itself, without autograd: the backward pass starts from the logprobs. Engine mismatch and staleness need
no second set of logprobs: rho is taken to the *sampler*, never to a recomputed old policy, on top of which a truncated
importance weight would count the ratio twice.

Only a batch that is split into several updates has a second one: pi_prox, the policy that the batch began with. Then
what is stale and what this batch has moved are bounded apart, by decoupled PPO (Hilton et al. 2110.00641, section 3;
for language models AReaL 2505.24298, section 5.2):
    w = min(pi_prox / mu, 2) * (PPO's clip of pi / pi_prox).

The coefficients c (table LOSSES) are computed over the whole optimizer batch before it is split, so that the gradient
does not depend on the split. Completions that are skipped since their gradient is exactly 0 still count in them. Tokens
too old to train on are no tokens of the loss but prompt (see learner.batch): T counts the others, so that dapo is the
mean over them and grpo that of each completion's, while dr_grpo's constant stays what it is; in the number of
completions one counts even if all of it is too old.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.batch import MicroBatch
from learner.learner_config import LossConfig

RATIO_CAP = 2.0  # truncated importance sampling, Yao et al. 2025, C = 2
RATIO_BAND = (0.5, 5.0)  # IcePop (Ring-1T 2510.18855): outside it sampler and learner disagree, so the token is dropped
CISPO_CAP = 5.0  # 1 + eps_high, which MiniMax-M1 leaves open; ScaleRL (2510.13786) takes values of this size
CLIP_EPSILON = (0.2, 0.28)  # DAPO 2503.14476, section 3.1
GSPO_EPSILON = (3e-4, 4e-4)  # GSPO 2507.18071, section 5.1
MAX_LOG_RATIO = 20.0  # a sampler's placeholder such as -9999 must not become an infinite ratio


@dataclass(frozen=True, slots=True)
class Weighted:
    """What a ratio function says of each token, all [N] and free of gradient."""

    weight: Tensor  # w: the gradient of the token is c * w * A * d lp
    objective: Tensor  # its value, reported as loss/total
    clipped: Tensor  # bool: capped, clipped or masked


Epsilon = tuple[float, float] | None  # below and above 1; None: the paper's
Ratio = Callable[[Tensor, Tensor, Tensor, Epsilon], Weighted]  # log rho [N], A [N], T [completions], epsilon


def masked(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, epsilon: Epsilon) -> Weighted:
    """w = min(rho, 2) where 0.5 <= rho <= 5, else 0: the cap of `truncated` within the band of `icepop`.

    The default, for one update per batch: rho then differs from 1 by engine mismatch and staleness alone. A token far
    outside says that sampler and learner disagree, which the band drops; what is left has its variance bounded by the
    cap. Neither paper does both.
    """
    ratio = log_ratio.exp()
    inside = _inside(ratio)
    weight = torch.where(inside, ratio.clamp(max=RATIO_CAP), 0.0)
    return Weighted(weight, weight * advantage, ~inside | (ratio > RATIO_CAP))


def truncated(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, epsilon: Epsilon) -> Weighted:
    """w = min(rho, 2): truncated importance sampling (Ionides 2008), to the sampler as by Yao et al. 2025 (TIS)."""
    return _capped(log_ratio.exp(), advantage, RATIO_CAP)


def icepop(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, epsilon: Epsilon) -> Weighted:
    """w = rho where 0.5 <= rho <= 5, else 0. IcePop (2510.18855); as an equation: INTELLECT-3 2512.16144, 1."""
    ratio = log_ratio.exp()
    inside = _inside(ratio)
    weight = torch.where(inside, ratio, 0.0)
    return Weighted(weight, weight * advantage, ~inside)


def cispo(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, epsilon: Epsilon) -> Weighted:
    """w = min(rho, 5): no token loses its gradient, however far it is. MiniMax-M1 2506.13585, equations 4 and 5, which
    like the paper's runs has no lower bound."""
    return _capped(log_ratio.exp(), advantage, CISPO_CAP)


def gspo(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, epsilon: Epsilon) -> Weighted:
    """w = s where PPO's clip of s does not hold, else 0; s = exp(mean of log rho over the completion), one for all of
    its tokens. GSPO 2507.18071, equations 5 and 7. Its mean over completions is that of loss.kind: grpo; with another
    kind long completions weigh more.
    """
    means = torch.segment_reduce(log_ratio, "mean", lengths=lengths)
    each = torch.repeat_interleave(means, lengths, output_size=len(log_ratio))
    return _clipped(each.exp(), advantage, epsilon or GSPO_EPSILON)


def clip(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, epsilon: Epsilon) -> Weighted:
    """PPO's min(rho A, clip(rho, 1 - low, 1 + high) A), 1707.06347 equation 7, with DAPO's separate high (2503.14476).

    w = rho where the unclipped branch is the minimum and 0 where the clip holds, which is what autograd gives.
    """
    return _clipped(log_ratio.exp(), advantage, epsilon or CLIP_EPSILON)


def _inside(ratio: Tensor) -> Tensor:
    return (ratio >= RATIO_BAND[0]) & (ratio <= RATIO_BAND[1])


def _capped(ratio: Tensor, advantage: Tensor, cap: float) -> Weighted:
    weight = ratio.clamp(max=cap)
    return Weighted(weight, weight * advantage, ratio > cap)


def _clipped(ratio: Tensor, advantage: Tensor, epsilon: tuple[float, float]) -> Weighted:
    low, high = 1 - epsilon[0], 1 + epsilon[1]
    held = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    return Weighted(torch.where(held, 0.0, ratio), objective, held)


RATIOS: dict[str, Ratio] = {
    "masked": masked,
    "truncated": truncated,
    "icepop": icepop,
    "cispo": cispo,
    "gspo": gspo,
    "clip": clip,
}


def weigh(logprobs: Tensor, batch: MicroBatch, config: LossConfig, proximal: Tensor | None) -> Weighted:
    """By config.ratio, of the ratio to the sampler; or decoupled, with [N] logprobs of the policy that the batch began
    with: then the ratio is to that policy, and how far it is from the sampler only weighs the token, capped at 2."""
    near = batch.behavior if proximal is None else proximal
    ratio = RATIOS[config.ratio]
    weighted = ratio(_log_ratio(logprobs, near), batch.advantages, batch.lengths, config.epsilon)
    if proximal is None:
        return weighted
    stale = _log_ratio(proximal, batch.behavior).exp()
    share = stale.clamp(max=RATIO_CAP)
    return Weighted(share * weighted.weight, share * weighted.objective, weighted.clipped | (stale > RATIO_CAP))


def _log_ratio(logprobs: Tensor, behavior: Tensor) -> Tensor:
    return (logprobs - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


Lengths = npt.NDArray[np.int64]
Coefficients = npt.NDArray[np.float64]


def dapo(lengths: Lengths, max_completion_length: int) -> Coefficients:
    """1 / (completion tokens of the batch): every token weighs the same. DAPO 2503.14476, equation 8."""
    return np.full(len(lengths), 1.0 / max(int(lengths.sum()), 1))


def dr_grpo(lengths: Lengths, max_completion_length: int) -> Coefficients:
    """1 / (completions * max_completion_length): a constant, hence unbiased. Dr.GRPO 2503.20783, section 3."""
    return np.full(len(lengths), 1.0 / max(len(lengths) * max_completion_length, 1))


def grpo(lengths: Lengths, max_completion_length: int) -> Coefficients:
    """1 / (T * completions): mean over the sequence, then over completions. DeepSeekMath 2402.03300, equation 3."""
    return 1.0 / (np.maximum(lengths, 1) * max(len(lengths), 1))


# [completions] T of every judged completion of the optimizer batch -> [completions] coefficient of each of its tokens
LOSSES: dict[str, Callable[[Lengths, int], Coefficients]] = {"dapo": dapo, "dr_grpo": dr_grpo, "grpo": grpo}


def kl_to_reference(logprobs: Tensor, reference: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """([N] k3 estimate of KL(policy || reference), [N] derivative of that same KL to the logprobs).

    The value is exp(d) - d - 1 with d = ref - lp (Schulman 2020; DeepSeekMath 2402.03300, equation 4). Its own
    gradient, 1 - exp(d), is in expectation that of KL(reference || policy), and unbounded for a token that the
    reference finds far likelier. So the gradient is that of rho * k3 with rho not held constant (DeepSeek-V3.2
    2512.02556, equation 7), which works out to rho * (lp - ref): unbiased, and corrected for the sampler too. As in
    the objective rho is capped at 2, which trades a bias on rare tokens for their variance.
    """
    d = reference - logprobs
    return d.exp() - d - 1, -ratio.clamp(max=RATIO_CAP) * d


@torch.no_grad()
def token_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: MicroBatch,
    config: LossConfig,
    *,
    reference: Tensor | None,
    version: int,
    proximal: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """dL/dlp of a micro-batch (L is a share of the optimizer batch's loss) and what its metrics are made of.

    Args:
        logprobs, entropy: [N] float32.
        reference: [N] float32 logprobs of the reference, needed if config.beta > 0.
        version: the policy version that the batch began with.
        proximal: [N] float32 logprobs of that version, if the batch is split into several updates; None: `logprobs`
            are its own, and the ratio is to the sampler.

    Returns:
        [N] float32 to start the backward pass of `logprobs` with, and float64 scalars: sums, and maxima under names
        that end in _max. The mismatch is that of `version` and the sampler.
    """
    weighted = weigh(logprobs, batch, config, proximal)
    slope, value = -weighted.weight * batch.advantages, -weighted.objective
    own = logprobs if proximal is None else proximal
    mismatch, gap = _log_ratio(own, batch.behavior), (own - batch.behavior).abs()
    current = batch.versions == version
    parts = {
        "tokens": torch.ones_like(gap).sum(),
        "clipped": weighted.clipped.sum(),
        "masked": (weighted.weight == 0).sum(),
        "entropy": entropy.sum(),
        "k3": (mismatch.exp() - mismatch - 1).sum(),
        "gap_max": gap.max(),
        "current_tokens": current.sum(),
        "current_gap_max": torch.where(current, gap, 0.0).max(),
    }
    if reference is not None:
        kl, kl_slope = kl_to_reference(logprobs, reference, _log_ratio(logprobs, batch.behavior).exp())
        slope, value = slope + config.beta * kl_slope, value + config.beta * kl
        parts["kl"] = kl.sum()
    parts["loss"] = (batch.coefficients * value).sum()
    return batch.coefficients * slope, {name: part.double() for name, part in parts.items()}


def metrics_of(parts: Iterable[dict[str, Tensor]], updates: int = 1) -> dict[str, float]:
    """The parts of all micro-batches -> metrics by name; no policy/ metric if no token was trained. The loss is the
    mean over the updates that the batch was split into."""
    all_parts = list(parts)
    if not all_parts:
        return {"loss/total": 0.0, "loss/trained_tokens": 0.0}
    # One copy, hence one wait for the device.
    table = torch.stack([torch.stack(list(one.values())) for one in all_parts]).cpu()
    sums = dict(zip(all_parts[0], table.sum(0).tolist(), strict=True))
    peaks = dict(zip(all_parts[0], table.amax(0).tolist(), strict=True))
    tokens = sums["tokens"]
    metrics = {
        "loss/total": sums["loss"] / updates,
        "loss/trained_tokens": tokens,
        "policy/entropy": sums["entropy"] / tokens,
        "policy/clip_fraction": sums["clipped"] / tokens,
        "policy/masked_fraction": sums["masked"] / tokens,
        "policy/mismatch_k3": sums["k3"] / tokens,
        "policy/mismatch_max": peaks["gap_max"],
    }
    if sums["current_tokens"]:
        metrics["policy/mismatch_max_current"] = peaks["current_gap_max"]
    if "kl" in sums:
        metrics["policy/kl"] = sums["kl"] / tokens
    return metrics
