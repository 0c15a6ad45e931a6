"""Forward and backward passes over the micro-batches of a step. Letters: N as in learner.batch, M too."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from learner.algo.loss import function_of, metrics_of, token_loss, value_metrics_of
from learner.batch.micro_batch import MicroBatch, WholeBatch
from learner.config.settings import LearnerConfig
from learner.model.policy import Policy
from learner.trainer.gradient_sums import GradientSums

# The mismatch of each token that a batch was trained on: learner's logprob minus sampler's. For people who look at a
# run: nothing is computed from it, and nothing of the step waits for it.

PER_ROW = pa.list_(pa.float16())


class TokenMismatch:
    """Of one batch at a time. Letters: R rows of the batch, M their tokens, N the trained tokens of a micro-batch."""

    def __init__(self) -> None:
        self._lengths: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._parts: list[tuple[Tensor, Tensor]] = []

    def begin(self, lengths: npt.NDArray[np.int64]) -> None:
        """Forgets the batch before. lengths: [R] tokens of each row."""
        self._lengths, self._parts = lengths, []

    def note(self, places: Tensor, began_with: Tensor, behavior: Tensor) -> None:
        """A micro-batch. places: [N] where in [M] each token stands. began_with, behavior: [N] logprobs in nats, of the
        policy that the batch began with and of the sampler. It stays where it is until it is asked for."""
        self._parts.append((places, (began_with.detach() - behavior).half()))

    def rows(self) -> pa.Array:
        """[R] lists of float16 nats, nan where the policy did not sample the token; null: the row was not trained on. A
        micro-batch that was taken again counts as it was taken last."""
        known = np.full(int(self._lengths.sum()), math.nan, np.float16)
        for places, values in self._parts:
            known[places.cpu().numpy()] = values.cpu().numpy()
        offsets = np.concatenate([[0], np.cumsum(self._lengths)])
        trained = [not np.isnan(known[a:b]).all() for a, b in pairwise(offsets)]
        return _lists(known, offsets, trained)


def _lists(values: npt.NDArray[np.float16], offsets: npt.NDArray[np.int64], known: Sequence[bool]) -> pa.Array:
    """Rows that are not known take no room."""
    rows = [values[a:b] if there else None for (a, b), there in zip(pairwise(offsets), known, strict=True)]
    return pa.array(rows, PER_ROW)


# What one optimizer step was, and what a batch's steps say of themselves.


class Named(NamedTuple):
    """A role's metrics, and the setting of its rate."""

    loss: str
    norm: str
    rate: str


ROLES = {
    "policy": Named("loss/total", "loss/grad_norm", "learner.learning_rate"),
    "value": Named("value/loss", "value/grad_norm", "learner.value.learning_rate"),
}


class Update(NamedTuple):
    """One optimizer step of a role."""

    parts: list[dict[str, Tensor]]  # of its micro-batches (learner.algo.loss.token_loss, value_loss.value_loss)
    norm: float  # of the gradient, before clipping
    done: bool  # false if loss or gradient was not finite


class Learned(NamedTuple):
    """A batch's updates, without those that had nothing to learn from."""

    policy: list[Update]
    value: list[Update]
    assessment: dict[str, float]  # the metrics of the values before them

    @property
    def failed(self) -> str | None:
        """The first role of which no update could be taken, by its name in ROLES."""
        for name, updates in zip(ROLES, (self.policy, self.value), strict=True):
            if updates and not any(update.done for update in updates):
                return name
        return None

    def metrics(self) -> dict[str, float]:
        """By name; those that end in /grad_norm are means over the updates."""
        told = metrics_of([part for update in self.policy for part in update.parts], max(len(self.policy), 1))
        told |= value_metrics_of([part for update in self.value for part in update.parts], len(self.value))
        if self.value:
            told["value/grad_norm"] = _norm(self.value)
        return (
            told
            | self.assessment
            | {
                "loss/grad_norm": _norm(self.policy),
                "loss/skipped_nonfinite": float(sum(not update.done for update in (*self.policy, *self.value))),
            }
        )


def _norm(updates: list[Update]) -> float:
    return float(np.mean([update.norm for update in updates])) if updates else 0.0


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
