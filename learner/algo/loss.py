"""GRPO's loss, one token at a time. Pure: everything here is a function of tensors.

Notation: lp = logprob of a completion token under the policy being trained, mu = the same number as the sampler
recorded it, rho = exp(lp - mu), A = advantage of the completion, c = coefficient of the token. The loss is, over the
tokens of an optimizer batch,
    sum of  c * ( -objective(rho, A) + beta * kl ).

Only gradients train, and d objective / d lp = w(rho, A) * A; so a variant of GRPO is a function w
(learner.algo.ratios), and what is computed here is dL/dlp itself, without autograd: the backward pass starts from the
logprobs. Engine mismatch and staleness need no second set of logprobs: rho is taken to the *sampler*, never to a
recomputed old policy, on top of which a truncated importance weight would count the ratio twice.

Only a batch that is split into several updates has a second one: pi_prox, the policy that the batch began with. Then
what is stale and what this batch has moved are bounded apart, by decoupled PPO (Hilton et al. 2110.00641, section 3;
for language models AReaL 2505.24298, section 5.2):
    w = min(pi_prox / mu, cap) * (PPO's clip of pi / pi_prox).

The coefficients c (table LOSSES) are computed over the whole optimizer batch before it is split, so that the gradient
does not depend on the split. Completions that are skipped since their gradient is exactly 0 still count in them. Tokens
too old to train on are no tokens of the loss but prompt (see learner.batch.rows), and those of a truncated completion
are none with loss.mask_truncated: T counts the others, so that dapo is the mean over them and grpo that of each
completion's, while dr_grpo's constant stays what it is; in the number of completions one counts even if none of it is
trained on.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.algo.ratios import log_ratio_of, weigh
from learner.batch.micro_batch import MicroBatch
from learner.learner_config import LossConfig

KL_CAP = 2.0  # of the ratio in the KL's gradient: that of truncated importance sampling, Yao et al. 2025

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


# [completions] T of every completion of the optimizer batch that has a reward -> [completions] coefficient of each of
# its tokens
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
    return d.exp() - d - 1, -ratio.clamp(max=KL_CAP) * d


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
    mismatch, gap = log_ratio_of(own, batch.behavior), (own - batch.behavior).abs()
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
        kl, kl_slope = kl_to_reference(logprobs, reference, log_ratio_of(logprobs, batch.behavior).exp())
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
