"""Starts the processes of a run for learner.driver.launch: what each role is built from, and the order in which they
start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cluster.actor import Actor, ActorDied, DeadlineExceeded, RevivableActor, StartFailed
from cluster.config import Deadlines
from cluster.memory.teacher import AT_ONCE, TeacherBudget
from cluster.ray_actor import Remote
from cluster.ray_cluster import Session
from learner.config import RunConfig, generator_roles, learner_roles, reward_roles, roles, teacher_roles
from learner.driver.arrangement import hooks_of
from learner.driver.failure import WatchedLearner, lost_as_it_starts
from learner.driver.machine_checks import check_nodes
from learner.driver.memory import Budgets
from learner.driver.preflight import Prepared
from learner.driver.record import read_policies
from learner.ranks.ranks import Ranks, RankService, Regroup, meet
from learner.trainer.service import TrainerService
from rewards.config import adapters_of, functions_of, trained_on
from rewards.limits import DEVICE
from rewards.limits import NAME as OUTPUT
from rewards.pool import Judging, RewardServer, RewardService
from rollout.engine import EngineSettings
from rollout.env.rollouts import EnvSettings
from rollout.env.trajectory import Limits
from rollout.producer import until_started
from rollout.scorer import RewardProcesses
from rollout.service import RolloutService
from rollout.teacher.process import Teacher, TeacherServer, TeacherService, TeacherSpec
from rollout.types import Manifest
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorker, WorkerSpec, vllm_engine

if TYPE_CHECKING:
    from learner.trainer.trainer import Trainer, Trainers

log = logging.getLogger("learner")

JUDGED = "judged"  # folder of a run in which the answers of judges are kept
# Micro-batches differ in size: with segments of fixed size the allocator keeps blocks that the next one cannot use.
# Only the learner gets this setting: the allocator that vLLM's sleep brings along refuses it.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# The children of a reward process end by themselves (rewards.slot). Once the driver is gone, Ray would kill Python's
# resource tracker among them, and the semaphores that it had to remove would stay in /dev/shm.
CHILDREN_END_BY_THEMSELVES = {"RAY_kill_child_processes_on_worker_exit": "0"}


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run, all started.

    serving: processes that only serve the generators: those of `cluster.rewards`, and the teacher. learner: one
    process, or several ranks as one actor. weights_stay: whether whole weights stay in the learner's memory, where
    the generators read them (rollout.weights).
    """

    generators: list[RevivableActor[RolloutService]]
    serving: list[Remote[Any]]
    learner: Actor[TrainerService]
    weights_stay: bool


async def start_processes(prepared: Prepared, session: Session, note: Callable[[str], None]) -> Processes:
    """Starts a process for each role. With a learner on a CPU all start at the same time, except with memory.layout:
    shared. Otherwise the generators start first, since an engine measures the card's free memory as it starts."""
    config, start = prepared.config, prepared.config.cluster.deadlines.start
    hooks, deadlines = hooks_of(prepared.budgets.arrangement), config.cluster.deadlines
    await session.reserve(roles(config), start, note)
    for line in await check_nodes(config, session, start, prepared.budgets.policy_bytes):
        note(line)
    env = required_env(cuda=config.cluster.gpus.generator > 0)
    rewards, teachers = spawn_rewards(config, session), spawn_teacher(config, prepared.budgets, session)
    if config.cluster.gpus.teacher > 0:  # on a card that it may share it takes its memory before the others measure it
        await asyncio.gather(*(one.ready(start) for one in teachers))
    serves = Serves(rewards, next(iter(teachers), None))
    specs = [
        worker_spec(config, rank, prepared.budgets, serves, prepared.total_steps)
        for rank in range(config.rollout.workers)
    ]
    overlap = config.cluster.gpus.learner == 0 and hooks.together
    # The learner is started first, since its imports are shorter, and Ray starts one process per core at once.
    learner = spawn_learner(prepared, session) if overlap else []
    workers = [
        session.spawn(role, RolloutWorker, [spec], env)
        for role, spec in zip(generator_roles(config), specs, strict=True)
    ]
    if overlap:
        async with asyncio.TaskGroup() as starting:  # if one process fails, the others are not started again
            for process in workers:
                starting.create_task(started(process, start))
            for rank in learner:
                starting.create_task(learner_started(rank, start))
    else:
        for worker in workers:
            await started(worker, start)
            await hooks.started(worker, deadlines)
        base = await hooks.base(workers, deadlines)
        learner = spawn_learner(prepared, session, base)
        await asyncio.gather(*(learner_started(rank, start) for rank in learner))
    serving = [*rewards, *teachers]
    for one in serving:
        await one.ready(start)
    sharded = config.arrangement.in_shards
    met = await joined(learner, config.cluster.deadlines, sharded=sharded)
    trainer = WatchedLearner(met, config.cluster.deadlines.heartbeat)
    if fits := await rehearsed(prepared, trainer):
        log.info("the longest micro-batch fits: learner peak %.2f GiB", fits["memory/learner_peak"] / 2**30)
    stays = await weights_stay(config, session, trainer, workers, note)
    return Processes(list(workers), serving, trainer, stays)


async def rehearsed(prepared: Prepared, trainer: Actor[TrainerService]) -> dict[str, float]:
    """Has the learner compute its largest micro-batches once, where its memory is limited; else returns no metrics."""
    config = prepared.config
    if config.cluster.gpus.learner == 0 and prepared.budgets.learner_bytes is None:
        return {}
    longest, taught = config.rollout.max_prompt_length, config.data.teacher.longest
    return await trainer.call(TrainerService.rehearse, config.cluster.deadlines.step, longest, taught)


def spawn_rewards(config: RunConfig, session: Session) -> list[Remote[RewardServer]]:
    """The processes that do nothing but score (`cluster.rewards`); none where reward processes belong to generators."""
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


def spawn_teacher(config: RunConfig, budgets: Budgets, session: Session) -> list[Remote[TeacherServer]]:
    """The process of model.teacher; none without one. Ray replaces it as it does one of `cluster.rewards`."""
    if budgets.teacher is None:
        return []
    (role,), env = teacher_roles(config), required_env(cuda=config.cluster.gpus.teacher > 0)
    return [session.spawn(role, TeacherServer, [teacher_spec(config, budgets.teacher)], env, stateless=True)]


def teacher_spec(config: RunConfig, budget: TeacherBudget) -> TeacherSpec:
    """What the teacher's process is built from."""
    assert config.model.teacher is not None
    top = config.learner.loss.teacher_top
    return TeacherSpec(
        engine=EngineSettings(
            model=config.model.teacher,
            dtype=config.model.dtype,
            max_model_len=budget.longest,
            kv_cache_bytes=budget.kv_bytes,
            max_num_seqs=AT_ONCE,
            max_lora_rank=0,
            adapter_window=2,
            seed=0,  # it samples nothing that is used
            shards=config.cluster.teacher_shards,
            prompt_logprobs=top + budget.others if top else 0,
            step_tokens=budget.step,
            room=budget.room,
        ),
        top=top,
        vocabulary=budget.vocabulary,
        silence_s=config.cluster.deadlines.silence,
        make_engine=vllm_engine,
    )


def spawn_learner(prepared: Prepared, session: Session, base: Manifest | None = None) -> list[Remote[Trainer]]:
    """The learner's process, or a process for each of its ranks. base: how it maps the generator's base
    (memory.layout: shared)."""
    config, budgets = prepared.config, prepared.budgets
    settled = config.model_copy(update={"learner": budgets.learner})
    wanted = [settled, prepared.total_steps, budgets.learner_bytes]
    env = ALLOCATOR if config.cluster.gpus.learner > 0 else required_env(cuda=False)
    first, *others = learner_roles(config)
    if not others:
        return [session.spawn(first, make_trainer, [*wanted, base], env)]
    return [session.spawn(role, make_rank, [*wanted, rank], env) for rank, role in enumerate([first, *others])]


async def joined(
    processes: Sequence[Remote[Trainer]], deadlines: Deadlines, *, sharded: bool = False
) -> Actor[TrainerService]:
    """The learner's processes as one actor. Several ranks first connect to each other. sharded: whether the ranks
    divide the model among them."""
    first, *others = processes
    if not others:
        return first
    ranks = cast("Sequence[Remote[RankService]]", processes)
    with lost_as_it_starts():
        await meet(ranks, deadlines)
    return Ranks(ranks, Regroup(ranks, deadlines, replaces=not sharded), sharded=sharded)


async def started(generator: Remote[RolloutWorker], deadline_s: float) -> None:
    """Waits until a generator has started. A process that is lost as it starts is replaced, as it would be later."""
    await until_started(generator.name, partial(generator.ready, deadline_s), partial(generator.revive, deadline_s))


async def learner_started(rank: Remote[Trainer], deadline_s: float) -> None:
    """Waits until a process of the learner has started. If it is killed meanwhile, a fresh process is tried once; an
    exception in its constructor is raised, since it would come again."""
    try:
        await rank.ready(deadline_s)
    except StartFailed:
        raise
    except ActorDied as error:
        log.warning("%s; starting a fresh process", error)
        with lost_as_it_starts():
            await rank.revive(deadline_s)


@dataclass(frozen=True, slots=True)
class Serves:
    """The processes that serve generators. rewards: those that score; without any each generator has reward processes
    of its own. teacher: that of model.teacher, if there is one."""

    rewards: Sequence[Actor[RewardService]] = ()
    teacher: Actor[TeacherService] | None = None


def worker_spec(
    config: RunConfig, rank: int, budgets: Budgets, serves: Serves = Serves(), steps: int = 0
) -> WorkerSpec:
    """What generator number `rank` is built from. serves: the processes that serve it. steps: number of steps that the
    run is planned for."""
    rollout, targets, rewards = config.rollout, config.learner.lora.targets, serves.rewards
    top, deadline_s = config.learner.loss.teacher_top, config.group_deadline_s
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
            seed=(config.seed * 1000 + rank) % 2**32,  # vLLM seeds numpy with it, which takes 32 bits
            shards=config.cluster.shards,
            base=config.model.base,
            kv_cache_dtype=rollout.kv_cache_dtype,
            in_flight=rollout.in_flight,
            stop=rollout.stop,
            truncates=rollout.truncates,
            form=rollout.structured_outputs.form,
            records_experts=rollout.routing_replay,
            sleeps=budgets.arrangement.in_turns,
            shares_base=config.arrangement.one_base,
            room=_room(budgets),
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
        reward_processes=RewardProcesses(tuple(rewards), deadline_s) if rewards else None,
        teacher=None if serves.teacher is None else Teacher(serves.teacher, top, deadline_s),
    )


def env_settings(config: RunConfig) -> EnvSettings | None:
    """How trajectories are played; None without an environment, where each is a single completion."""
    if config.env.use is None:
        return None
    rollout, env = config.rollout, config.env
    limits = Limits(rollout.max_prompt_length, rollout.max_completion_length, env.max_turns, config.trajectory_s)
    kwargs, alone = config.data.chat_template_kwargs, not trained_on(config.rewards)
    return EnvSettings(env, limits, config.trajectories, config.seed, kwargs, alone, rollout.environment_memory)


def _room(budgets: Budgets) -> int:
    """Free bytes of the card that a fresh generator waits for before it takes the place of a lost one."""
    return 0 if budgets.plan is None else budgets.arrangement.room(budgets.plan)


def make_trainer(
    config: RunConfig, total_steps: int, memory_bytes: int | None, base: Manifest | None = None
) -> Trainer:
    """Builds the learner; called in its process. memory_bytes: the most that it may hold. base: how it maps the
    generator's base, with memory.layout: shared. With several cluster.learners this one process does the work of all
    ranks, to the same bits."""
    _settle_logs()
    from learner.trainer.trainer import Trainer

    if config.cluster.gpus.learner == 0:
        settle_products(config.run_dir)
    return _built(partial(Trainer, base=base), config, total_steps, memory_bytes)


def make_trainers(configs: Sequence[RunConfig], total_steps: Sequence[int], memory_bytes: int | None) -> Trainers:
    """Builds the learner of several runs; called in its process."""
    _settle_logs()
    from learner.trainer.trainer import Trainer, Trainers

    if configs[0].cluster.gpus.learner == 0:
        settle_products(next((one.run_dir for one in configs if read_policies(one.run_dir)), configs[0].run_dir))

    def made(run: int, first: Trainer | None) -> Trainer:
        return _built(partial(Trainer, beside=first, number=run), configs[run], total_steps[run], memory_bytes)

    return Trainers([made] * len(configs))


def make_rank(config: RunConfig, total_steps: int, memory_bytes: int | None, rank: int) -> Trainer:
    """Builds one of several ranks (`cluster.learners`); called in its process."""
    _settle_logs(rank)
    sharded = config.arrangement.in_shards
    from learner.ranks.group import Group
    from learner.ranks.rank import RankTrainer, ShardedRank

    if config.cluster.gpus.learner == 0 and rank == 0:  # the other ranks take the choice of rank 0
        settle_products(config.run_dir)
    group = Group(rank, config.cluster.learners, _device(config), sharded=sharded)
    return _built(partial(ShardedRank if sharded else RankTrainer, group=group), config, total_steps, memory_bytes)


def _settle_logs(rank: int = 0) -> None:
    # peft imports bitsandbytes, which on a CPU advises an optional 4-bit kernel that gleaner does not use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if rank == 0:
        log.setLevel(logging.INFO)  # so that the terminal shows what this process has chosen by itself


def _built(kind: Callable[..., Trainer], config: RunConfig, total_steps: int, memory_bytes: int | None) -> Trainer:
    return kind(
        config.model,
        config.settled_learner,
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_completion_length,
        replays_routing=config.rollout.routing_replay,
        total_steps=total_steps,
        seed=config.seed,
        device=_device(config),
        memory_bytes=memory_bytes,
        reward_adapters=[str(reward.adapter) for reward in adapters_of(config.rewards)],
    )


def _device(config: RunConfig) -> str:
    return "cuda" if config.cluster.gpus.learner > 0 else "cpu"


def settle_products(run_dir: Path) -> None:
    """Sets the library of this process's float32 matrix products: in a resumed run the library of its last step, so
    that it continues with the same bits, and in a new run the faster library."""
    from learner.trainer.float32_products import choose_library, use_library

    if recorded := read_policies(run_dir):
        use_library(recorded[-1].arithmetic.products)
    else:
        choose_library()


# Whether generators can read whole weights in the learner's memory (rollout.weights).


async def weights_stay(
    config: RunConfig,
    session: Session,
    learner: Actor[TrainerService],
    generators: Sequence[Actor[RolloutService]],
    note: Callable[[str], None],
) -> bool:
    """Whether whole weights stay in the learner's memory, and the generators read them there. False where adapters are
    sent, where processes are on several nodes, and where a trial fails: some sandboxes let no process map another's
    memory. Also False if a generator is lost in the trial; the run then replaces it later."""
    used = (*generator_roles(config), *learner_roles(config))
    if not config.weights_stay or len({session.node_of()[role.name] for role in used}) > 1:
        return False
    deadline_s = config.cluster.deadlines.push
    place = await learner.call(TrainerService.empty_weights, deadline_s)
    tries = (generator.call(RolloutService.reaches, deadline_s, place) for generator in generators)
    for answer in await asyncio.gather(*tries, return_exceptions=True):
        if isinstance(answer, ActorDied | DeadlineExceeded):
            return False
        if isinstance(answer, BaseException):
            raise answer
        if answer:
            note(f"whole weights go through Ray's object store, which takes longer: {answer}")
            return False
    return True
