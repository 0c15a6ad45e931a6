"""PPO's value: its passes over micro-batches, and its optimizer steps. It learns beside the policy and never within the
policy's passes: one role's activations are gone before the other's forward pass, so the peak is the larger of the two.
Letters: as in learner.batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from learner.algo.loss import Uncertain, most_uncertain, value_loss
from learner.algo.targets import Assessment, Targets, assess, learnable, targets_of
from learner.batch.micro_batch import MicroBatch, WholeBatch, micro_batches, whole_batches
from learner.batch.rows import Rows
from learner.config.settings import LearnerConfig, rate_factor
from learner.model.policy import Policy
from learner.model.roles import ScoredRole
from learner.trainer.forward_backward import Learned, Passes, Scored, Update, placed
from learner.trainer.gradient_sums import gradient_sums, least_tokens
from learner.trainer.memory_limit import TokenBudget, longest_rows
from learner.trainer.optimizer import AnyUpdater, Updater

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


# The optimizer steps of one batch, or of a rehearsal of the largest one. Letters: as in learner.batch.


class Updates:
    """max_completion_length: tokens; the constant of the dr_grpo loss, and the longest that a rehearsal takes.
    total_steps: of the run, for the learning-rate schedule.

    Attributes:
        updater: of the policy. value: PPO's; None: GRPO.
    """

    def __init__(
        self,
        policy: Policy,
        updater: AnyUpdater,
        passes: Passes,
        budget: TokenBudget,
        config: LearnerConfig,
        value: ValueLearner | None,
        *,
        max_completion_length: int,
        total_steps: int,
    ) -> None:
        self._policy, self.updater, self._passes, self._budget = policy, updater, passes, budget
        self.value = value
        self._config, self._max_completion_length, self._total_steps = config, max_completion_length, total_steps
        self._fine = least_tokens(config, budget.peers, policy.head.device)

    @property
    def passed(self) -> int:
        """Micro-batches so far."""
        return self._passes.passed + (0 if self.value is None else self.value.passed)

    @property
    def updaters(self) -> list[AnyUpdater]:
        """Of all roles that are trained, the policy's first."""
        return [self.updater, *([] if self.value is None else [self.value.updater])]

    @property
    def may_overflow(self) -> bool:
        """True while a loss scale, not the model, may be to blame for a gradient that is not finite."""
        return any(updater.may_overflow for updater in self.updaters)

    def mismatch(self) -> pa.Array:
        """[R] of the newest batch (TokenMismatch.rows)."""
        return self._passes.mismatch.rows()

    def rate(self, version: int) -> float:
        """The learning rate of the batch that the policy of that version learns from."""
        return self._config.learning_rate * rate_factor(version, self._total_steps, self._config.schedule)

    def learn(self, rows: Rows, version: int, rate: float) -> Learned:
        """learner.updates_per_batch of them, but for those without anything to learn. Each takes its own micro-batches
        again when memory runs out, never an update before it. version: the policy's before the batch.

        With a value each of the policy's updates is followed by one of the value, on the same completions. In the first
        learner.value.warmup versions the value alone learns.
        """
        self._passes.mismatch.begin(rows.lengths)
        known = None if self.value is None else self.value.assess(rows)
        targets = targets_of(
            rows, self._config, self._max_completion_length, None if known is None else known.advantages
        )
        policy_learns = known is None or version >= self._config.value.warmup
        proximal = self._proximal(rows, targets) if policy_learns else None
        uncertain = self._uncertain(rows, targets) if policy_learns else None
        learned = Learned([], [], {} if known is None else known.metrics())
        if uncertain is not None:
            learned.assessment["policy/top_entropy"] = uncertain.least
        for number in range(self._config.updates_per_batch):
            own = targets.update == number
            plan = self._plan(rows, targets, own)
            if policy_learns:
                learn = partial(
                    self._passes.learn, version=version, proximal=proximal if number > 0 else None,
                    learned=None if uncertain is None else uncertain.tokens,
                )  # fmt: skip
                learned.policy.extend(self._update(self._budget.run(plan, learn), rate))
            if self.value is not None and known is not None:
                tokens = int(rows.counts[own & targets.trained].sum())
                learned.value.extend(self.value.learn(plan, known, tokens, version))
        return learned

    def _proximal(self, rows: Rows, targets: Targets) -> Tensor | None:
        """[M] logprobs of the policy that the batch begins with, for the updates after the first; None without any."""
        if self._config.updates_per_batch == 1:
            return None
        later = self._plan(rows, targets, targets.update > 0)
        return placed(self._budget.run(later, self._passes.score), len(rows.completions))

    def _uncertain(self, rows: Rows, targets: Targets) -> Uncertain | None:
        """Those that learner.loss.top_entropy chooses of the completions with an advantage, by the entropies of the
        policy that the batch begins with; None where it chooses all, or there are none."""
        share = self._config.loss.top_entropy
        if share == 1:
            return None
        counted = np.concatenate([[0], np.cumsum(targets.advantages != 0)])
        chosen = (counted[rows.starts + rows.lengths] > counted[rows.starts]) | self._config.loss.own
        plan = self._plan(rows, targets, chosen)
        entropies = placed(self._budget.run(plan, self._passes.entropies), len(rows.completions))
        return most_uncertain(entropies, share)

    def _update(self, parts: list[dict[str, Tensor]], rate: float) -> list[Update]:
        """The optimizer step on the gradient of these micro-batches, which are those of all ranks; none without any."""
        if not parts:
            return []
        self._passes.sums.finish()
        loss = float(torch.stack([part["loss"] for part in parts]).sum())
        norm, done = self.updater.step(rate, loss_is_finite=math.isfinite(loss))
        self._policy.sync()
        return [Update(parts, norm, done)]

    def _plan(self, rows: Rows, targets: Targets, own: npt.NDArray[np.bool_]) -> Callable[[int], list[MicroBatch]]:
        """Token budget -> micro-batches of those of the completions that are trained."""
        chosen, packed, fine = own & targets.trained, self._policy.packed, self._fine
        return lambda budget: micro_batches(
            rows, targets.advantages, targets.coefficients, chosen, budget, packed=packed, fine=fine
        )

    def sequence_scores(self, rows: Rows, role: str) -> list[float]:
        """[R] what the head of a role (Policy.scored) says of prompt and completion, without a gradient."""
        pad, packed, fine = self._policy.scored[role].pad, self._policy.packed, self._fine

        def plan(tokens: int) -> list[WholeBatch]:
            return whole_batches(rows, tokens, packed=packed, pad=pad, fine=fine)

        found = self._budget.run(plan, partial(self._passes.sequence_scores, role=role))
        scores = {row: score for own, given in found for row, score in zip(own, given, strict=True)}
        return [scores[row] for row in range(len(rows.lengths))]

    def rehearse(self, prompt_length: int, version: int) -> None:
        """Forward and backward over the largest micro-batch, on every rank, beside room for the optimizer's states;
        nothing stays."""
        length = self._max_completion_length
        budget, packed = self._budget, self._policy.packed
        # Enough completions to fill a micro-batch, whether they share their prompt or not.
        rows = longest_rows(prompt_length, length, count=budget.tokens // max(length - 1, 1) + 1)
        same, each = np.ones(len(rows.lengths)), np.ones(len(rows.completions))

        def plan(tokens: int) -> list[MicroBatch]:
            return micro_batches(rows, each, same, same > 0, tokens, packed=packed)[:1] * budget.peers.count

        missing = sum(updater.missing_state_bytes() for updater in self.updaters)
        states = torch.empty(missing, dtype=torch.uint8, device=self._policy.head.device)
        budget.run(plan, partial(self._passes.learn, version=version))
        if self.value is not None:
            self.value.rehearse(plan, len(rows.completions))
        del states
        self._policy.clear_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizers, of tensors and plain values only, so that torch.load(weights_only=True) reads it."""
        value = None if self.value is None else self.value.updater.state_dict()
        return {"updater": self.updater.state_dict(), "value": value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updater.load_state_dict(state["updater"])
        if self.value is not None:
            self.value.updater.load_state_dict(state["value"])
