"""GRPO's loss, one token at a time. Pure: everything here is a function of tensors.

Notation: lp = logprob of a completion token under the policy being trained, mu = the same number as the sampler
recorded it, rho = exp(lp - mu), A = advantage of the token (with GRPO that of its completion), c = coefficient of the
token (learner.algo.advantage). The loss is, over the tokens of an optimizer batch,
    sum of  c * ( -objective + beta * kl ).

The objective is one of learner.algo.surrogates, which autograd differentiates by the N logprobs alone: what is computed
here is dL/dlp, and the model's backward pass starts from the logprobs with it. Engine mismatch and staleness need no
second set of logprobs: rho is taken to the *sampler*, never to a recomputed old policy, on top of which a truncated
importance weight would count the ratio twice.

Only a batch that is split into several updates has a second one: pi_prox, the policy that the batch began with. Then
what is stale and what this batch has moved are bounded apart, by decoupled PPO (learner.algo.surrogates.clip):
    objective = min(pi_prox / mu, cap) * (PPO's of pi / pi_prox).
"""

import inspect
import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cluster.errors import WrongInput
from learner.algo.advantage import is_noise
from learner.algo.surrogates import SURROGATES, LossConfig, Objective
from learner.batch.micro_batch import MicroBatch
from rewards.base import said
from rewards.loader import load

# The completion tokens of a micro-batch, as a surrogate objective sees them. Letters: N and C as in learner.batch.

MAX_LOG_RATIO = 20.0  # a sampler's placeholder such as -9999 must not become an infinite ratio


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What the functions of learner.algo.surrogates, and users' own, are given.

    pi is the policy being trained and mu the one that its ratio is to: the sampler, or, with several updates per batch,
    the policy that the batch began with. sg is the stop-gradient: what is named so is a constant to autograd.
    """

    sg_logprobs: Float[Tensor, " N"]  # sg(log pi), nats
    sg_ratio: Float[Tensor, " N"]  # sg(pi / mu), between e^-20 and e^20
    log_ratio: Float[Tensor, " N"]  # the logarithm of `sg_ratio`
    unit: Float[Tensor, " N"]  # pi / sg(pi): ones, whose gradient is that of log pi; every other gradient comes from it
    advantages: Float[Tensor, " N"]  # A; with GRPO all tokens of a completion have one
    lengths: Int[Tensor, " C"]  # tokens of each completion; completions are whole and follow each other
    stale: Float[Tensor, " N"] | None = None  # sg(mu / sampler); None where they are one

    @classmethod
    def of(
        cls,
        logprobs: Float[Tensor, " N"],
        log_ratio: Float[Tensor, " N"],
        advantages: Float[Tensor, " N"],
        lengths: Int[Tensor, " C"],
        stale: Float[Tensor, " N"] | None = None,
    ) -> "Tokens":
        """Nothing leads back to the model that gave them."""
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
        """sg(weight) * A * pi / sg(pi): of value weight * A, and of gradient weight * A * d log pi.

        Papers that write sg(weight) * A * log pi mean the same gradient.
        """
        return weight.detach() * self.advantages * self.unit

    def over_completions(self, reduction: Literal["sum", "mean"]) -> "Tokens":
        """The same tokens with the ratio of their whole completion: the product of its tokens' ratios, or their
        geometric mean. Each token passes on its own gradient alone, as in GSPO-token (2507.18071, section 4.3)."""
        log_ratio = _by_completion(self.log_ratio, self.lengths, reduction)
        return Tokens(
            self.sg_logprobs, log_ratio.exp(), log_ratio, self.unit, self.advantages, self.lengths, self.stale
        )


def _by_completion(values: Float[Tensor, " N"], lengths: Int[Tensor, " C"], reduction: str) -> Float[Tensor, " N"]:
    """The sum or mean over its completion, for each token."""
    each = torch.segment_reduce(values, reduction, lengths=lengths)
    return torch.repeat_interleave(each, lengths, output_size=len(values))


def log_ratio_of(logprobs: Float[Tensor, " N"], behavior: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """log rho, kept finite."""
    return (logprobs - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# A surrogate objective by its name: one of the table, or a user's own from a file, which is tried on a few tokens.

KEY = "learner.loss.ratio"


@cache
def function_of(ratio: str) -> Callable[..., Objective]:
    """The function that learner.loss.ratio names: of SURROGATES, or `path/file.py:function` or
    `package.module:function`, which this process then imports. Raises WrongInput if that leads to no function."""
    if ratio in SURROGATES:
        return SURROGATES[ratio].function
    try:
        return cast(Callable[..., Objective], load(ratio))
    except WrongInput as error:
        raise WrongInput(f"{KEY}: {error}") from error


def objective_of(tokens: Tokens, config: LossConfig) -> Objective:
    """([N] objective, [N] bool) by config.ratio and its settings. Raises what a user's function raises."""
    return function_of(config.ratio)(tokens, **config.arguments)


def try_surrogate(config: LossConfig) -> None:
    """Calls it on six tokens of three completions, forward and backward.

    Raises WrongInput, one line: it does not load, does not take a setting that is given, raises, or returns
    something else than a finite objective with a finite gradient and a bool of each token.
    """
    function = function_of(config.ratio)
    takes = inspect.signature(function).parameters
    named = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    for name, value in config.arguments.items():
        if name not in takes and not named:
            raise WrongInput(
                f"learner.loss.bounds.{name}: {config.ratio} has no parameter {name}; add it to the function, or leave "
                f"it out (got {value})"
            )
    tokens = _example()
    try:
        wrong = _wrong_with(function(tokens, **config.arguments), tokens)
    except Exception as error:
        text = f"{type(error).__name__}: {said(error)}{_line_of(error, function)}"
        raise WrongInput(f"{KEY}: {config.ratio} raised {text}") from error
    if wrong:
        raise WrongInput(f"{KEY}: {config.ratio} {wrong}; docs/losses.md shows one that works")


def _line_of(error: Exception, function: Callable[..., Objective]) -> str:
    """` (my_loss.py, line 3)` if the function's own file was reached."""
    file = inspect.getsourcefile(function)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if file is not None and lines else ""


def _example() -> Tokens:
    """Near the sampler, far from it, and a placeholder of the sampler's; advantages of either sign and 0."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1, -4.0])
    log_ratio = torch.tensor([0.0, 0.1, -2.0, 2.0, -0.3, MAX_LOG_RATIO])
    advantages = torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5, 0.0])
    return Tokens.of(logprobs, log_ratio, advantages, torch.tensor([2, 3, 1]))


def _wrong_with(returned: Any, tokens: Tokens) -> str:
    """What is wrong with a function's answer, to follow its name; '' if nothing is."""
    n, dtype = len(tokens.unit), tokens.unit.dtype
    if not (isinstance(returned, tuple) and len(returned) == 2 and all(isinstance(one, Tensor) for one in returned)):
        got = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        return f"must return two tensors, the objective and which tokens were clipped, got {got}"
    objective, clipped = returned
    if objective.shape != (n,) or objective.dtype != dtype:
        got = f"{list(objective.shape)} {objective.dtype}"
        return f"must return one objective per token, [{n}] {dtype} of {n} tokens, got {got}"
    if clipped.shape != (n,) or clipped.dtype != torch.bool:
        got = f"{list(clipped.shape)} {clipped.dtype}"
        return f"must say of each token whether it was clipped, [{n}] torch.bool of {n} tokens, got {got}"
    if not objective.requires_grad:
        return "returns an objective without gradient: it must be made of tokens.ratio, tokens.logprobs or weighted()"
    (slopes,) = torch.autograd.grad(objective.sum(), tokens.unit, allow_unused=True)
    if slopes is None:
        return "returns an objective that does not depend on the logprobs"
    for what, values in (("objective", objective), ("gradient", slopes)):
        if not values.isfinite().all():
            shown = ", ".join(f"{value:.3g}" for value in values.tolist())
            ratios = ", ".join(f"{value:.3g}" for value in tokens.sg_ratio.tolist())
            return f"must have a finite {what}, got [{shown}] for ratios of [{ratios}]"
    return ""


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
        learned: which tokens the objective has; None: all. The KL has all of them, and
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


# The value's loss, one token at a time, and how well it told what came. Pure functions.


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
    one that misleads; None where all returns are equal, but for rounding (learner.algo.advantage.is_noise)."""
    return None if is_noise(returns, known_to) else 1 - float(np.var(returns - values)) / float(np.var(returns))


# The tokens of a batch before which the policy was least certain: at these a completion takes one way or another.
# Wang et al. 2506.01939, section 5, learn from the 20 % of highest entropy alone. Letters: as in
# learner.batch.micro_batch.


class Uncertain(NamedTuple):
    """tokens: [M] those that the objective has. least: the lowest entropy among them, nats."""

    tokens: Bool[Tensor, " M"]
    least: float


def most_uncertain(entropies: Float[Tensor, " M"], share: float) -> Uncertain | None:
    """Those of the given share of the tokens whose entropies are highest, rounded up to a whole number, and all that
    are equal to the lowest of them. nan: no token of the loss. None where there is none."""
    known = entropies[~entropies.isnan()]
    if not len(known):
        return None
    least = known.topk(math.ceil(share * len(known))).values[-1]
    return Uncertain(entropies >= least, float(least))
