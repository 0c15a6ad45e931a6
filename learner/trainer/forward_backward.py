"""Forward and backward passes over the micro-batches of a step. Letters: N as in learner.batch, M too."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from learner.algo.loss import token_loss
from learner.algo.own_surrogate import function_of
from learner.batch.micro_batch import MicroBatch
from learner.batch.whole import WholeBatch
from learner.config.learner import LearnerConfig
from learner.model.policy import Policy
from learner.trainer.gradient_sums import GradientSums
from learner.trainer.token_mismatch import TokenMismatch

Scored = tuple[Tensor, Tensor]  # of a micro-batch, in main memory: [N] places in the batch's [M], and float32 numbers


def placed(scored: Sequence[Scored], tokens: int) -> Tensor:
    """[M] the numbers of all micro-batches, nan for the tokens of none."""
    known = torch.full((tokens,), math.nan)
    for places, values in scored:
        known[places] = values
    return known


class Passes:
    """What the trainer does with a model and micro-batches.

    Args:
        sums: of the gradients; `finish` is the caller's.
        temperature: the sampler's.
        scale: of the loss, before the backward pass (float16).

    Attributes:
        passed: micro-batches so far. mismatch: what `learn` noted of the tokens of this batch.
    """

    def __init__(
        self,
        policy: Policy,
        config: LearnerConfig,
        temperature: float,
        device: torch.device,
        scale: Callable[[Tensor], Tensor],
        sums: GradientSums,
    ) -> None:
        self.sums = sums
        self._policy, self._loss, self._split = policy, config.loss, config.updates_per_batch > 1
        self._temperature, self._device, self._scale = temperature, device, scale
        self.passed, self.mismatch = 0, TokenMismatch()
        function_of(config.loss.ratio)  # a user's file that does not load ends the start, not the first step

    def learn(
        self,
        batches: Sequence[MicroBatch],
        *,
        version: int,
        proximal: Tensor | None = None,
        learned: Tensor | None = None,
    ) -> list[dict[str, Tensor]]:
        """Adds up the gradients of the micro-batches; what their metrics are made of.

        Args:
            version: the policy version that the batch began with.
            proximal: [M] logprobs of that version, by `score`; None: the policy is still the same.
            learned: [M] whether the objective has the token (learner.loss.top_entropy); None: it has all.
        """
        self._policy.clear_gradients()
        self.sums.clear()
        references = self._references(batches) if self._loss.beta > 0 else [None] * len(batches)
        parts = []
        for batch, reference in zip(batches, references, strict=True):
            moved = batch.to(self._device)
            states = self._policy.predicting(moved)
            logprobs, entropy = self._policy.logprobs(states, moved.targets, self._temperature)
            near = logprobs if proximal is None else proximal[batch.places].to(self._device)
            slopes, part = token_loss(
                logprobs, entropy, moved, self._loss, reference=reference, version=version,
                proximal=near if self._split else None,
                learned=None if learned is None else learned[batch.places].to(self._device),
            )  # fmt: skip
            if batch.idle:
                slopes = torch.zeros_like(slopes)
            else:
                self.mismatch.note(batch.places, near, moved.behavior)
            torch.autograd.backward(logprobs, self._scale(slopes))
            self._policy.collect_gradients()
            self.sums.add()
            parts.append(part)
            self.passed += 1
        return parts

    def score(self, batches: Sequence[MicroBatch]) -> list[Scored]:
        """The policy's logprobs of the tokens of each micro-batch."""
        return [(batch.places, self._of_tokens(batch, self._policy.token_logprobs).cpu()) for batch in batches]

    def entropies(self, batches: Sequence[MicroBatch]) -> list[Scored]:
        """Of the policy, before each token of each micro-batch."""
        return [(batch.places, self._of_tokens(batch, self._policy.token_entropies).cpu()) for batch in batches]

    @torch.no_grad()
    def sequence_scores(self, batches: Sequence[WholeBatch], role: str) -> list[tuple[list[int], list[float]]]:
        """Of each micro-batch its rows, and what the head of a role (Policy.scored) says of the last token of each."""
        scores = []
        with self._policy.acting_as(role):
            for whole in batches:
                self.passed += 1
                batch = whole.batch.to(self._device)
                hidden = self._policy.hidden(batch.ids, batch.positions, batch.layout)
                found = self._policy.scored[role].head(hidden[whole.ends.to(self._device)])
                scores.append((whole.rows.tolist(), found.tolist()))
        return scores

    def _references(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        with self._policy.acting_as("reference"):
            return [self._of_tokens(batch, self._policy.token_logprobs) for batch in batches]

    @torch.no_grad()
    def _of_tokens(self, batch: MicroBatch, scores: Callable[[Tensor, Tensor, float], Tensor]) -> Tensor:
        self.passed += 1
        moved = batch.to(self._device)
        return scores(self._policy.predicting(moved), moved.targets, self._temperature)
