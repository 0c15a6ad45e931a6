"""GRPO's loss, one token at a time. Pure: everything here is a function of tensors.

Notation: lp = logprob of a completion token under the policy being trained, mu = the same number as the sampler
recorded it, rho = exp(lp - mu), A = advantage of the token (with GRPO that of its completion), c = coefficient of the
token (learner.algo.coefficients). The loss is, over the tokens of an optimizer batch,
    sum of  c * ( -objective + beta * kl ).

The objective is one of learner.algo.surrogates, which autograd differentiates by the N logprobs alone: what is computed
here is dL/dlp, and the model's backward pass starts from the logprobs with it. Engine mismatch and staleness need no
second set of logprobs: rho is taken to the *sampler*, never to a recomputed old policy, on top of which a truncated
importance weight would count the ratio twice.

Only a batch that is split into several updates has a second one: pi_prox, the policy that the batch began with. Then
what is stale and what this batch has moved are bounded apart, by decoupled PPO (learner.algo.surrogates.clip):
    objective = min(pi_prox / mu, cap) * (PPO's of pi / pi_prox).
"""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from learner.algo.loss_config import LossConfig
from learner.algo.own_surrogate import objective_of
from learner.algo.tokens import MAX_LOG_RATIO, Tokens, log_ratio_of
from learner.batch.micro_batch import MicroBatch

KL_CAP = 2.0  # of the ratio in the KL's gradient: that of truncated importance sampling, Yao et al. 2025


def kl_to_reference(
    logprobs: Float[Tensor, " N"], reference: Float[Tensor, " N"], ratio: Float[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """(k3 estimate of KL(policy || reference), derivative of that same KL to the logprobs).

    The value is exp(d) - d - 1 with d = ref - lp (Schulman 2020; DeepSeekMath 2402.03300, equation 4). Its own
    gradient, 1 - exp(d), is in expectation that of KL(reference || policy), and unbounded for a token that the
    reference finds far likelier. So the gradient is that of rho * k3 with rho not held constant (DeepSeek-V3.2
    2512.02556, equation 7), which works out to rho * (lp - ref): unbiased, and corrected for the sampler too. As in
    the objective rho is capped at 2, which trades a bias on rare tokens for their variance.
    """
    d = reference - logprobs
    return d.exp() - d - 1, -ratio.clamp(max=KL_CAP) * d


@torch.no_grad()
def token_loss(
    logprobs: Float[Tensor, " N"],
    entropy: Float[Tensor, " N"],
    batch: MicroBatch,
    config: LossConfig,
    *,
    reference: Float[Tensor, " N"] | None,
    version: int,
    proximal: Float[Tensor, " N"] | None = None,
    learned: Bool[Tensor, " N"] | None = None,
) -> tuple[Float[Tensor, " N"], dict[str, Tensor]]:
    """dL/dlp of a micro-batch (L is a share of the optimizer batch's loss) and what its metrics are made of.

    Args:
        logprobs, entropy: float32, nats.
        reference: logprobs of the reference, needed if config.beta > 0.
        version: the policy version that the batch began with.
        proximal: logprobs of that version, if the batch is split into several updates; None: `logprobs`
            are its own, and the ratio is to the sampler.
        learned: which tokens the objective has (learner.algo.top_entropy); None: all. The KL has all of them, and
            coefficients stay as they are.

    Returns:
        What to start the backward pass of `logprobs` with, and scalars: sums, and maxima under names that end
        in _max. The mismatch is that of `version` and the sampler.
    """
    began_with = logprobs if proximal is None else proximal
    gap = began_with - batch.behavior
    mismatch, gap = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), gap.abs()
    log_ratio, stale = mismatch, None
    if proximal is not None:
        log_ratio, stale = log_ratio_of(logprobs, proximal), mismatch.exp()
    with torch.enable_grad():
        tokens = Tokens.of(logprobs, log_ratio, batch.advantages, batch.lengths, stale)
        objective, clipped = objective_of(tokens, config)
        loss = -(batch.coefficients if learned is None else batch.coefficients * learned).dot(objective)
    (slope,) = torch.autograd.grad(loss, tokens.unit)  # d unit = d log pi
    parts = _parts(batch, slope, clipped, gap, version, learned) | {
        "entropy": entropy.sum(),
        "k3": (mismatch.expm1() - mismatch).sum(),  # exp(x) - 1 would lose small x to rounding
        "loss": loss.detach(),
    }
    if reference is not None:
        kl, kl_slope = kl_to_reference(logprobs, reference, log_ratio_of(logprobs, batch.behavior).exp())
        weight = config.beta * batch.coefficients
        slope = slope + weight * kl_slope
        parts |= {"kl": kl.sum(), "loss": parts["loss"] + weight.dot(kl)}
    return slope, parts


def _parts(
    batch: MicroBatch,
    slope: Float[Tensor, " N"],
    clipped: Bool[Tensor, " N"],
    gap: Float[Tensor, " N"],
    version: int,
    learned: Bool[Tensor, " N"] | None,
) -> dict[str, Tensor]:
    """What is counted; `gap`: absolute differences to the sampler's logprobs."""
    current, lost = batch.versions == version, (batch.advantages != 0) & (slope == 0)
    return {
        "tokens": batch.lengths.sum(),
        "clipped": clipped.count_nonzero(),
        "masked": (lost if learned is None else lost & learned).count_nonzero(),
        "gap_max": gap.max(),
        "current_tokens": current.count_nonzero(),
        "current_gap_max": torch.where(current, gap, 0.0).max(),
    }


def metrics_of(parts: Iterable[dict[str, Tensor]], updates: int = 1) -> dict[str, float]:
    """The parts of all micro-batches -> metrics by name; no policy/ metric if no token was trained. The loss is the
    mean over the updates that the batch was split into."""
    all_parts = list(parts)
    if not all_parts:
        return {"loss/total": 0.0, "loss/trained_tokens": 0.0}
    # One copy, hence one wait for the device.
    table = torch.stack([torch.stack(list(one.values())) for one in all_parts]).cpu().double()
    sums = dict(zip(all_parts[0], table.sum(0).tolist(), strict=True))
    peaks = dict(zip(all_parts[0], table.amax(0).tolist(), strict=True))
    tokens = sums["tokens"]
    metrics = {
        "loss/total": sums["loss"] / updates,
        "loss/trained_tokens": tokens,
        "policy/entropy": sums["entropy"] / tokens,
        "policy/clip_fraction": sums["clipped"] / tokens,
        "policy/masked_fraction": sums["masked"] / tokens,
        "policy/mismatch_k3": max(sums["k3"], 0.0) / tokens,
        "policy/mismatch_max": peaks["gap_max"],
    }
    if sums["current_tokens"]:
        metrics["policy/mismatch_max_current"] = peaks["current_gap_max"]
    if "kl" in sums:
        metrics["policy/kl"] = sums["kl"] / tokens
    return metrics
