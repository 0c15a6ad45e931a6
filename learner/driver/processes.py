"""The processes of a run: what each role is built from, and the order in which they start."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cluster.actor import Actor, ActorDied, RevivableActor, StartFailed
from cluster.config import DeadlineConfig
from cluster.ray_actor import Remote
from cluster.ray_cluster import Session
from learner.config import RunConfig, generator_roles, learner_roles, reward_roles, roles
from learner.driver.memory_budget import Budgets
from learner.driver.node_checks import check_nodes
from learner.driver.preflight import Prepared
from learner.driver.reach import weights_stay
from learner.driver.step_record import read_policies
from learner.driver.watched_learner import WatchedLearner, lost_as_it_starts
from learner.model.bitsandbytes_import import has_4_bit_layers, left_out, quiet
from learner.ranks.ranks import Ranks
from learner.ranks.regroup import Regroup, meet
from learner.ranks.service import RankService
from learner.trainer.service import TrainerService
from rewards.config import adapters_of, functions_of
from rewards.environment import DEVICE
from rewards.output import NAME as OUTPUT
from rewards.pool import Judging
from rewards.service import RewardServer, RewardService
from rollout.engine import EngineSettings
from rollout.env.play import Limits
from rollout.env.rollouts import EnvSettings
from rollout.scorer import RewardProcesses
from rollout.service import RolloutService
from rollout.shared_base.manifest import Manifest
from rollout.supervised_worker import until_started
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorker, WorkerSpec, vllm_engine

if TYPE_CHECKING:  # torch and peft load in the learner's process, not in this one
    from learner.trainer.trainer import Trainer

log = logging.getLogger("learner")

JUDGED = "judged"  # folder of a run in which the answers of judges are kept
# Micro-batches differ in size: with segments of fixed size the allocator keeps blocks that the next one cannot use. Of
# the learner alone: vLLM's sleep has an allocator of its own, which refuses this.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Those of a reward process do (rewards.worker). Ray would kill Python's resource tracker among them once the driver is
# gone, and with it the names of their semaphores would stay in /dev/shm.
CHILDREN_END_BY_THEMSELVES = {"RAY_kill_child_processes_on_worker_exit": "0"}


@dataclass(frozen=True, slots=True)
class Processes:
    """Of a run. rewards: those that do nothing but score. weights_stay: whether whole weights stay in the learner's
    memory on their way to the generators."""

    generators: list[RevivableActor[RolloutService]]
    rewards: list[Remote[RewardServer]]
    learner: Actor[TrainerService]
    weights_stay: bool


async def start_processes(prepared: Prepared, session: Session, note: Callable[[str], None]) -> Processes:
    """One process per role. Without a card they start at once; with one, generators first: an engine measures free
    memory as it starts."""
    config, start = prepared.config, prepared.config.cluster.deadlines.start
    await session.reserve(roles(config), start, note)
    for line in await check_nodes(config, session, start, prepared.budgets.policy_bytes):
        note(line)
    env = required_env(cuda=config.cluster.gpus.generator > 0)
    rewards = spawn_rewards(config, session)
    specs = [
        worker_spec(config, rank, prepared.budgets, rewards, prepared.total_steps)
        for rank in range(config.rollout.workers)
    ]
    shares = config.memory.base == "shared"
    overlap = config.cluster.gpus.learner == 0 and not shares
    # The learner's imports are the shorter ones, and Ray starts as many processes at once as there are cores.
    learner = spawn_learner(prepared, session) if overlap else []
    workers = [
        session.spawn(role, RolloutWorker, [spec], env)
        for role, spec in zip(generator_roles(config), specs, strict=True)
    ]
    if overlap:
        async with asyncio.TaskGroup() as starting:  # if one fails, nobody goes on to start the others again
            for process in workers:
                starting.create_task(started(process, start))
            for rank in learner:
                starting.create_task(learner_started(rank, start))
    else:
        for worker in workers:
            await started(worker, start)
            if prepared.budgets.alternating:
                await worker.call(RolloutService.sleep, start)
        base = await workers[0].call(RolloutService.share_base, start) if shares else None
        learner = spawn_learner(prepared, session, base)
        await asyncio.gather(*(learner_started(rank, start) for rank in learner))
    for one in rewards:
        await one.ready(start)
    sharded = config.memory.base == "sharded"
    met = await joined(learner, config.cluster.deadlines, sharded=sharded)
    trainer = WatchedLearner(met, config.cluster.deadlines.heartbeat)
    if config.cluster.gpus.learner > 0 or prepared.budgets.learner_bytes is not None:
        longest = config.rollout.max_prompt_length
        fits = await trainer.call(TrainerService.rehearse, config.cluster.deadlines.step, longest)
        log.info("the longest micro-batch fits: learner peak %.2f GiB", fits["memory/learner_peak"] / 2**30)
    stays = await weights_stay(config, session, trainer, workers, note)
    return Processes(list(workers), rewards, trainer, stays)


def spawn_rewards(config: RunConfig, session: Session) -> list[Remote[RewardServer]]:
    """The processes that do nothing but score; none where that is done beside the generators."""
    rollout, asked = config.rollout, config.cluster.rewards
    env = CHILDREN_END_BY_THEMSELVES | ({} if asked.gpus == 0 else {DEVICE: "cuda"})
    judged = Judging(config.run_dir / JUDGED, 1 / max(asked.processes, 1))
    wanted = [
        functions_of(config.rewards),
        rollout.reward_workers,
        rollout.reward_memory,
        judged,
        config.run_dir / OUTPUT,
    ]
    return [session.spawn(role, RewardServer, wanted, env, stateless=True) for role in reward_roles(config)]


def spawn_learner(prepared: Prepared, session: Session, base: Manifest | None = None) -> "list[Remote[Trainer]]":
    """The learner's process, or those of its ranks."""
    config, budgets = prepared.config, prepared.budgets
    settled = config.model_copy(update={"learner": budgets.learner})
    wanted = [settled, prepared.total_steps, budgets.learner_bytes]
    # Without a card that of a generator: so what both import can be imported once (learner.driver.prestart).
    env = ALLOCATOR if config.cluster.gpus.learner > 0 else required_env(cuda=False)
    first, *others = learner_roles(config)
    if not others:
        return [session.spawn(first, make_trainer, [*wanted, base], env)]
    return [session.spawn(role, make_rank, [*wanted, rank], env) for rank, role in enumerate([first, *others])]


async def joined(
    processes: "Sequence[Remote[Trainer]]", deadlines: DeadlineConfig, *, sharded: bool = False
) -> Actor[TrainerService]:
    """Those processes as one learner, once they know each other."""
    first, *others = processes
    if not others:
        return first
    ranks = cast("Sequence[Remote[RankService]]", processes)
    with lost_as_it_starts():
        await meet(ranks, deadlines)
    return Ranks(ranks, Regroup(ranks, deadlines, replaces=not sharded), sharded=sharded)


async def started(generator: Remote[RolloutWorker], deadline_s: float) -> None:
    """A generator that is lost as it starts is tried again, as one that is lost later."""
    await until_started(generator.name, partial(generator.ready, deadline_s), partial(generator.revive, deadline_s))


async def learner_started(rank: "Remote[Trainer]", deadline_s: float) -> None:
    """A process of the learner that is killed as it starts is started once more; an error in it would come again."""
    try:
        await rank.ready(deadline_s)
    except StartFailed:
        raise
    except ActorDied as error:
        log.warning("%s; starting a fresh process", error)
        with lost_as_it_starts():
            await rank.revive(deadline_s)


def worker_spec(
    config: RunConfig, rank: int, budgets: Budgets, rewards: Sequence[Actor[RewardService]] = (), steps: int = 0
) -> WorkerSpec:
    """What generator number `rank` is built from. rewards: the processes that score for it; else it does so itself.
    steps: of the run."""
    rollout, targets = config.rollout, config.learner.lora.targets
    return WorkerSpec(
        rank=rank,
        run_id=config.run_dir.name,
        engine=EngineSettings(
            model=config.model.source,
            dtype=config.model.dtype,
            max_model_len=rollout.max_prompt_length + rollout.max_completion_length,
            kv_cache_bytes=budgets.kv_cache // config.cluster.shards,
            max_num_seqs=rollout.sequences,
            max_lora_rank=config.learner.lora.rank if config.learner.pushes_adapters else 0,
            lora_targets=() if targets == "all-linear" else tuple(target.rpartition(".")[2] for target in targets),
            adapter_window=1 if rollout.in_flight == "continue" else config.max_staleness + 2,
            seed=(config.seed * 1000 + rank) % 2**32,  # numpy's, which vLLM sets, takes no larger one
            shards=config.cluster.shards,
            base=config.model.base,
            kv_cache_dtype=rollout.kv_cache_dtype,
            in_flight=rollout.in_flight,
            stop=rollout.stop,
            truncates=rollout.truncates,
            form=rollout.structured_outputs.form,
            sleeps=budgets.alternating,
            shares_base=config.memory.base == "shared",
            room=_room(config, budgets),
        ),
        rewards=functions_of(config.rewards),
        reward_workers=rollout.reward_workers,
        reward_memory=rollout.reward_memory,
        make_engine=vllm_engine,
        env=env_settings(config),
        chat_template=config.data.chat_template,
        steps=steps,
        judged=Judging(config.run_dir / JUDGED, 1 / rollout.workers),
        printed=config.run_dir / OUTPUT,
        reward_processes=RewardProcesses(tuple(rewards), config.group_deadline_s) if rewards else None,
    )


def env_settings(config: RunConfig) -> EnvSettings | None:
    """How trajectories are played; None where they are single completions."""
    if config.env.use is None:
        return None
    rollout, env = config.rollout, config.env
    limits = Limits(rollout.max_prompt_length, rollout.max_completion_length, env.max_turns, env.timeout_s)
    kwargs, alone = config.data.chat_template_kwargs, not config.rewards
    return EnvSettings(env, limits, config.trajectories, config.seed, kwargs, alone)


def _room(config: RunConfig, budgets: Budgets) -> int:
    """Bytes of the card that a generator whose base is shared waits for: the learner may still be letting go of those
    of the one before."""
    if config.memory.base != "shared" or budgets.plan is None:
        return 0
    return budgets.plan.generator["weights"] + budgets.kv_cache


def make_trainer(
    config: RunConfig, total_steps: int, memory_bytes: int | None, base: Manifest | None = None
) -> "Trainer":
    """The learner, built in its own process; `memory_bytes` is the most that it may hold, `base` the generator's. With
    several cluster.learners it does the work of all, to the same bits."""
    _settle_logs()
    with _imports(config):
        from learner.trainer.trainer import Trainer
    if config.cluster.gpus.learner == 0:
        settle_products(config.run_dir)
    return _built(partial(Trainer, base=base), config, total_steps, memory_bytes)


def make_rank(config: RunConfig, total_steps: int, memory_bytes: int | None, rank: int) -> "Trainer":
    """One of cluster.learners, likewise."""
    _settle_logs(rank)
    sharded = config.memory.base == "sharded"
    with _imports(config):
        from learner.ranks.group import Group
        from learner.ranks.rank_trainer import RankTrainer
        from learner.ranks.sharded_rank import ShardedRank
    if config.cluster.gpus.learner == 0 and rank == 0:  # the others take its choice
        settle_products(config.run_dir)
    group = Group(rank, config.cluster.learners, _device(config), sharded=sharded)
    return _built(partial(ShardedRank if sharded else RankTrainer, group=group), config, total_steps, memory_bytes)


def _settle_logs(rank: int = 0) -> None:
    quiet()
    if rank == 0:
        log.setLevel(logging.INFO)  # what this process chose for itself belongs on the terminal, too


def _built(kind: "Callable[..., Trainer]", config: RunConfig, total_steps: int, memory_bytes: int | None) -> "Trainer":
    return kind(
        config.model,
        config.settled_learner,
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_completion_length,
        total_steps=total_steps,
        seed=config.seed,
        device=_device(config),
        memory_bytes=memory_bytes,
        reward_adapters=[str(reward.adapter) for reward in adapters_of(config.rewards)],
    )


def _device(config: RunConfig) -> str:
    return "cuda" if config.cluster.gpus.learner > 0 else "cpu"


def _imports(config: RunConfig) -> AbstractContextManager[None]:
    """For the import of the trainer."""
    return nullcontext() if has_4_bit_layers(config.model) else left_out()


def settle_products(run_dir: Path) -> None:
    """Of this process's float32 products: the library that the run had before it was resumed, so that it goes on with
    the same bits; for a new run the faster one."""
    from learner.trainer.float32_products import choose_library, use_library

    if recorded := read_policies(run_dir):
        use_library(recorded[-1].arithmetic.products)
    else:
        choose_library()
