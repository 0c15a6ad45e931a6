"""Trainer: owns the policy and its optimizer; one policy version per call of `step`, on one device.

A plain class with `async` methods, so that it may live in another process. The blocking work of all methods runs in
one thread of its own, in the order of the calls, and the event loop stays free to answer meanwhile.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from cluster.actor import Shared
from cluster.files import Digest
from learner.algo.advantage import has_signal
from learner.batch.rows import read
from learner.config import ModelConfig
from learner.config.learner import AUTO_TOKEN_BUDGET, LearnerConfig
from learner.model import activation_checkpointing
from learner.model.head import check_ids
from learner.model.mapped_base import MappedBase
from learner.model.policy import Policy
from learner.model.roles import reward_roles
from learner.trainer import trainer_state
from learner.trainer.arithmetic import arithmetic_on
from learner.trainer.base_thread import BaseThread
from learner.trainer.forward_backward import Passes
from learner.trainer.gradient_norm import DividedNorm
from learner.trainer.gradient_sums import GradientSums, gradient_sums
from learner.trainer.memory_limit import MemoryLimit, TokenBudget, device_of
from learner.trainer.nonfinite_guard import NonFiniteGuard
from learner.trainer.peers import Peers
from learner.trainer.probe_answer import answer_of
from learner.trainer.rng_state import random_state, set_random_state
from learner.trainer.sender import Sender
from learner.trainer.service import Arithmetic, Exported, TrainerService
from learner.trainer.stochastic_rounding import AnyUpdater, updater_for, wants_masters
from learner.trainer.updates import Updates
from learner.trainer.value_learner import value_learner, value_roles
from rollout.shared_base.manifest import Manifest
from rollout.types import SentPolicy, WeightsInFile
from rollout.weight_sync import Answer


class Trainer(TrainerService):
    """GRPO on a LoRA adapter, or on the whole model; PPO on a LoRA adapter, beside that of its value.

    Args:
        temperature: the sampler's; logprobs are of the tempered distribution, except those of `probe`.
        max_completion_length: tokens; the constant of the dr_grpo loss.
        total_steps: of the run, for the learning-rate schedule.
        seed: of the adapter's initial weights.
        device: cpu, cuda or cuda:<n>.
        memory_bytes: most that the learner may hold (see learner.trainer.memory_limit.MemoryLimit); None: no limit.
        attention: see learner.model.packing_check.enable.
        base: the generator's, to be mapped; None: the learner loads one of its own.
        reward_adapters: folders of reward models on the base (learner.model.roles), in the order of `score`.
        peers: the ranks that share each step's work with this one; None: there are no others.

    Raises:
        ValueError: model or adapter cannot be trained here (see learner.model.policy.Policy), or base not be mapped.
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
        attention: str | None = None,
        base: Manifest | None = None,
        reward_adapters: Sequence[str] = (),
        peers: Peers | None = None,
    ) -> None:
        self._path, where = model.source, device_of(device)
        tokens = AUTO_TOKEN_BUDGET if learner.token_budget == "auto" else learner.token_budget
        mapped = None if base is None else MappedBase(base, where)
        self._memory = MemoryLimit(memory_bytes, where, 0 if mapped is None else mapped.nbytes)
        self._budget = TokenBudget(tokens, peers)
        self._policy = _policy(
            model, learner, seed, where, attention=attention, mapped=mapped, sharded=self._budget.peers.sharded,
            roles=[*reward_roles(reward_adapters), *value_roles(learner)],
        )  # fmt: skip
        updater, sums = _update(self._policy, learner, self._budget.peers, dtype=model.dtype, device=where)
        self._updates = Updates(
            self._policy,
            updater,
            Passes(self._policy, learner, temperature, where, updater.scale, sums),
            self._budget,
            learner,
            value_learner(self._policy, learner, self._budget, dtype=model.dtype, total_steps=total_steps),
            max_completion_length=max_completion_length,
            total_steps=total_steps,
        )
        self._sender = Sender(self._policy, merged=learner.push == "merged")
        self._guard, self._version = NonFiniteGuard(), 0
        self._thread = BaseThread(mapped)

    async def step(self, groups: list[pa.Table]) -> dict[str, float]:
        return await self._thread.compute(lambda: self._step(groups))

    async def mismatch(self) -> pa.Array:
        return await self._thread.run(self._updates.mismatch)

    async def score(self, groups: list[pa.Table]) -> list[list[float]]:
        return await self._thread.compute(lambda: self._score(groups))

    async def rehearse(self, prompt_length: int) -> dict[str, float]:
        return await self._thread.compute(lambda: self._rehearse(prompt_length))

    async def outgoing(self, stays: bool = False) -> tuple[Shared[SentPolicy], Exported]:
        return await self._thread.run(lambda: self._sender.outgoing(self._version, stays=stays))

    async def empty_weights(self) -> WeightsInFile:
        return await self._thread.run(self._sender.empty)

    async def probe(self, token_ids: list[int]) -> Answer:
        answer = partial(answer_of, self._policy, merged=self._sender.merged)
        return await self._thread.compute(lambda: answer(self._version, token_ids))

    async def arithmetic(self) -> Arithmetic:
        return await self._thread.run(lambda: arithmetic_on(self._policy.head.device))

    async def detach_base(self) -> None:
        await self._thread.detach()

    async def attach_base(self, manifest: Manifest) -> None:
        await self._thread.attach(manifest)

    async def release_cache(self) -> None:
        await self._thread.run(torch.cuda.empty_cache)

    async def pulse(self) -> float:
        return self._updates.passed + self._thread.progress(on_cpu=self._policy.head.device.type == "cpu")

    async def sees(self, file: Path) -> bool:
        return file.exists()

    async def save(self, folder: Path) -> dict[str, Digest]:
        write = partial(trainer_state.write, folder, self._policy, self._path)
        return await self._thread.run(lambda: write(self._state()))

    async def load(self, folder: Path) -> None:
        await self._thread.run(lambda: self._set_state(_read(folder, self._policy, self._updates, self._budget.peers)))

    def _step(self, groups: list[pa.Table]) -> dict[str, float]:
        started, retries = time.perf_counter(), self._budget.retries
        self._memory.start_step()
        rows = read(groups)
        check_ids(self._policy.head, rows.highest_id)
        rate = self._updates.rate(self._version)
        learned = self._updates.learn(rows, self._version, rate)
        metrics = learned.metrics()
        self._version += 1
        self._thread.check(self._version)
        self._memory.check()
        self._guard.after(learned.failed, metrics, may_overflow=self._updates.may_overflow, step=self._version)
        if self._updates.value is None:  # to a value, groups that all scored alike say as much as others
            metrics["reward/zero_variance_groups"] = float(sum(not has_signal(rewards) for rewards in rows.rewards))
        return metrics | {
            "loss/learning_rate": rate,
            "time/train": time.perf_counter() - started,
            **_memory_metrics(self._memory, self._budget, retries),
        }

    def _score(self, groups: list[pa.Table]) -> list[list[float]]:
        rows = read(groups)
        check_ids(self._policy.head, rows.highest_id)
        return [self._updates.sequence_scores(rows, role) for role in self._policy.reward_models]

    def _rehearse(self, prompt_length: int) -> dict[str, float]:
        self._memory.start_step()
        self._updates.rehearse(prompt_length, self._version)
        self._memory.check()
        return _memory_metrics(self._memory, self._budget, 0)

    def _state(self) -> dict[str, Any]:
        """Everything but weights that the next steps depend on: tensors and plain values."""
        return {
            "version": self._version,
            "nonfinite": self._guard.in_a_row,
            "random": random_state(self._policy.head.device),
            **self._updates.state_dict(),
        }

    def _set_state(self, state: dict[str, Any]) -> None:
        self._updates.load_state_dict(state)
        self._version, self._guard.in_a_row = state["version"], state["nonfinite"]
        set_random_state(state["random"], self._policy.head.device)


def _update(
    policy: Policy, learner: LearnerConfig, peers: Peers, *, dtype: str, device: torch.device
) -> tuple[AnyUpdater, GradientSums]:
    """The updater of all weights that train, and the sums of those that are not in shards: of these FSDP2 sums."""
    masters, divided = policy.masters, policy.trained.divided
    whole = [weight for name, weight in masters.items() if name not in divided]
    rows = [weight for name, weight in masters.items() if name in divided]
    norm = DividedNorm(whole, rows, peers) if rows else None
    updater = updater_for([*whole, *rows], learner, dtype=dtype, device=device, norm=norm)
    return updater, gradient_sums(whole, learner, peers)


def _policy(
    model: ModelConfig, learner: LearnerConfig, seed: int, device: torch.device, *, sharded: bool, **given: Any
) -> Policy:
    return Policy(
        model,
        learner.lora if learner.mode == "lora" else None,
        checkpointing=activation_checkpointing.resolve(learner.checkpointing, device),
        seed=seed,
        device=device,
        offload=learner.offload_boundaries,
        keep_masters=wants_masters(learner) or sharded,
        keep_reference=learner.loss.beta > 0,
        sharded=sharded,
        **given,
    )


def _read(folder: Path, policy: Policy, updates: Updates, peers: Peers) -> dict[str, Any]:
    """The state of a checkpoint; the weights are set."""
    if not policy.trained.divided and not (folder / trainer_state.SHARDS).is_dir():
        return trainer_state.read(folder, policy)
    from learner.trainer.divided_state import DividedState  # here: slow to import, and few runs use it

    return DividedState(policy, updates.updater.optimizers, peers).read(folder)


def _memory_metrics(memory: MemoryLimit, budget: TokenBudget, retries_before: int) -> dict[str, float]:
    return {
        "memory/learner_peak": float(memory.peak()),
        "memory/oom_retries": float(budget.retries - retries_before),
        "memory/token_budget": float(budget.tokens),
    }
