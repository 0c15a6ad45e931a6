"""PPO's value: its passes over micro-batches, and its optimizer steps. It learns beside the policy and never within the
policy's passes: one role's activations are gone before the other's forward pass, so the peak is the larger of the two.
Letters: as in learner.batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.algo.ppo import Assessment, assess
from learner.algo.targets import learnable
from learner.algo.value_loss import value_loss
from learner.batch.micro_batch import MicroBatch, micro_batches
from learner.batch.rows import Rows
from learner.config.learner import LearnerConfig
from learner.model.policy import Policy
from learner.model.roles import ScoredRole
from learner.trainer.forward_backward import Scored, placed
from learner.trainer.gradient_sums import gradient_sums, least_tokens
from learner.trainer.learning_rate import rate_factor
from learner.trainer.memory_limit import TokenBudget
from learner.trainer.optimizer import Updater
from learner.trainer.update import Update

VALUE = "value"  # the role's name

Plan = Callable[[int], Sequence[MicroBatch]]  # token budget -> micro-batches


def value_roles(config: LearnerConfig) -> list[ScoredRole]:
    """What the policy's base is asked for beside it."""
    if config.algorithm == "grpo":
        return []
    return [ScoredRole(VALUE, config.value.start, trained=True, key="learner.value.start")]


class ValueLearner:
    """total_steps: of the run, for the learning-rate schedule.

    Attributes:
        updater: of the adapter and its head. passed: micro-batches so far.
    """

    def __init__(
        self, policy: Policy, config: LearnerConfig, budget: TokenBudget, *, dtype: str, total_steps: int
    ) -> None:
        masters = policy.scored[VALUE].masters
        assert masters is not None, "the value's adapter is asked for as trained"
        self._policy, self._head, self._masters = policy, policy.scored[VALUE].head, masters
        self._config, self._budget, self._total_steps = config, budget, total_steps
        self._rounding = float(torch.finfo(getattr(torch, dtype)).eps)
        weights = list(masters.named.values())
        self.updater = Updater(weights, config, dtype=dtype, device=policy.head.device)
        self._sums = gradient_sums(weights, config, budget.peers)
        self._fine = least_tokens(config, budget.peers, policy.head.device)
        self.passed = 0

    def assess(self, rows: Rows) -> Assessment:
        """What the present value makes of the batch, by a pass without gradient."""
        trained = learnable(rows, self._config.loss)
        scored = self._budget.run(self._plan(rows, trained), self._score)
        values = placed(scored, len(rows.completions)).numpy()
        return assess(rows, values, trained, self._config.value, self._rounding)

    def learn(self, plan: Plan, assessment: Assessment, tokens: int, version: int) -> list[Update]:
        """One optimizer step on the micro-batches of `plan`, which have that many tokens; none without any.

        assessment: before the batch's first update. version: the policy's, then.
        """
        if tokens == 0:
            return []
        parts = self._budget.run(plan, partial(self._learn, assessment=assessment, weight=1 / tokens))
        loss = float(torch.stack([part["loss"] for part in parts]).sum())
        rate = self._config.value.learning_rate * rate_factor(version, self._total_steps, self._config.schedule)
        self._sums.finish()
        norm, done = self.updater.step(rate, loss_is_finite=math.isfinite(loss))
        self._masters.sync()
        return [Update(parts, norm, done)]

    def rehearse(self, plan: Plan, tokens: int) -> None:
        """Forward and backward over the micro-batches of `plan`, from a batch of so many tokens; nothing stays."""
        nothing = np.zeros(tokens)
        of_batch = Assessment(nothing, nothing, nothing, nothing == 0)
        self._budget.run(plan, partial(self._learn, assessment=of_batch, weight=1.0))
        self._masters.clear_gradients()

    def _plan(self, rows: Rows, trained: npt.NDArray[np.bool_]) -> Plan:
        of_tokens, of_completions = np.zeros(len(rows.completions)), np.zeros(len(rows.lengths))
        return lambda budget: micro_batches(
            rows, of_tokens, of_completions, trained, budget, packed=self._policy.packed, fine=self._fine
        )

    @torch.no_grad()
    def _score(self, batches: Sequence[MicroBatch]) -> list[Scored]:
        """Values of the tokens of each micro-batch."""
        with self._policy.acting_as(VALUE):
            return [(batch.places, self._values(batch).cpu()) for batch in batches]

    def _learn(
        self, batches: Sequence[MicroBatch], *, assessment: Assessment, weight: float
    ) -> list[dict[str, Tensor]]:
        """Adds up the gradients of the micro-batches. A forward pass and its backward pass are within one
        role: what is computed a second time must be computed with the same adapter."""
        self._masters.clear_gradients()
        self._sums.clear()
        parts = []
        with self._policy.acting_as(VALUE):
            for batch in batches:
                values, places = self._values(batch), batch.places.numpy()
                returns, old = (
                    torch.from_numpy(of_batch[places].astype(np.float32)).to(values.device)
                    for of_batch in (assessment.returns, assessment.values)
                )
                slopes, part = value_loss(values, returns, old, weight=weight, clip=self._config.value.clip)
                torch.autograd.backward(values, self.updater.scale(torch.zeros_like(slopes) if batch.idle else slopes))
                self._masters.collect_gradients()
                self._sums.add()
                parts.append(part)
        return parts

    def _values(self, batch: MicroBatch) -> Tensor:
        """[N] float32."""
        self.passed += 1
        values: Tensor = self._head(self._policy.predicting(batch.to(self._policy.head.device)))
        return values


def value_learner(
    policy: Policy, config: LearnerConfig, budget: TokenBudget, *, dtype: str, total_steps: int
) -> ValueLearner | None:
    """None with GRPO."""
    if config.algorithm == "grpo":
        return None
    return ValueLearner(policy, config, budget, dtype=dtype, total_steps=total_steps)
