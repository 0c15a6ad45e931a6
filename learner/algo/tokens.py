"""The completion tokens of a micro-batch, as a surrogate objective sees them. Letters: N and C as in learner.batch."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
