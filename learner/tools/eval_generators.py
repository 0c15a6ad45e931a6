"""Generators alone, each with the one policy that is evaluated: the processes of a run without its learner."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from cluster.actor import ActorDied, RevivableActor
from cluster.config import DeadlineConfig
from cluster.ray_cluster import Session, connect
from learner.config import RunConfig, roles
from learner.driver.evaluate import generate
from learner.driver.launch import CLOSE_S
from learner.driver.memory_budget import Budgets
from learner.driver.processes import started, worker_spec
from learner.model.adapter_config import CONFIG_FILE, PEFT_RANK, VLLM_FOLDER, read_adapter, read_content
from learner.model.weight_files import WEIGHTS_FILE, adapter_weights
from rollout.schema import Problem
from rollout.service import RolloutService
from rollout.supervised_worker import SupervisedWorker
from rollout.types import Adapter, Sampling, Weights
from rollout.vllm.environment import required_env
from rollout.weight_sync import DeliveryError
from rollout.worker import RolloutWorker, WorkerSpec


class Asked(NamedTuple):
    """All problems, sampled in one way. attempt: tells its groups from others of the same problems."""

    sampling: Callable[[int], Sampling]
    attempt: int


class EvaluatedWorker:
    """A generator's process and the policy that it has in all its lives."""

    def __init__(
        self, actor: RevivableActor[RolloutService], policy: Adapter | Weights, deadlines: DeadlineConfig
    ) -> None:
        self._worker, self._policy = SupervisedWorker(actor, deadlines), policy
        self._worker.rearm = self._deliver

    async def begin(self) -> None:
        """Brings it the policy."""
        await self._worker.attempt(self._deliver)  # a process that is lost in it gets the policy as it is revived

    async def request(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        """As Producer.request."""
        return await self._worker.attempt(partial(self._rollout, problem, sampling, attempt))

    async def _rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        worker = self._worker
        group = await worker.actor.call(RolloutService.rollout, worker.deadlines.group, problem, sampling, attempt)
        if group is None:  # another call was lost just before, and a fresh process got this one
            raise ActorDied(f"{worker.name}: its process was replaced before it had a policy")
        worker.finished_group()
        return group

    async def _deliver(self) -> None:
        worker = self._worker
        receipt = await worker.actor.call(RolloutService.take_policy, worker.deadlines.push, self._policy)
        if receipt.digest != self._policy.digest:
            raise DeliveryError(
                f"{worker.name}: the policy arrived with digest {receipt.digest[:12]}, sent was "
                f"{self._policy.digest[:12]}: the transport corrupts policies"
            )


def policy_of(adapter: str | None) -> Adapter | Weights:
    """The adapter of a folder in PEFT's format; without one the model's own weights. Raises AdapterError,
    WeightsError."""
    if adapter is None:
        return Weights.unchanged(0)
    read_adapter(adapter, "--adapter")
    served = Path(adapter) / VLLM_FOLDER
    folder = served if (served / CONFIG_FILE).is_file() else Path(adapter)
    adapter_weights(str(folder), "--adapter")
    return Adapter.build(0, (folder / WEIGHTS_FILE).read_bytes(), read_content(str(folder), "--adapter"))


async def groups(
    config: RunConfig,
    budgets: Budgets,
    policy: Adapter | Weights,
    problems: Sequence[Problem],
    asked: Sequence[Asked],
) -> list[list[pa.Table]]:
    """For each way of sampling a group of every problem, in their order. Processes are started for it, and ended."""
    generators = roles(config)[:-1]
    session = connect(config.cluster.address, sum(role.cpus for role in generators), len(policy.payload))
    try:
        return await session.ray_processes.beside(_groups(session, config, budgets, policy, problems, asked))
    finally:
        await session.close()


async def _groups(
    session: Session,
    config: RunConfig,
    budgets: Budgets,
    policy: Adapter | Weights,
    problems: Sequence[Problem],
    asked: Sequence[Asked],
) -> list[list[pa.Table]]:
    generators, deadlines = roles(config)[:-1], config.cluster.deadlines
    await session.reserve(generators, deadlines.start)
    env = required_env(cuda=config.cluster.gpus.generator > 0)
    specs = [_alone(worker_spec(config, rank, budgets), policy) for rank in range(len(generators))]
    actors = [session.spawn(role, RolloutWorker, [spec], env) for role, spec in zip(generators, specs, strict=True)]
    try:
        for actor in actors:
            await started(actor, deadlines.start)
        workers = [EvaluatedWorker(actor, policy, deadlines) for actor in actors]
        await asyncio.gather(*(worker.begin() for worker in workers))
        return [await generate(workers, problems, config, one.sampling, one.attempt) for one in asked]
    finally:
        await asyncio.gather(*(a.call(RolloutService.close, CLOSE_S) for a in actors), return_exceptions=True)


def _alone(spec: WorkerSpec, policy: Adapter | Weights) -> WorkerSpec:
    """Of a generator that has no learner beside it and gets this policy alone."""
    rank, targets = 0, ()
    if isinstance(policy, Adapter):
        rank = policy.config.get("r", PEFT_RANK)
        targets = tuple(sorted({name.rpartition(".")[2] for name in policy.config["target_modules"]}))
    engine = replace(
        spec.engine, max_lora_rank=rank, lora_targets=targets, adapter_window=2, in_flight="finish", sleeps=False,
        shares_base=False, room=0,
    )  # fmt: skip
    return replace(spec, engine=engine)
