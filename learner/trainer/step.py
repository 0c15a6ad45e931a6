"""The optimizer steps of one batch: forward and backward passes over micro-batches, for the policy and PPO's value.

Read `OptimizerSteps.learn` first: it makes the steps of a batch for the Trainer. `Passes` runs the policy on
micro-batches; `ValueLearner` runs PPO's value and makes its optimizer steps.

Letters, as in learner.batch.micro_batch: R completions of the batch, M their tokens, N the trained tokens of a
micro-batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from learner.algo.loss import (
    Taught,
    Uncertain,
    function_of,
    kl_weights,
    metrics_of,
    most_uncertain,
    token_loss,
    value_loss,
    value_metrics_of,
)
from learner.algo.targets import Assessment, Targets, assess, learnable, targets_of
from learner.batch.micro_batch import MicroBatch, Rows, WholeBatch, micro_batches, whole_batches
from learner.config.settings import LearnerConfig, rate_factor
from learner.model.logprob import Top
from learner.model.policy import Policy
from learner.model.roles import ScoredRole
from learner.trainer.memory_limit import TokenBudget, longest_rows
from learner.trainer.optimizer import AnyUpdater, GradientSums, Updater, gradient_sums, least_tokens

PER_ROW = pa.list_(pa.float16())


class TokenMismatch:
    """The mismatch of each trained token of a batch: the learner's logprob minus the sampler's.

    It is recorded for people who look at a run. Nothing is computed from it. The driver fetches it after the step,
    beside the new policy.
    """

    def __init__(self) -> None:
        self._lengths: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._parts: list[tuple[Tensor, Tensor]] = []

    def begin(self, lengths: npt.NDArray[np.int64]) -> None:
        """Starts a new batch and forgets the previous one. lengths: [R] tokens of each row."""
        self._lengths, self._parts = lengths, []

    def note(self, places: Tensor, began_with: Tensor, behavior: Tensor) -> None:
        """Records a micro-batch; the numbers stay on their device until `rows` is called.

        places: [N] index in [M] of each token. began_with, behavior: [N] logprobs in nats, under the policy that the
        batch began with and under the sampler.
        """
        self._parts.append((places, (began_with.detach() - behavior).half()))

    def rows(self) -> pa.Array:
        """Returns [R] lists of float16 nats: nan where the policy did not sample the token, null instead of a list for
        a row that was not trained on. Of a micro-batch that was computed twice, the last numbers count."""
        known = np.full(int(self._lengths.sum()), math.nan, np.float16)
        for places, values in self._parts:
            known[places.cpu().numpy()] = values.cpu().numpy()
        offsets = np.concatenate([[0], np.cumsum(self._lengths)])
        trained = [not np.isnan(known[a:b]).all() for a, b in pairwise(offsets)]
        return _lists(known, offsets, trained)


def _lists(values: npt.NDArray[np.float16], offsets: npt.NDArray[np.int64], known: Sequence[bool]) -> pa.Array:
    """Makes one list per row; a row that is not known becomes null, which takes no room."""
    rows = [values[a:b] if there else None for (a, b), there in zip(pairwise(offsets), known, strict=True)]
    return pa.array(rows, PER_ROW)


class Named(NamedTuple):
    """Names that belong to a trained role: its two metrics, and the configuration key of its learning rate."""

    loss: str
    norm: str
    rate: str


ROLES = {
    "policy": Named("loss/total", "loss/grad_norm", "learner.learning_rate"),
    "value": Named("value/loss", "value/grad_norm", "learner.value.learning_rate"),
}


class Update(NamedTuple):
    """One optimizer step of a role."""

    parts: list[dict[str, Tensor]]  # what token_loss or value_loss (learner.algo.loss) returned for each micro-batch
    norm: float  # norm of the gradient before clipping
    done: bool  # false if the step was skipped since loss or gradient was not finite


class Learned(NamedTuple):
    """The optimizer steps of a batch, without those that had nothing to learn from."""

    policy: list[Update]
    value: list[Update]
    assessment: dict[str, float]  # metrics that were computed before the first step

    @property
    def failed(self) -> str | None:
        """The name in ROLES of the first role whose updates were all skipped; None if there is none."""
        for name, updates in zip(ROLES, (self.policy, self.value), strict=True):
            if updates and not any(update.done for update in updates):
                return name
        return None

    def metrics(self) -> dict[str, float]:
        """Returns metrics by name; a gradient norm is the mean over the updates."""
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


# The numbers of a micro-batch's tokens, in main memory: [N] indices of the tokens in [M], and [N] float32 numbers.
Scored = tuple[Tensor, Tensor]


def placed(scored: Sequence[Scored], tokens: int) -> Tensor:
    """Returns [M] the numbers of all micro-batches, nan for tokens that are in no micro-batch."""
    known = torch.full((tokens,), math.nan, dtype=scored[0][1].dtype if scored else None)
    for places, values in scored:
        known[places] = values
    return known


class Passes:
    """Runs the policy on micro-batches: forward and backward to learn, forward alone to compute logprobs and scores.

    Args:
        sums: where the gradients are summed; the caller calls `finish`.
        temperature: the sampling temperature.
        scale: multiplies the loss's gradient by float16's loss scale before the backward pass.

    Attributes:
        passed: number of micro-batches so far, of any pass.
        mismatch: what `learn` recorded of the tokens of this batch.
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
        function_of(config.loss.ratio)  # loaded now, so that a user's file that does not load fails at the start

    def learn(
        self,
        batches: Sequence[MicroBatch],
        *,
        version: int,
        proximal: Tensor | None = None,
        learned: Tensor | None = None,
        taught: Tensor | None = None,
    ) -> list[dict[str, Tensor]]:
        """Adds up the gradients of the micro-batches, and returns for each what its metrics are computed from.

        Args:
            version: the policy version that the batch began with.
            proximal: [M] logprobs under that version, from `score`; None: the policy is still of that version.
            learned: [M] whether the token is in the objective (learner.loss.top_entropy); None: all tokens are.
            taught: [M] the reference's logprobs, from `teach`; None: they are computed here, of the same prompts, or
                the micro-batches have model.teacher's.
        """
        self._policy.clear_gradients()
        self.sums.clear()
        references: Sequence[Tensor | None] = [None] * len(batches)
        if taught is not None:
            references = [taught[batch.places].to(self._device) for batch in batches]
        elif self._loss.beta > 0 and any(batch.taught is None for batch in batches):
            references = self._references(batches)
        parts = []
        for batch, reference in zip(batches, references, strict=True):
            moved = batch.to(self._device)
            states = self._policy.predicting(moved)
            logprobs, entropy, over = self._logprobs(states, moved)
            near = logprobs if proximal is None else proximal[batch.places].to(self._device)
            slopes, part = token_loss(
                logprobs, entropy, moved, self._loss, version=version, taught=over,
                reference=reference if moved.taught is None else moved.taught,
                proximal=near if self._split else None,
                learned=None if learned is None else learned[batch.places].to(self._device),
            )  # fmt: skip
            given = [(logprobs, slopes)] + ([] if over is None else [(over.kl, kl_weights(moved, self._loss))])
            if batch.idle:
                given = [(found, torch.zeros_like(slope)) for found, slope in given]
            else:
                self.mismatch.note(batch.places, near, moved.behavior)
            torch.autograd.backward([found for found, _ in given], [self._scale(slope) for _, slope in given])
            self._policy.collect_gradients()
            self.sums.add()
            parts.append(part)
            self.passed += 1
        return parts

    def _logprobs(self, states: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Taught | None]:
        """Returns logprobs and entropies of the tokens that the states predict, and the KL to a teacher over its
        likeliest tokens, where the micro-batch has them."""
        if batch.top_ids is None or batch.top_logprobs is None:
            return (*self._policy.logprobs(states, batch.targets, self._temperature), None)
        top = Top(batch.top_ids, batch.top_logprobs)
        found = self._policy.taught_logprobs(states, batch.targets, top, self._temperature)
        return found.logprobs, found.entropy, Taught(found.kl, found.mass)

    def score(self, batches: Sequence[MicroBatch]) -> list[Scored]:
        """Returns the policy's logprobs of the tokens of each micro-batch, without a gradient."""
        return [(batch.places, self._of_tokens(batch, self._policy.token_logprobs).cpu()) for batch in batches]

    def teach(self, batches: Sequence[MicroBatch]) -> list[Scored]:
        """Returns the reference's logprobs of the tokens of each micro-batch, whose prompts may be the teacher's."""
        return [(one.places, found.cpu()) for one, found in zip(batches, self._references(batches), strict=True)]

    def entropies(self, batches: Sequence[MicroBatch]) -> list[Scored]:
        """Returns the entropy of the policy's distribution of each token of each micro-batch, without a gradient."""
        return [(batch.places, self._of_tokens(batch, self._policy.token_entropies).cpu()) for batch in batches]

    @torch.no_grad()
    def sequence_scores(self, batches: Sequence[WholeBatch], role: str) -> list[tuple[list[int], list[float]]]:
        """Returns for each micro-batch its rows, and the score of each: the output of a role's head (Policy.scored) at
        the row's last token."""
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


VALUE = "value"  # name of the role of PPO's value

Plan = Callable[[int], Sequence[MicroBatch]]  # token budget -> micro-batches


def value_roles(config: LearnerConfig) -> list[ScoredRole]:
    """The roles that the base model has besides the policy and its reference: PPO's value."""
    if config.algorithm != "ppo":
        return []
    return [ScoredRole(VALUE, config.value.start, trained=True, key="learner.value.start")]


class ValueLearner:
    """PPO's value: its passes over micro-batches, and its optimizer steps.

    The value is an adapter and a head on the policy's base. It learns apart from the policy's passes: the activations
    of one role are freed before the forward pass of the other, so the memory peak is the larger of the two.

    total_steps: number of steps of the run, for the learning-rate schedule.

    Attributes:
        updater: the updater of the value's adapter and head.
        passed: number of micro-batches so far.
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
        """Computes the values of the batch's tokens in a pass without gradient, and from them advantages and
        returns."""
        trained = learnable(rows, self._config.loss)
        scored = self._budget.run(self._plan(rows, trained), self._score)
        values = placed(scored, len(rows.completions)).numpy()
        return assess(rows, values, trained, self._config.value, self._rounding)

    def learn(self, plan: Plan, assessment: Assessment, tokens: int, version: int) -> list[Update]:
        """Makes one optimizer step on the micro-batches of `plan`; returns no update if `tokens` is 0.

        assessment: what `assess` returned before the batch's first update. tokens: number of tokens in the
        micro-batches. version: the policy version before the batch.
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
        """Runs forward and backward over the micro-batches of `plan`, from a batch of `tokens` tokens, and drops the
        gradients."""
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
        """Returns the values of the tokens of each micro-batch."""
        with self._policy.acting_as(VALUE):
            return [(batch.places, self._values(batch).cpu()) for batch in batches]

    def _learn(
        self, batches: Sequence[MicroBatch], *, assessment: Assessment, weight: float
    ) -> list[dict[str, Tensor]]:
        """Adds up the gradients of the micro-batches, and returns for each what its metrics are computed from.

        The backward pass runs within `acting_as`, too: with activation checkpointing it computes activations again, and
        that must be with the value's adapter.
        """
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
        """Returns [N] float32 values of the states before the tokens."""
        self.passed += 1
        values: Tensor = self._head(self._policy.predicting(batch.to(self._policy.head.device)))
        return values


def value_learner(
    policy: Policy, config: LearnerConfig, budget: TokenBudget, *, dtype: str, total_steps: int
) -> ValueLearner | None:
    """Returns the learner of PPO's value; None without PPO."""
    if config.algorithm != "ppo":
        return None
    return ValueLearner(policy, config, budget, dtype=dtype, total_steps=total_steps)


class OptimizerSteps:
    """Makes the optimizer steps of one batch, and the rehearsal with the largest micro-batch.

    max_completion_length: most tokens of a completion; the constant of the dr_grpo loss, and the length in a rehearsal.
    total_steps: number of steps of the run, for the learning-rate schedule.

    Attributes:
        updater: the policy's updater.
        value: the learner of PPO's value; None with GRPO.
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
        """Number of micro-batches so far, of the policy and the value."""
        return self._passes.passed + (0 if self.value is None else self.value.passed)

    @property
    def updaters(self) -> list[AnyUpdater]:
        """The updaters of all trained roles, the policy's first."""
        return [self.updater, *([] if self.value is None else [self.value.updater])]

    @property
    def may_overflow(self) -> bool:
        """Whether a loss scale, not the model, may be to blame for a gradient that is not finite."""
        return any(updater.may_overflow for updater in self.updaters)

    def mismatch(self) -> pa.Array:
        """Returns [R] the mismatch of the newest batch's tokens (TokenMismatch.rows)."""
        return self._passes.mismatch.rows()

    def rate(self, version: int) -> float:
        """Returns the learning rate of the step that starts from this policy version."""
        return self._config.learning_rate * rate_factor(version, self._total_steps, self._config.schedule)

    def learn(self, rows: Rows, version: int, rate: float) -> Learned:
        """Makes learner.updates_per_batch optimizer steps, without those that have nothing to learn from. When memory
        runs out, an update computes its own micro-batches again; earlier updates stay as they are.

        With PPO each update of the policy is followed by an update of the value on the same completions. In the first
        learner.value.warmup versions only the value learns.

        version: the policy version before the batch. rate: the policy's learning rate.
        """
        self._passes.mismatch.begin(rows.lengths)
        known = None if self.value is None else self.value.assess(rows)
        targets = targets_of(
            rows, self._config, self._max_completion_length, None if known is None else known.advantages
        )
        policy_learns = known is None or version >= self._config.value.warmup
        proximal = self._proximal(rows, targets) if policy_learns else None
        uncertain = self._uncertain(rows, targets) if policy_learns else None
        taught = self._taught(rows, targets) if policy_learns else None
        learned = Learned([], [], {} if known is None else known.metrics())
        if uncertain is not None:
            learned.assessment["policy/top_entropy"] = uncertain.least
        for number in range(self._config.updates_per_batch):
            own = targets.update == number
            plan = self._plan(rows, targets, own)
            if policy_learns:
                learn = partial(
                    self._passes.learn, version=version, proximal=proximal if number > 0 else None,
                    learned=None if uncertain is None else uncertain.tokens, taught=taught,
                )  # fmt: skip
                learned.policy.extend(self._update(self._budget.run(plan, learn), rate))
            if self.value is not None and known is not None:
                tokens = int(rows.counts[own & targets.trained].sum())
                learned.value.extend(self.value.learn(plan, known, tokens, version))
        return learned

    def _proximal(self, rows: Rows, targets: Targets) -> Tensor | None:
        """Returns [M] logprobs under the policy that the batch begins with, for the updates after the first; None if
        there is only one update."""
        if self._config.updates_per_batch == 1:
            return None
        later = self._plan(rows, targets, targets.update > 0)
        return placed(self._budget.run(later, self._passes.score), len(rows.completions))

    def _taught(self, rows: Rows, targets: Targets) -> Tensor | None:
        """Returns [M] the reference's logprobs of the completions behind the teacher's prompts (data.teacher); None if
        it is given the policy's, whose micro-batches it then shares.

        Its own micro-batches, as many tokens each, run forward alone and before the policy's."""
        if self._config.loss.beta == 0 or rows.teacher_prompts is None:
            return None
        plan = self._plan(rows.of_teacher, targets, targets.trained)
        return placed(self._budget.run(plan, self._passes.teach), len(rows.completions))

    def _uncertain(self, rows: Rows, targets: Targets) -> Uncertain | None:
        """Returns the tokens that learner.loss.top_entropy chooses among the completions with an advantage, by the
        entropies of the policy that the batch begins with; None if it chooses all, or there are no such completions."""
        share = self._config.loss.top_entropy
        if share == 1:
            return None
        counted = np.concatenate([[0], np.cumsum(targets.advantages != 0)])
        chosen = (counted[rows.starts + rows.lengths] > counted[rows.starts]) | self._config.loss.own
        plan = self._plan(rows, targets, chosen)
        entropies = placed(self._budget.run(plan, self._passes.entropies), len(rows.completions))
        return most_uncertain(entropies, share)

    def _update(self, parts: list[dict[str, Tensor]], rate: float) -> list[Update]:
        """Makes the optimizer step on the gradient of the micro-batches of all ranks, whose results are `parts`;
        returns no update if there are none."""
        if not parts:
            return []
        self._passes.sums.finish()
        loss = float(torch.stack([part["loss"] for part in parts]).sum())
        norm, done = self.updater.step(rate, loss_is_finite=math.isfinite(loss))
        self._policy.sync()
        return [Update(parts, norm, done)]

    def _plan(self, rows: Rows, targets: Targets, own: npt.NDArray[np.bool_]) -> Callable[[int], list[MicroBatch]]:
        """Returns a function: token budget -> micro-batches of the trained ones of the completions in `own`."""
        chosen, packed, fine = own & targets.trained, self._policy.packed, self._fine
        return lambda budget: micro_batches(
            rows, targets.advantages, targets.coefficients, chosen, budget, packed=packed, fine=fine
        )

    def sequence_scores(self, rows: Rows, role: str) -> list[float]:
        """Returns [R] the scores that a role's head (Policy.scored) gives to prompt and completion, without a
        gradient."""
        pad, packed, fine = self._policy.scored[role].pad, self._policy.packed, self._fine

        def plan(tokens: int) -> list[WholeBatch]:
            return whole_batches(rows, tokens, packed=packed, pad=pad, fine=fine)

        found = self._budget.run(plan, partial(self._passes.sequence_scores, role=role))
        scores = {row: score for own, given in found for row, score in zip(own, given, strict=True)}
        return [scores[row] for row in range(len(rows.lengths))]

    def rehearse(self, prompt_length: int, version: int, teacher_length: int = 0, top: int | None = None) -> None:
        """Runs forward and backward over the largest micro-batch on every rank, with memory allocated for the
        optimizer's states, and drops the gradients. Then it runs forward alone over the largest micro-batch of a
        teacher's prompts of `teacher_length` tokens (data.teacher), if there are any. top: as in batch.read."""
        budget = self._budget
        plan, tokens = self._largest(prompt_length, top)
        missing = sum(updater.missing_state_bytes() for updater in self.updaters)
        states = torch.empty(missing, dtype=torch.uint8, device=self._policy.head.device)
        budget.run(plan, partial(self._passes.learn, version=version))
        if self.value is not None:
            self.value.rehearse(plan, tokens)
        if teacher_length:
            budget.run(self._largest(teacher_length)[0], self._passes.teach)
        del states
        self._policy.clear_gradients()

    def _largest(self, prompt_length: int, top: int | None = None) -> tuple[Plan, int]:
        """Returns (token budget -> the largest micro-batch of such prompts, for every rank, the tokens of completions
        that it is made of)."""
        length, peers, packed = self._max_completion_length, self._budget.peers, self._policy.packed
        # There must be enough completions to fill a micro-batch, whether they share their prompt or not.
        rows = longest_rows(prompt_length, length, self._budget.tokens // max(length - 1, 1) + 1, top)
        same, each = np.ones(len(rows.lengths)), np.ones(len(rows.completions))
        return (lambda tokens: micro_batches(rows, each, same, same > 0, tokens, packed=packed)[:1] * peers.count), len(
            rows.completions
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizers' states as tensors and plain values, which torch.load(weights_only=True) reads."""
        value = None if self.value is None else self.value.updater.state_dict()
        return {"updater": self.updater.state_dict(), "value": value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updater.load_state_dict(state["updater"])
        if self.value is not None:
            self.value.updater.load_state_dict(state["value"])
