"""The optimizer steps of one batch, or of a rehearsal of the largest one. Letters: as in learner.batch."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.algo.targets import Targets, targets_of
from learner.batch.micro_batch import MicroBatch, micro_batches
from learner.batch.rows import Rows
from learner.batch.whole import WholeBatch, whole_batches
from learner.config.learner import LearnerConfig
from learner.model.policy import Policy
from learner.trainer.forward_backward import Passes
from learner.trainer.memory_limit import TokenBudget, longest_rows
from learner.trainer.optimizer import rate_factor
from learner.trainer.stochastic_rounding import AnyUpdater


class Update(NamedTuple):
    """One optimizer step of a batch."""

    parts: list[dict[str, Tensor]]  # of its micro-batches (learner.algo.loss.token_loss)
    norm: float  # of the gradient, before clipping
    done: bool  # false if loss or gradient was not finite


class Updates:
    """max_completion_length: tokens; the constant of the dr_grpo loss, and the longest that a rehearsal takes.
    total_steps: of the run, for the learning-rate schedule.
    """

    def __init__(
        self,
        policy: Policy,
        updater: AnyUpdater,
        passes: Passes,
        budget: TokenBudget,
        config: LearnerConfig,
        *,
        max_completion_length: int,
        total_steps: int,
    ) -> None:
        self._policy, self._updater, self._passes, self._budget = policy, updater, passes, budget
        self._config, self._max_completion_length, self._total_steps = config, max_completion_length, total_steps

    @property
    def passed(self) -> int:
        """Micro-batches so far."""
        return self._passes.passed

    def rate(self, version: int) -> float:
        """The learning rate of the batch that the policy of that version learns from."""
        return self._config.learning_rate * rate_factor(version, self._total_steps, self._config.schedule)

    def learn(self, rows: Rows, version: int, rate: float) -> list[Update]:
        """learner.updates_per_batch of them, but for those without anything to learn. Each takes its own micro-batches
        again when memory runs out, never an update before it. version: the policy's before the batch."""
        targets = targets_of(rows, self._config, self._max_completion_length)
        count, proximal = self._config.updates_per_batch, None
        if count > 1:
            later = self._plan(rows, targets, targets.update > 0)
            proximal = self._budget.run(later, partial(self._passes.score, tokens=len(rows.completions)))
        updates = []
        for number in range(count):
            learn = partial(self._passes.learn, version=version, proximal=proximal if number > 0 else None)
            parts = self._budget.run(self._plan(rows, targets, targets.update == number), learn)
            if parts:
                loss = float(torch.stack([part["loss"] for part in parts]).sum())
                norm, done = self._updater.step(rate, loss_is_finite=math.isfinite(loss))
                self._policy.sync()
                updates.append(Update(parts, norm, done))
        return updates

    def _plan(self, rows: Rows, targets: Targets, own: npt.NDArray[np.bool_]) -> Callable[[int], list[MicroBatch]]:
        """Token budget -> micro-batches of those of the completions that are trained."""
        chosen, packed = own & targets.trained, self._policy.packed
        return lambda budget: micro_batches(
            rows, targets.advantages, targets.coefficients, chosen, budget, packed=packed
        )

    def sequence_scores(self, rows: Rows, role: str) -> list[float]:
        """[R] what the head of a role (Policy.scored) says of prompt and completion, without a gradient."""
        pad, packed = self._policy.pad, self._policy.packed

        def plan(tokens: int) -> list[WholeBatch]:
            return whole_batches(rows, tokens, packed=packed, pad=pad)

        scores = self._budget.run(plan, partial(self._passes.sequence_scores, role=role))
        return [scores[row] for row in range(len(rows.lengths))]

    def rehearse(self, prompt_length: int, version: int) -> None:
        """Forward and backward over the largest micro-batch, beside room for the optimizer's states; nothing stays."""
        length = self._max_completion_length
        budget, packed = self._budget, self._policy.packed
        # Enough completions to fill a micro-batch, whether they share their prompt or not.
        rows = longest_rows(prompt_length, length, count=budget.tokens // max(length - 1, 1) + 1)
        same, each = np.ones(len(rows.lengths)), np.ones(len(rows.completions))

        def plan(tokens: int) -> list[MicroBatch]:
            return micro_batches(rows, each, same, same > 0, tokens, packed=packed)[:1]

        states = torch.empty(self._updater.missing_state_bytes(), dtype=torch.uint8, device=self._policy.head.device)
        budget.run(plan, partial(self._passes.learn, version=version))
        del states
        self._policy.clear_gradients()
