"""Trainer: owns the policy and its optimizer; one policy version per call of `step`, on one device.

A plain class with `async` methods, so that it may live in another process. The blocking work of all methods runs in
one thread of its own, in the order of the calls, and the event loop stays free to answer meanwhile.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from cluster.files import Digest
from learner.algo.advantage import has_signal
from learner.algo.loss import metrics_of
from learner.algo.targets import Targets, targets_of
from learner.batch.micro_batch import MicroBatch, micro_batches
from learner.batch.rows import Rows, read
from learner.config import ModelConfig
from learner.learner_config import AUTO_TOKEN_BUDGET, LearnerConfig
from learner.model import activation_checkpointing
from learner.model.export import update_of
from learner.model.policy import Policy
from learner.trainer import trainer_state
from learner.trainer.forward_backward import Passes
from learner.trainer.memory_limit import MemoryLimit, TokenBudget, longest_rows
from learner.trainer.optimizer import rate_factor
from learner.trainer.probe_answer import answer_of
from learner.trainer.rng_state import random_state, set_random_state
from learner.trainer.service import TrainerService
from learner.trainer.stochastic_rounding import updater_for, wants_masters
from learner.trainer.work_thread import WorkThread
from rollout.types import Adapter, Weights
from rollout.weight_sync import Answer

MAX_NONFINITE = 3  # skipped updates in a row

T = TypeVar("T")


class _Update(NamedTuple):
    """One optimizer step of a batch."""

    parts: list[dict[str, Tensor]]  # of its micro-batches (learner.loss.token_loss)
    norm: float  # of the gradient, before clipping
    done: bool  # false if loss or gradient was not finite


class Trainer(TrainerService):
    """GRPO on a LoRA adapter, or on the whole model.

    Args:
        temperature: the sampler's; logprobs are of the tempered distribution, except those of `probe`.
        max_completion_length: tokens; the constant of the dr_grpo loss.
        total_steps: of the run, for the learning-rate schedule.
        seed: of the adapter's initial weights.
        device: cpu, cuda or cuda:<n>.
        memory_bytes: most that the learner may hold (see learner.trainer.memory_limit.MemoryLimit); None: no limit.

    Raises:
        ValueError: the model or adapter cannot be trained here (see learner.model.policy.Policy).
    """

    def __init__(
        self,
        model: ModelConfig,
        learner: LearnerConfig,
        *,
        temperature: float,
        max_completion_length: int,
        total_steps: int,
        seed: int,
        device: str,
        memory_bytes: int | None = None,
    ) -> None:
        self._config, self._temperature, self._path = learner, temperature, model.path
        self._max_completion_length, self._total_steps = max_completion_length, total_steps
        self._device = torch.device(device)
        tokens = AUTO_TOKEN_BUDGET if learner.token_budget == "auto" else learner.token_budget
        self._memory, self._budget = MemoryLimit(memory_bytes, self._device), TokenBudget(tokens)
        self._policy = Policy(
            model,
            learner.lora if learner.mode == "lora" else None,
            checkpointing=activation_checkpointing.resolve(learner.checkpointing, self._device),
            seed=seed,
            device=self._device,
            offload=learner.offload_boundaries,
            keep_masters=wants_masters(learner),
            keep_reference=learner.loss.beta > 0,
        )
        weights = list(self._policy.masters.values())
        self._updater = updater_for(weights, learner, dtype=model.dtype, device=self._device)
        self._passes = Passes(self._policy, learner, temperature, self._device, self._updater.scale)
        self._version = 0
        self._nonfinite = 0  # skipped updates in a row
        self._thread = WorkThread()
        self._run = self._thread.run

    async def step(self, groups: list[pa.Table], oldest_version: int = 0) -> dict[str, float]:
        return await self._run(lambda: self._step(groups, oldest_version))

    async def rehearse(self, prompt_length: int) -> dict[str, float]:
        return await self._run(lambda: self._rehearse(prompt_length))

    async def policy(self) -> tuple[Adapter | Weights, float]:
        merged = self._config.push == "merged"
        return await self._run(partial(_timed, lambda: update_of(self._policy, self._version, merged=merged)))

    async def probe(self, token_ids: list[int]) -> Answer:
        merged = self._config.push == "merged"
        return await self._run(lambda: answer_of(self._policy, self._version, token_ids, merged=merged))

    async def release_cache(self) -> None:
        await self._run(torch.cuda.empty_cache)

    async def pulse(self) -> float:
        return self._passes.passed + (self._thread.computed() if self._device.type == "cpu" else 0.0)

    async def sees(self, file: Path) -> bool:
        return file.exists()

    async def save(self, folder: Path) -> dict[str, Digest]:
        return await self._run(lambda: self._save(folder))

    async def load(self, folder: Path) -> None:
        await self._run(lambda: self._load(folder))

    def _step(self, groups: list[pa.Table], oldest_version: int = 0) -> dict[str, float]:
        started, retries = time.perf_counter(), self._budget.retries
        self._memory.start_step()
        rows = read(groups, oldest_version)
        self._policy.check_ids(int(np.concatenate([[0], *rows.prompts, rows.completions]).max()))
        rate = self._config.learning_rate * rate_factor(self._version, self._total_steps, self._config.schedule)
        updates = self._learn(rows, targets_of(rows, self._config, self._max_completion_length), rate)
        metrics = metrics_of([part for update in updates for part in update.parts], max(len(updates), 1))
        norm = float(np.mean([update.norm for update in updates])) if updates else 0.0
        skipped = sum(not update.done for update in updates)
        self._version += 1
        self._memory.check()
        self._guard(skipped=0 < skipped == len(updates), loss=metrics["loss/total"], norm=norm)
        return metrics | {
            "loss/grad_norm": norm,
            "loss/learning_rate": rate,
            "loss/skipped_nonfinite": float(skipped),
            "reward/zero_variance_groups": float(sum(not has_signal(rewards) for rewards in rows.rewards)),
            "time/train": time.perf_counter() - started,
            **self._memory_metrics(retries),
        }

    def _learn(self, rows: Rows, targets: Targets, rate: float) -> list["_Update"]:
        """The updates of a batch, but for those without anything to learn. Each takes its own micro-batches again when
        memory runs out, never an update before it."""
        count, proximal = self._config.updates_per_batch, None
        if count > 1:
            later = self._plan(rows, targets, targets.update > 0)
            proximal = self._budget.run(later, partial(self._passes.score, tokens=len(rows.completions)))
        updates = []
        for number in range(count):
            learn = partial(self._passes.learn, version=self._version, proximal=proximal if number > 0 else None)
            parts = self._budget.run(self._plan(rows, targets, targets.update == number), learn)
            if parts:
                loss = float(torch.stack([part["loss"] for part in parts]).sum())
                norm, done = self._updater.step(rate, loss_is_finite=math.isfinite(loss))
                self._policy.sync()
                updates.append(_Update(parts, norm, done))
        return updates

    def _plan(self, rows: Rows, targets: Targets, own: npt.NDArray[np.bool_]) -> Callable[[int], list[MicroBatch]]:
        """Token budget -> micro-batches of those of the completions that are trained."""
        chosen, packed = own & targets.trained, self._policy.packed
        return lambda budget: micro_batches(
            rows, targets.advantages, targets.coefficients, chosen, budget, packed=packed
        )

    def _rehearse(self, prompt_length: int) -> dict[str, float]:
        length = self._max_completion_length
        budget, packed = self._budget, self._policy.packed
        # Enough completions to fill a micro-batch, whether they share their prompt or not.
        rows = longest_rows(prompt_length, length, count=budget.tokens // max(length - 1, 1) + 1)
        same = np.ones(len(rows.lengths))

        def plan(tokens: int) -> list[MicroBatch]:
            return micro_batches(rows, same, same, same > 0, tokens, packed=packed)[:1]

        self._memory.start_step()
        states = torch.empty(self._updater.missing_state_bytes(), dtype=torch.uint8, device=self._device)
        budget.run(plan, partial(self._passes.learn, version=self._version))
        del states
        self._policy.clear_gradients()
        self._memory.check()
        return self._memory_metrics(0)

    def _memory_metrics(self, retries_before: int) -> dict[str, float]:
        return {
            "memory/learner_peak": float(self._memory.peak()),
            "memory/oom_retries": float(self._budget.retries - retries_before),
            "memory/token_budget": float(self._budget.tokens),
        }

    def _guard(self, *, skipped: bool, loss: float, norm: float) -> None:
        # A float16 overflow halves the loss scale and is no fault of the run until the scale is down to 1.
        self._nonfinite = self._nonfinite + 1 if skipped and not self._updater.may_overflow else 0
        if self._nonfinite >= MAX_NONFINITE:
            raise RuntimeError(
                "loss/skipped_nonfinite: loss and gradient norm must be finite, they were not in "
                f"{self._nonfinite} steps in a row (last: step {self._version}, loss {loss}, norm {norm}); the weights "
                "are those before them. Lower learner.learning_rate, or look at the last steps' rollouts"
            )

    def _save(self, folder: Path) -> dict[str, Digest]:
        state = {
            "version": self._version,
            "nonfinite": self._nonfinite,
            "updater": self._updater.state_dict(),
            "random": random_state(self._device),
        }
        return trainer_state.write(folder, self._policy, self._path, state)

    def _load(self, folder: Path) -> None:
        state = trainer_state.read(folder, self._policy)
        self._updater.load_state_dict(state["updater"])
        self._version, self._nonfinite = state["version"], state["nonfinite"]
        set_random_state(state["random"], self._device)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started
