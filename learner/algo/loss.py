"""The losses, one token at a time: GRPO's loss of the policy, the loss of PPO's value, and their metrics. They are pure
functions of tensors.

Notation: lp = logprob of a completion token under the policy being trained, mu = its logprob as the sampler recorded
it, rho = exp(lp - mu), A = advantage of the token (with GRPO that of its completion), c = coefficient of the token
(learner.algo.advantage). The policy's loss is, over the tokens of an optimizer batch,
    sum of  c * ( -objective + beta * kl ).

The objective is a function of learner.algo.surrogates. Autograd differentiates it by the N logprobs alone: this module
computes dL/dlp, with which the model's backward pass starts at the logprobs. Engine mismatch and staleness need no
second set of logprobs, since rho is the ratio to the *sampler* and never to a recomputed old policy; with an old policy
and a truncated importance weight the ratio would count twice.

Only a batch that is split into several updates needs a second set: the logprobs under pi_prox, the policy that the
batch began with. Staleness and the movement within the batch are then bounded separately, by decoupled PPO
(learner.algo.surrogates.clip):
    objective = min(pi_prox / mu, cap) * (PPO's objective of the ratio pi / pi_prox).

Letters: N tokens and C completions of a micro-batch, M tokens of the batch, as in learner.batch.micro_batch.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cluster.errors import WrongInput
from learner.algo.advantage import is_noise
from learner.algo.surrogates import SURROGATES, LossConfig, Objective
from learner.batch.micro_batch import MicroBatch
from rewards.loader import load

MAX_LOG_RATIO = 20.0  # log ratios are clamped: a sampler's placeholder such as -9999 must not give an infinite ratio


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The completion tokens of a micro-batch: the argument of a surrogate objective (learner.algo.surrogates), also of
    a user's own.

    pi is the policy being trained. mu is the policy in the denominator of the ratio: the sampler, or, with several
    updates per batch, the policy that the batch began with. sg is the stop-gradient: a tensor whose name begins with
    sg_ is a constant to autograd.
    """

    sg_logprobs: Float[Tensor, " N"]  # sg(log pi), nats
    sg_ratio: Float[Tensor, " N"]  # sg(pi / mu), between e^-20 and e^20
    log_ratio: Float[Tensor, " N"]  # the logarithm of `sg_ratio`
    unit: Float[Tensor, " N"]  # pi / sg(pi): ones with the gradient of log pi; the only tensor that requires a gradient
    advantages: Float[Tensor, " N"]  # A; with GRPO all tokens of a completion have the same
    lengths: Int[Tensor, " C"]  # tokens of each completion; completions are whole and follow each other
    stale: Float[Tensor, " N"] | None = None  # sg(mu / sampler); None where mu is the sampler

    @classmethod
    def of(
        cls,
        logprobs: Float[Tensor, " N"],
        log_ratio: Float[Tensor, " N"],
        advantages: Float[Tensor, " N"],
        lengths: Int[Tensor, " C"],
        stale: Float[Tensor, " N"] | None = None,
    ) -> "Tokens":
        """Makes Tokens that are detached from the model: no gradient flows back to `logprobs`."""
        unit = torch.ones_like(log_ratio, requires_grad=True)
        return cls(logprobs.detach(), log_ratio.exp(), log_ratio, unit, advantages, lengths, stale)

    @property
    def ratio(self) -> Float[Tensor, " N"]:
        """pi / mu, with its gradient."""
        return self.sg_ratio * self.unit

    @property
    def logprobs(self) -> Float[Tensor, " N"]:
        """log pi, with its gradient."""
        return self.sg_logprobs + self.unit - 1

    def weighted(self, weight: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """sg(weight) * A * pi / sg(pi): its value is weight * A, its gradient weight * A * d log pi.

        The objective sg(weight) * A * log pi in papers has the same gradient.
        """
        return weight.detach() * self.advantages * self.unit

    def over_completions(self, reduction: Literal["sum", "mean"]) -> "Tokens":
        """Returns these tokens with the ratio of their whole completion: the product ("sum") of its tokens' ratios, or
        their geometric mean ("mean"). The gradient of a token's ratio flows to that token's logprob alone, as in
        GSPO-token (2507.18071, section 4.3)."""
        log_ratio = _by_completion(self.log_ratio, self.lengths, reduction)
        return Tokens(
            self.sg_logprobs, log_ratio.exp(), log_ratio, self.unit, self.advantages, self.lengths, self.stale
        )


def _by_completion(values: Float[Tensor, " N"], lengths: Int[Tensor, " C"], reduction: str) -> Float[Tensor, " N"]:
    """Returns for each token the sum or mean over its completion."""
    each = torch.segment_reduce(values, reduction, lengths=lengths)
    return torch.repeat_interleave(each, lengths, output_size=len(values))


def log_ratio_of(logprobs: Float[Tensor, " N"], behavior: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """log rho, clamped to MAX_LOG_RATIO."""
    return (logprobs - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# The surrogate objective that learner.loss.ratio names: a row of SURROGATES, or a user's own function.

KEY = "learner.loss.ratio"


@cache
def function_of(ratio: str) -> Callable[..., Objective]:
    """Returns the function that learner.loss.ratio names: one of SURROGATES, or a user's own given as
    `path/file.py:function` or `package.module:function`, which is imported. Raises WrongInput if there is no such
    function."""
    if ratio in SURROGATES:
        return SURROGATES[ratio].function
    try:
        return cast(Callable[..., Objective], load(ratio))
    except WrongInput as error:
        raise WrongInput(f"{KEY}: {error}") from error


def objective_of(tokens: Tokens, config: LossConfig) -> Objective:
    """Returns ([N] objective, [N] bool clipped) of config.ratio with its settings. Raises what a user's function
    raises."""
    return function_of(config.ratio)(tokens, **config.arguments)


KL_CAP = 2.0  # cap of the ratio in the KL's gradient; the value is that of TIS, Yao et al. 2025


def kl_to_reference(
    logprobs: Float[Tensor, " N"], reference: Float[Tensor, " N"], ratio: Float[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Returns (k3 estimate of KL(policy || reference), derivative of KL(policy || reference) by the logprobs).

    The estimate is exp(d) - d - 1 with d = ref - lp (Schulman 2020; DeepSeekMath 2402.03300, equation 4). Its
    derivative, 1 - exp(d), is in expectation that of KL(reference || policy), and unbounded for a token that the
    reference finds far likelier. So the derivative returned is that of rho * k3 with rho not held constant
    (DeepSeek-V3.2 2512.02556, equation 7), which is rho * (lp - ref): it is unbiased, and corrected for the sampler.
    rho is capped at 2 as in the objective: that reduces the variance at the cost of a bias on rare tokens.
    """
    d = reference - logprobs
    return d.exp() - d - 1, -ratio.clamp(max=KL_CAP) * d


class OverTop(NamedTuple):
    """KL(policy || teacher) of a token over k + 1 buckets: the teacher's k likeliest tokens, and all others as one. By
    the data processing inequality it is at most that over the vocabulary."""

    kl: Float[Tensor, " N"]  # nats
    slopes: Float[Tensor, "N k"]  # derivative of `kl` by the policy's logprobs of the k tokens
    mass: Float[Tensor, " N"]  # the policy's probability of the k tokens together


# One minus a sum of float32 probabilities is no more exact than that, and may be below 0. A rest's share counts as at
# least so much: logarithms stay finite, and the bound moves a gradient by at most 16 nats times the policy's rest.
LEAST_REST = 2.0**-23


def kl_over_top(logprobs: Float[Tensor, "N k"], teacher: Float[Tensor, "N k"]) -> OverTop:
    """KL(policy || teacher) from both logprobs of the teacher's k likeliest tokens, whose ids differ.

    With p_i = exp(logprobs), q_i = exp(teacher), and the rests p = 1 - sum p_i and q = 1 - sum q_i it is
    sum p_i log(p_i / q_i) + p log(p / q). Since dp = - sum p_i dlogp_i, the derivative by log p_i is
    p_i (log(p_i / q_i) - log(p / q)): the terms p_i of both summands cancel.

    It is the KL of the distribution itself, not an estimate from the token that was sampled, so it needs no ratio to
    the sampler. A stale sampler changes which prefixes are looked at, and nothing corrects that: GKD (Agarwal et al.
    2306.13649) takes the same KL at each token, of samples that need not be the policy's own.
    """
    own, others = logprobs.exp(), teacher.exp()
    mass, gap = own.sum(-1), logprobs - teacher
    rest = 1 - mass
    of_rest = (rest.clamp(min=LEAST_REST) / (1 - others.sum(-1)).clamp(min=LEAST_REST)).log()
    kl = (own * gap).sum(-1) + rest.clamp(min=0) * of_rest
    return OverTop(kl, own * (gap - of_rest[:, None]), mass)


class Taught(NamedTuple):
    """What the loss and its metrics need where the KL is over the teacher's likeliest tokens."""

    kl: Float[Tensor, " N"]  # OverTop.kl
    mass: Float[Tensor, " N"]  # OverTop.mass


def kl_weights(batch: MicroBatch, config: LossConfig) -> Float[Tensor, " N"]:
    """The weight of each token's KL in the loss of the optimizer batch."""
    return config.beta * batch.coefficients


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
    taught: Taught | None = None,
) -> tuple[Float[Tensor, " N"], dict[str, Tensor]]:
    """Returns dL/dlp of a micro-batch (L is its share of the optimizer batch's loss) and the numbers for its metrics.

    Args:
        logprobs, entropy: float32, nats, under the policy being trained.
        reference: logprobs under the reference, needed if config.beta > 0.
        version: the policy version that the batch began with.
        proximal: logprobs under that version if the batch is split into several updates; None: `logprobs` are that
            version's, and the ratio is to the sampler.
        learned: whether the token is in the objective; None: all are. The KL is of all tokens in any case, and the
            coefficients stay as they are.
        taught: the KL over the teacher's likeliest tokens, which then has its place in the loss; None: it is that of
            the sampled token. Its gradient is not part of dL/dlp: dL/dkl is `kl_weights`.

    Returns:
        The gradient with which the backward pass of `logprobs` starts, and scalars: sums, and maxima under names that
        end in _max. The mismatch is that between `version` and the sampler.
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
        weight = kl_weights(batch, config)
        parts["kl"] = kl.sum()
        if taught is None:
            slope = slope + weight * kl_slope
        else:
            assert batch.top_logprobs is not None
            kl = taught.kl
            parts |= {"mass": taught.mass.sum(), "teacher_mass": batch.top_logprobs.exp().sum()}
        parts["loss"] = parts["loss"] + weight.dot(kl)
    return slope, parts


def _parts(
    batch: MicroBatch,
    slope: Float[Tensor, " N"],
    clipped: Bool[Tensor, " N"],
    gap: Float[Tensor, " N"],
    version: int,
    learned: Bool[Tensor, " N"] | None,
) -> dict[str, Tensor]:
    """Returns the counts and maxima for the metrics. gap: absolute differences to the sampler's logprobs, nats."""
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
    """Returns metrics by name from what `token_loss` returned for all micro-batches; there is no policy/ metric if no
    token was trained on. The loss is the mean over the updates that the batch was split into."""
    all_parts = list(parts)
    if not all_parts:
        return {"loss/total": 0.0, "loss/trained_tokens": 0.0}
    # All numbers are copied at once, so that the device is waited for once.
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
    if "mass" in sums:
        metrics |= {"policy/top_mass": sums["mass"] / tokens, "policy/teacher_top_mass": sums["teacher_mass"] / tokens}
    return metrics


@torch.no_grad()
def value_loss(
    values: Float[Tensor, " N"],
    returns: Float[Tensor, " N"],
    old: Float[Tensor, " N"],
    *,
    weight: float,
    clip: float | None,
) -> tuple[Float[Tensor, " N"], dict[str, Tensor]]:
    """Returns dL/dvalue of a micro-batch (L is its share of the update's loss) and the numbers for its metrics.

    L = weight / 2 * the sum of max((v - R)^2, (clipped v - R)^2), where the clipped v is at most `clip` from the value
    before the batch's first update. Once v has moved that far towards R, it has no gradient, so that one batch cannot
    pull the value away from the other batches. The clipping is that of PPO's authors (openai/baselines, ppo2/model.py)
    and of TRL (cliprange_value).

    Args:
        values: v, the value's outputs for the states before the tokens.
        returns: R, the targets of the values.
        old: values before the batch's first update.
        weight: 1 / (tokens of the update), computed before the update is split into micro-batches.
        clip: the bound above; None: L is the squared error alone.
    """
    error = values - returns
    near = values if clip is None else values.clamp(old - clip, old + clip)  # exactly v where the clip has no effect
    held = (near - returns).square() > error.square()
    slope = weight * torch.where(held, 0.0, error)
    loss = 0.5 * weight * torch.maximum(error.square(), (near - returns).square()).sum()
    return slope, {"loss": loss, "clipped": held.count_nonzero(), "tokens": torch.tensor(float(len(values)))}


def value_metrics_of(parts: Iterable[dict[str, Tensor]], updates: int) -> dict[str, float]:
    """Returns the value/ metrics from what `value_loss` returned for all micro-batches; there are none if no token was
    trained on. The loss is the mean over the updates that the batch was split into."""
    all_parts = list(parts)
    if not all_parts:
        return {}
    sums = {name: float(sum(float(part[name]) for part in all_parts)) for name in all_parts[0]}
    return {"value/loss": sums["loss"] / updates, "value/clip_fraction": sums["clipped"] / sums["tokens"]}


def explained_variance(
    values: npt.NDArray[np.floating], returns: npt.NDArray[np.floating], known_to: float = 0.0
) -> float | None:
    """Returns 1 - var(R - V) / var(R) of [T] values V and [T] returns R: 1 for a value that predicts the returns, 0 for
    one that says nothing of them, below 0 for one that is worse than a constant. It is None where all returns are equal
    up to rounding (learner.algo.advantage.is_noise)."""
    return None if is_noise(returns, known_to) else 1 - float(np.var(returns - values)) / float(np.var(returns))


class Uncertain(NamedTuple):
    """The tokens of a batch that learner.loss.top_entropy chooses: those before which the policy was least certain."""

    tokens: Bool[Tensor, " M"]  # whether the token is chosen
    least: float  # the lowest entropy among the chosen tokens, nats


def most_uncertain(entropies: Float[Tensor, " M"], share: float) -> Uncertain | None:
    """Chooses the given share of the tokens, those of highest entropy: their number is rounded up, and tokens whose
    entropy equals the lowest chosen one are chosen, too. Wang et al. 2506.01939, section 5, learn from the 20 % of
    highest entropy alone. The entropy of a token that is not in the loss is nan. Returns None if there are no others.
    """
    known = entropies[~entropies.isnan()]
    if not len(known):
        return None
    least = known.topk(math.ceil(share * len(known))).values[-1]
    return Uncertain(entropies >= least, float(least))
