"""Composition: the processes of a run, the pipes between them, and their end. The only reader of the whole config."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from cluster.actor import Actor
from cluster.buffer import BACKUP_AFTER, Buffer
from cluster.files import writing
from cluster.policy_slot import PolicySlot
from cluster.ray_actor import Remote
from cluster.ray_cluster import Session, connect
from cluster.telemetry import Metrics, Timeline
from learner.config import RunConfig, roles
from learner.driver import checkpoint
from learner.driver.config_io import to_yaml
from learner.driver.console import Progress
from learner.driver.idle_advice import advice
from learner.driver.loop import Loop
from learner.driver.memory_budget import Budgets, PlanFile
from learner.driver.preflight import Prepared
from learner.driver.publishing import publish
from learner.driver.restarts import Restarts
from learner.driver.run_checkpoints import RunCheckpoints
from learner.driver.step_metrics import Sinks
from learner.driver.watched_learner import WatchedLearner
from learner.trainer.service import TrainerService
from rollout.data.cursor import Cursor
from rollout.engine import EngineSettings
from rollout.producer import Pipes, Producer, group_seed
from rollout.schema import group_position
from rollout.service import RolloutService
from rollout.supervised_worker import until_started
from rollout.types import Sampling
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorker, WorkerSpec, vllm_engine

if TYPE_CHECKING:  # torch and peft load in the learner's process, not in this one
    from learner.trainer.trainer import Trainer

log = logging.getLogger("learner")

CLOSE_S = 20.0
BUFFER_BYTES = 512 * 2**20  # groups are kilobytes: this bound is for very long completions


async def live(prepared: Prepared) -> int:
    """Starts the processes, runs the loop, and ends them whatever happens."""
    config = prepared.config
    with Progress(prepared.total_steps) as progress:
        # Set up in here, where lines for the terminal go around the live table.
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        progress.note(f"run folder {config.run_dir}")
        for skipped in prepared.skipped_checkpoints:
            progress.note(f"checkpoint skipped: {skipped}")
        for changed in prepared.changed:
            progress.note(f"changed since the checkpoint, as resume_allow_changed allows: {changed}")
        _publish(prepared, progress)
        if prepared.finished_steps >= prepared.total_steps:
            progress.note(
                f"all {prepared.total_steps} steps are done already: raise steps or epochs, or give another name="
            )
            return 0
        for note in (prepared.budgets.note, *prepared.notes):
            progress.note(note)
        progress.note("starting Ray, generators and learner (about 20 s on two cores)")
        session = connect(config.cluster.address, min_cpus=sum(role.cpus for role in roles(config)))
        restarts, stop = Restarts(prepared, progress.note), asyncio.Event()
        try:
            while (loop := await _attempt(restarts, session, progress, stop)) is None:
                await session.release()
        except BaseException:
            progress.note(_where_it_goes_on(config))
            raise
        finally:
            await session.close()
    progress.summary(loop.evaluations, config.run_dir, advice(loop.step_metrics.idle, config))
    return 0


async def _attempt(restarts: Restarts, session: Session, progress: Progress, stop: asyncio.Event) -> Loop | None:
    """Starts all processes and runs the loop to its end; None if the learner was lost and there is to be another."""
    prepared, ray_processes = restarts.prepared, session.ray_processes
    workers: list[Actor[RolloutService]] = []
    loop: Loop | None = None
    try:
        workers, trainer = await ray_processes.beside(_processes(prepared, session, progress.note))
        loop = _wire(prepared, workers, trainer, progress)
        loop.stop = stop
        _obey_signals(stop, progress.note)
        with closing(loop.sinks.timeline), closing(loop.sinks.metrics):
            await loop.run(prepared.resume_from, ray_processes.watch())
        return loop
    except Exception as error:
        saved = loop.checkpoints.saved if loop is not None else None  # lost in the rehearsal, it has saved nothing
        if stop.is_set() or not restarts.after(error, saved):
            raise
        return None
    finally:
        # A generator that still can ends its reward functions and files itself; one that cannot is killed right after.
        await asyncio.gather(*(w.call(RolloutService.close, CLOSE_S) for w in workers), return_exceptions=True)


def _publish(prepared: Prepared, progress: Progress) -> None:
    """What a kill between a checkpoint and its publication left undone."""
    if prepared.resume_from is None:
        return
    whole = prepared.config.learner.mode == "full"
    repaired = publish(prepared.resume_from, prepared.config.run_dir, whole_model=whole)
    if repaired is not None:
        progress.note(f"{repaired} was not that of {prepared.resume_from.name}: it is now")


def _where_it_goes_on(config: RunConfig) -> str:
    newest, _ = checkpoint.newest(config.run_dir / "checkpoints")
    if newest is None:
        return "the run ends before its first checkpoint"
    return f"the run ends; the same command goes on from its checkpoint of step {checkpoint.step_of(newest)}"


async def _processes(
    prepared: Prepared, session: Session, note: Callable[[str], None]
) -> tuple[list[Actor[RolloutService]], Actor[TrainerService]]:
    """One process per role. Generators first where a card is shared: an engine measures free memory as it starts."""
    config, start = prepared.config, prepared.config.cluster.deadlines.start
    *generators, learner = roles(config)
    await session.reserve([*generators, learner], start, note)
    env = required_env(cuda=config.cluster.gpus.generator > 0)
    workers = [
        session.spawn(role, RolloutWorker, [worker_spec(config, rank, prepared.budgets)], env)
        for rank, role in enumerate(generators)
    ]
    settled = config.model_copy(update={"learner": prepared.budgets.learner})
    wanted = [settled, prepared.total_steps, prepared.budgets.learner_bytes]
    spawn_trainer = partial(session.spawn, learner, make_trainer, wanted, {})
    if config.cluster.gpus.learner == 0:  # nothing is shared: the two start-ups overlap
        started = spawn_trainer()
        async with asyncio.TaskGroup() as starting:  # if one fails, nobody goes on to start the others again
            for worker in workers:
                starting.create_task(_started(worker, start))
            starting.create_task(started.ready(start))
    else:
        for worker in workers:
            await _started(worker, start)
            if prepared.budgets.alternating:
                await worker.call(RolloutService.sleep, start)
        started = spawn_trainer()
        await started.ready(start)
    trainer = WatchedLearner(started, config.cluster.deadlines.heartbeat)
    if config.cluster.gpus.learner > 0 or prepared.budgets.learner_bytes is not None:
        longest = config.rollout.max_prompt_length
        fits = await trainer.call(TrainerService.rehearse, config.cluster.deadlines.step, longest)
        log.info("the longest micro-batch fits: learner peak %.2f GiB", fits["memory/learner_peak"] / 2**30)
    return list(workers), trainer


async def _started(generator: Remote[RolloutWorker], deadline_s: float) -> None:
    """A generator that is lost as it starts is tried again, as one that is lost later."""
    await until_started(generator.name, partial(generator.ready, deadline_s), partial(generator.revive, deadline_s))


def worker_spec(config: RunConfig, rank: int, budgets: Budgets) -> WorkerSpec:
    """What generator number `rank` is built from."""
    rollout = config.rollout
    return WorkerSpec(
        rank=rank,
        run_id=config.run_dir.name,
        engine=EngineSettings(
            model=config.model.path,
            dtype=config.model.dtype,
            max_model_len=rollout.max_prompt_length + rollout.max_completion_length,
            kv_cache_bytes=budgets.kv_cache,
            max_num_seqs=rollout.max_num_seqs,
            max_lora_rank=config.learner.lora.rank if config.learner.pushes_adapters else 0,
            adapter_window=1 if rollout.in_flight == "continue" else config.max_staleness + 2,
            seed=config.seed * 1000 + rank,
            base=config.model.base,
            kv_cache_dtype=rollout.kv_cache_dtype,
            in_flight=rollout.in_flight,
            stop=rollout.stop,
            sleeps=budgets.alternating,
        ),
        rewards=tuple(config.rewards),
        reward_workers=rollout.reward_workers,
        reward_memory=rollout.reward_memory,
        make_engine=vllm_engine,
    )


def make_trainer(config: RunConfig, total_steps: int, memory_bytes: int | None) -> "Trainer":
    """The learner, built in its own process; `memory_bytes` is the most that it may hold."""
    # peft imports bitsandbytes, which on a CPU advises an optional 4-bit kernel that nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from learner.trainer.trainer import Trainer

    return Trainer(
        config.model,
        config.learner,
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_completion_length,
        total_steps=total_steps,
        seed=config.seed,
        device="cuda" if config.cluster.gpus.learner > 0 else "cpu",
        memory_bytes=memory_bytes,
    )


def _wire(
    prepared: Prepared, workers: Sequence[Actor[RolloutService]], trainer: Actor[TrainerService], progress: Progress
) -> Loop:
    """The two pipes, a producer beside each generator, and the loop; from here on the run folder exists."""
    config = prepared.config
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / "config.yaml"):
        (folder / "config.yaml").write_text(to_yaml(config))
    timeline = Timeline(folder / "timeline.json", prepared.finished_steps)
    metrics = Metrics(folder, config.trackers, prepared.finished_steps)
    sinks = Sinks(folder, metrics, timeline, progress, PlanFile(folder, prepared.budgets))
    cursor = Cursor()
    buffer = Buffer(
        groups_per_step=config.learner.groups_per_step,
        max_staleness=config.max_staleness,
        max_bytes=BUFFER_BYTES,
        on_drop=lambda group: cursor.again(*group_position(group)),
        oversample=config.rollout.oversample,
        backup_after=inf
        if prepared.budgets.alternating
        else BACKUP_AFTER,  # an engine with a call that is being stopped cannot sleep
    )
    pipes = Pipes(prepared.problems, cursor, buffer, PolicySlot(), timeline)
    producers = [Producer(w, pipes, sampling_of(config), config.cluster.deadlines) for w in workers]
    heldout, alternating = prepared.heldout, prepared.budgets.alternating
    checkpoints = RunCheckpoints(config, prepared.fingerprints, trainer, pipes, sinks)
    return Loop(config, prepared.total_steps, trainer, producers, pipes, sinks, heldout, checkpoints, alternating)


def sampling_of(config: RunConfig) -> Callable[[int, int], Sampling]:
    """(position, attempt) -> how that group is sampled; a pure function, so rollouts are reproducible."""
    rollout = config.rollout

    def sampling(position: int, attempt: int) -> Sampling:
        return Sampling(
            n=rollout.num_generations,
            max_tokens=rollout.max_completion_length,
            temperature=rollout.temperature,
            seed=group_seed(config.seed, position, attempt),
        )

    return sampling


def _obey_signals(stop: asyncio.Event, note: Callable[[str], None]) -> None:
    """First Ctrl-C or SIGTERM: finish the step, checkpoint, leave. Second: leave now. (Ray has set its own before.)

    Further ones are not heard: the clean-up must not be cut short.
    """
    running, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if not stop.is_set():
            stop.set()
            note("stopping after this step, with a checkpoint; once more to stop at once")
        elif not task.cancelling():
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, on_signal)
