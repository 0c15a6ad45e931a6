"""Generators alone, each with the one policy that is evaluated: the processes of a run without its learner."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from cluster.actor import RevivableActor
from cluster.config import DeadlineConfig
from cluster.placement import Role
from cluster.ray_cluster import Session, connect
from learner.config import RunConfig, generator_roles
from learner.driver.evaluate import generate
from learner.driver.input_checks import check_served
from learner.driver.launch import CLOSE_S
from learner.driver.memory import Budgets
from learner.driver.roles import started, worker_spec
from learner.model.adapter_config import PEFT_RANK, read_content, served
from rollout.data.weight_files import WEIGHTS_FILE
from rollout.schema import Problem, groups_of
from rollout.service import RolloutService
from rollout.supervised_worker import SupervisedWorker
from rollout.types import Adapter, Sampling, Weights
from rollout.vllm.environment import required_env
from rollout.weight_sync import check_digest
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
        self._worker.supply.rearm = self._deliver

    async def begin(self) -> None:
        """Brings it the policy."""
        await self._worker.attempt(self._deliver)  # a process that is lost in it gets the policy as it is revived

    async def requests(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int,
        lost: Callable[[], None],
    ) -> pa.Table | None:  # fmt: skip
        """As Producer.requests."""
        return await self._worker.attempt(partial(self._worker.rollouts, problems, samplings, attempt, rounds), lost)

    @property
    def away(self) -> bool:
        """As SupervisedWorker.away, as the next."""
        return self._worker.away

    async def present(self) -> None:
        await self._worker.present()

    async def _deliver(self) -> None:
        worker = self._worker
        receipt = await worker.actor.call(RolloutService.take_policy, worker.deadlines.push, self._policy)
        assert receipt is not None, "no learner overwrites it"
        check_digest(self._policy, worker.name, receipt.digest)


def policy_of(adapter: str | None, base: str) -> Adapter | Weights:
    """The adapter of a folder in PEFT's format, of that base; without one the model's own weights. Raises AdapterError,
    WeightsError."""
    if adapter is None:
        return Weights.unchanged(0)
    check_served(adapter, "--adapter", base)
    folder = served(Path(adapter))
    return Adapter.build(0, (folder / WEIGHTS_FILE).read_bytes(), read_content(str(folder), "--adapter"))


async def groups(
    config: RunConfig,
    budgets: Budgets,
    policy: Adapter | Weights,
    problems: Sequence[Problem],
    asked: Sequence[Asked],
    done: Callable[[int, int], None],
    commands: Mapping[str, str],
) -> list[list[pa.Table]]:
    """For each way of sampling a group of every problem, in their order. Processes are started for it, and ended.

    done: is told how many more completions there are, of how many in all. commands: of prestarted generators' workers.
    """
    cpus = sum(role.cpus for role in _generators(config))
    session = connect(config.cluster.address, cpus, len(policy.payload), commands=commands)

    async def generated() -> list[list[pa.Table]]:
        async with _workers(session, config, budgets, policy) as workers:
            return await _generated(workers, problems, config, asked, done)

    try:
        return await session.ray_processes.beside(generated())
    finally:
        await session.close()


async def _generated(
    workers: Sequence[EvaluatedWorker],
    problems: Sequence[Problem],
    config: RunConfig,
    asked: Sequence[Asked],
    done: Callable[[int, int], None],
) -> list[list[pa.Table]]:
    sizes = [one.sampling(0).n for one in asked]
    total = len(problems) * sum(sizes)
    done(0, total)
    found: list[list[pa.Table]] = []
    for one, size in zip(asked, sizes, strict=True):
        more = partial(lambda size, groups: done(groups * size, total), size)
        tables = await generate(workers, problems, config, one.sampling, one.attempt, more)
        found.append([group for table in tables for group in groups_of(table)])
    return found


def _generators(config: RunConfig) -> list[Role]:
    """All roles but those that learn."""
    return generator_roles(config)


@asynccontextmanager
async def _workers(
    session: Session, config: RunConfig, budgets: Budgets, policy: Adapter | Weights
) -> AsyncIterator[list[EvaluatedWorker]]:
    """One for each generator, with the policy."""
    generators, deadlines = _generators(config), config.cluster.deadlines
    await session.reserve(generators, deadlines.start)
    env = required_env(cuda=config.cluster.gpus.generator > 0)
    specs = [_alone(worker_spec(config, rank, budgets), policy) for rank in range(len(generators))]
    actors = [session.spawn(role, RolloutWorker, [spec], env) for role, spec in zip(generators, specs, strict=True)]
    try:
        for actor in actors:
            await started(actor, deadlines.start)
        workers = [EvaluatedWorker(actor, policy, deadlines) for actor in actors]
        await asyncio.gather(*(worker.begin() for worker in workers))
        yield workers
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
