"""Runs a prepared run for `gleaner train`: connects to Ray, starts the processes, runs the loop, and ends the processes
whatever happens.

`run` is the entry point. `wire` connects buffer, policy slot, producers and loop. Restarts begins again after a lost
learner. kept_answering replaces reward processes, and a teacher, that hang.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from cluster.actor import Actor, ActorDied, DeadlineExceeded, RevivableActor, ValueLost
from cluster.buffer import Buffer, PolicySlot
from cluster.config import Deadlines
from cluster.files import writing
from cluster.ray_actor import Remote
from cluster.ray_cluster import Session, connect
from cluster.telemetry import Metrics, Timeline
from cluster.trackers import PROMETHEUS
from learner.config import RunConfig, roles
from learner.config.load import to_yaml
from learner.driver import checkpoint, process
from learner.driver.arrangement import Hooks, hooks_of
from learner.driver.checkpoint import publish
from learner.driver.console import Phases, Progress
from learner.driver.evaluate import HeldOut, RewardModels, accuracy_of, sampled
from learner.driver.failure import LearnerLost, RunEnded, first_of, sentence_of
from learner.driver.identity import Fingerprints
from learner.driver.loop import Batches, Loop, Schedule, Training, WeightSync
from learner.driver.memory import PlanFile, stored_bytes
from learner.driver.metrics import MismatchGuard, RewardWatch, SignalWatch
from learner.driver.preflight import Prepared
from learner.driver.record import RunCheckpoints, Sinks, StepMetrics, StepRecord, advice, closed
from learner.driver.roles import Processes, start_processes
from learner.trainer.service import TrainerService
from rollout.data.curriculum import Curriculum, Estimates, Listed, source_of
from rollout.producer import Cursor, Pipes, ProblemStream, Producer
from rollout.schema import Problem, group_position
from rollout.service import RolloutService, Serving
from rollout.types import Sampling, group_seed

CLOSE_S = 20.0
NOT_BEGUN = "before the run began"  # text of the CancelledError that ends a run whose loop has not begun


async def run(prepared: Prepared) -> int:
    """Runs to the last step, or until asked to stop; returns the exit code. Raises any error that ends the run."""
    config, phases = prepared.config, Phases()
    phases.until_now("preflight")
    every = config.data.eval.every
    with Progress(prepared.total_steps, config.kv_dtype, evaluates=every) as progress:
        # Logging is set up inside this block, where Progress prints lines above its live table.
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        progress.note(f"run folder {config.run_dir}")
        take_up(prepared, progress)
        if prepared.finished_steps >= prepared.total_steps:
            progress.note(
                f"all {prepared.total_steps} steps are done already: raise steps or epochs, or give another name="
                f"{_unscored(prepared)}"
            )
            return 0
        for note in (prepared.budgets.note, *prepared.notes):
            progress.note(note)
        progress.note("starting Ray, generators and learner (about 15 s on two cores)")
        cpus = sum(role.cpus for role in roles(config))
        metered = PROMETHEUS in config.trackers
        stored = stored_bytes(config, prepared.budgets.policy_bytes)
        session = connect(config.cluster.address, cpus, stored, metered)
        process.end_by_cancelling(NOT_BEGUN)
        phases.until_now("Ray")
        restarts, stop = Restarts(prepared, progress.note), asyncio.Event()
        try:
            while (loop := await _attempt(restarts, session, progress, phases, stop)) is None:
                await session.release()
        except BaseException:
            progress.note(_where_it_goes_on(config))
            raise
        finally:
            process.end_unheard()
            await session.close()
    phases.until_now("end")
    phases.record(config.run_dir, resumed=prepared.resume_from is not None)
    idle = advice(loop.metrics.idle, config)
    advised = loop.metrics.signal.advice() or ([] if idle is None else [idle])
    advised = [*loop.metrics.watch.advice(), *advised]
    progress.summary(loop.held_out.evaluations, config.run_dir, phases, advised)
    if printed := loop.metrics.printed.total():
        progress.note(printed)
    if stop.is_set() and loop.step < prepared.total_steps:
        progress.note(f"stopped  at step {loop.step} of {prepared.total_steps}; the same command goes on from there")
    return 0


async def _attempt(
    restarts: Restarts, session: Session, progress: Progress, phases: Phases, stop: asyncio.Event
) -> Loop | None:
    """Starts all processes and runs the loop. None if the learner was lost and `restarts` allows another attempt."""
    prepared, ray_processes = restarts.prepared, session.ray_processes
    processes: Processes | None = None
    loop: Loop | None = None
    try:
        processes = await ray_processes.beside(start_processes(prepared, session, progress.note))
        phases.until_now("processes")
        sinks = sinks_of(prepared, progress, phases)
        with closed(sinks):
            inputs = inputs_of(prepared, processes.weights_stay)
            loop, _ = wire(inputs, processes.generators, processes.learner, sinks)
            loop.stop = stop
            process.end_by_stopping(stop, lambda said: progress.note(f"{said}; {_if_it_is_killed(prepared.config)}"))
            patience = Patience.of(prepared.config.cluster.deadlines)
            try:
                kept = [kept_answering(one, patience) for one in processes.serving]
                await loop.run(prepared.resume_from, ray_processes.watch(), *kept)
                process.end_unheard()
            finally:
                phases.split(sinks.timeline, "other")
        return loop
    except Exception as error:
        if stop.is_set() or not restarts.after(error, begun=loop is not None):
            raise
        return None
    finally:
        # A generator that still answers ends its reward processes by itself; one that does not is killed right after.
        if processes is not None:
            await close_all(processes.generators, processes.serving)


async def close_all(generators: Sequence[Actor[RolloutService]], serving: Sequence[Actor[Serving]] = ()) -> None:
    """Closes the generators before the processes that serve them."""
    await asyncio.gather(*(one.call(RolloutService.close, CLOSE_S) for one in generators), return_exceptions=True)
    await asyncio.gather(*(one.call(Serving.close, CLOSE_S) for one in serving), return_exceptions=True)


def inputs_of(prepared: Prepared, weights_stay: bool) -> Inputs:
    """What `wire` needs of a prepared run."""
    return Inputs(
        prepared.config,
        prepared.total_steps,
        prepared.problems,
        prepared.heldout,
        prepared.fingerprints,
        hooks_of(prepared.budgets.arrangement),
        weights_stay,
        curriculum_of(prepared.config, prepared.problems, prepared.estimates),
    )


def sinks_of(prepared: Prepared, progress: Progress, phases: Phases) -> Sinks:
    """Opens the files of the run folder. Makes the folder, and sets aside checkpoints of steps that are taken again."""
    folder, config = prepared.config.run_dir, prepared.config
    folder.mkdir(parents=True, exist_ok=True)
    process.streams_kept_in(folder / process.CONSOLE)
    checkpoint.set_aside_after(folder / "checkpoints", prepared.finished_steps)
    with writing(folder / "config.yaml"):
        (folder / "config.yaml").write_text(to_yaml(config))
    timeline = Timeline(folder / "timeline.json", prepared.finished_steps)
    metrics = Metrics(folder, config.trackers, prepared.finished_steps)
    return Sinks(folder, metrics, timeline, progress, phases, PlanFile(folder, prepared.budgets))


def take_up(prepared: Prepared, progress: Progress) -> None:
    """Says what checkpoints the run leaves out and which changes it allows, and mends what a kill has left."""
    for skipped in prepared.skipped_checkpoints:
        progress.note(f"checkpoint skipped: {skipped}")
    for changed in prepared.changed:
        progress.note(f"changed since the checkpoint, as resume_allow_changed allows: {changed}")
    checkpoint.forget_leftovers(prepared.config.run_dir / "checkpoints")
    _publish(prepared, progress)


def _publish(prepared: Prepared, progress: Progress) -> None:
    """Publishes the checkpoint that the run resumes from, if a kill came between its commit and its publication."""
    if prepared.resume_from is None:
        return
    whole = prepared.config.learner.mode == "full"
    repaired = publish(prepared.resume_from, prepared.config.run_dir, whole_model=whole)
    if repaired is not None:
        progress.note(f"{repaired} was not that of {prepared.resume_from.name}: it is now")


def _unscored(prepared: Prepared) -> str:
    """Text for the user about a finished run whose last policy was not evaluated; empty if it was."""
    config, folder = prepared.config, prepared.resume_from
    if not prepared.heldout or config.data.eval.every == 0 or folder is None:
        return ""
    scored = [one.step for one in checkpoint.read_state(folder).evaluations]
    if prepared.finished_steps in scored:
        return ""
    return f"; step {prepared.finished_steps} was not evaluated, which does: gleaner eval --run {config.run_dir}"


def _where_it_goes_on(config: RunConfig) -> str:
    newest, _ = checkpoint.newest(config.run_dir / "checkpoints")
    if newest is None:
        return "the run ends before its first checkpoint"
    return f"the run ends; {_again(config)} goes on from its checkpoint of step {checkpoint.step_of(newest)}"


def _if_it_is_killed(config: RunConfig) -> str:
    """Text for the user: what a kill would cost. It is printed when the run is asked to stop, since users mostly kill
    it next, and Ray ends this process without a message if Ray's own processes end first."""
    there = checkpoint.listing(config.run_dir / "checkpoints")
    behind = f"goes on from the checkpoint of step {checkpoint.step_of(there[-1])}" if there else "begins again"
    return f"if it is killed before, {_again(config)} {behind}"


def _again(config: RunConfig) -> str:
    return "the same command" if config.resume == "auto" else "the same command with resume=auto"


# Wiring: buffer, policy slot, producers and loop, for processes of Ray and for plain objects of one process.

BUFFER_BYTES = 512 * 2**20  # a group takes kilobytes: only very long completions reach this bound
ROUTED_BYTES = 8 * BUFFER_BYTES  # with the experts of its tokens a group of a large model takes megabytes


@dataclass(frozen=True, slots=True)
class Inputs:
    """What `wire` needs of a run beside its processes.

    total_steps: number of steps that the run is planned for. problems, heldout: prompts to train on and to evaluate.
    fingerprints: digests of the run's inputs, for its checkpoints. hooks: of the arrangement of its roles.
    weights_stay: whether whole weights stay in the learner's memory on their way to the generators. curriculum: the
    order of `problems`, where data.curriculum is set; of this attempt alone.
    """

    config: RunConfig
    total_steps: int
    problems: ProblemStream
    heldout: Sequence[Problem]
    fingerprints: Fingerprints
    hooks: Hooks
    weights_stay: bool = False
    curriculum: Curriculum | None = None


def wire(
    inputs: Inputs, generators: Sequence[RevivableActor[RolloutService]], trainer: Actor[TrainerService], sinks: Sinks
) -> tuple[Loop, Pipes]:
    """Makes the loop, and a producer for each generator. Returns the loop, and the pipes between it and them."""
    config, deadlines = inputs.config, inputs.config.cluster.deadlines
    cursor = Cursor()
    buffer = Buffer(
        groups_per_step=config.learner.groups_per_step,
        max_staleness=config.max_staleness,
        max_bytes=ROUTED_BYTES if config.rollout.routing_replay else BUFFER_BYTES,
        on_drop=lambda group: cursor.again(*group_position(group)),
    )
    pipes = Pipes(inputs.problems, cursor, buffer, PolicySlot(), sinks.timeline, curriculum=inputs.curriculum)
    queueing = deadlines.model_copy(update={"group": config.group_deadline_s})
    producers = [Producer(generator, pipes, sampling_of(config), queueing) for generator in generators]
    metrics = StepMetrics(sinks, producers, pipes, SignalWatch(config), RewardWatch(config.rewards, sinks.folder))
    hooks = inputs.hooks
    turns = hooks.wired(trainer, producers, deadlines)
    without_base_s = hooks.without_base_s(deadlines)
    sync = WeightSync(config, trainer, producers, pipes, stays=inputs.weights_stay, without_base_s=without_base_s)
    record = StepRecord(sinks.folder, inputs.total_steps, trainer, deadlines.push)
    reward_models = RewardModels(config.rewards, trainer, deadlines.step, sinks.timeline)
    loop = Loop(
        Schedule(config, inputs.total_steps, cursor, config.num_problems(len(inputs.problems))),
        producers,
        Batches(config, buffer, sinks.timeline),
        Training(trainer, deadlines.step, pipes, sync, turns, metrics, record, reward_models),
        sync,
        HeldOut(producers, inputs.heldout, config, sinks.timeline),
        RunCheckpoints(config, inputs.total_steps, inputs.fingerprints, trainer, pipes, sinks),
        metrics,
        MismatchGuard(config.guard),
    )
    return loop, pipes


def curriculum_of(config: RunConfig, problems: Listed, start: Estimates | None) -> Curriculum | None:
    """The order of the problems by data.curriculum, which begins with the estimates `start`; None without."""
    if start is None:
        return None
    return Curriculum(problems, start, config.seed, config.run_dir, accuracy_of(config), source_of(config.data))


def sampling_of(config: RunConfig) -> Callable[[int, int], Sampling]:
    """A function (position, attempt) -> how that group is sampled. It is pure, so that rollouts are reproducible."""

    def sampling(position: int, attempt: int) -> Sampling:
        return sampled(config, config.rollout.num_generations, group_seed(config.seed, position, attempt))

    return sampling


# learner.restarts: a run whose learner was lost begins another attempt from its newest checkpoint.


class Restarts:
    """Decides whether the run begins another attempt, and holds what that attempt starts from.

    An attempt begins with fresh processes for all roles, as the same command would: the policy version falls back to
    that of the checkpoint, and an engine that has served a later version does not take an earlier one.

    prepared: inputs of the next attempt. note: prints a line for the user.
    """

    def __init__(self, prepared: Prepared, note: Callable[[str], None]) -> None:
        self.prepared, self._note = prepared, note
        self._allowed, self._used = prepared.config.learner.restarts, 0

    def after(self, error: BaseException, *, begun: bool) -> bool:
        """Whether the run begins another attempt after this error, from the newest checkpoint. begun: whether this
        attempt came as far as its loop, so that the newest checkpoint on the disk belongs to it. ValueLost counts as
        the loss of the learner: a policy on its way to a generator was lost with the learner's node."""
        lost = first_of(error)
        if not isinstance(lost, LearnerLost | ValueLost) or self._used == self._allowed:
            return False
        self._used += 1
        self.prepared = from_newest(self.prepared) if begun else self.prepared
        where = f"step {self.prepared.finished_steps}" if self.prepared.resume_from else "the start"
        self._note(f"{sentence_of(lost)}; restart {self._used} of {self._allowed}, with fresh processes, from {where}")
        return True


def from_newest(prepared: Prepared) -> Prepared:
    """The run as it goes on from its newest checkpoint; unchanged if it has written none."""
    newest = checkpoint.newest(prepared.config.run_dir / "checkpoints")[0]
    if newest is None:
        return prepared
    return replace(prepared, resume_from=newest, finished_steps=checkpoint.step_of(newest))


# The watch over the processes that serve all generators, of rewards and of the teacher: Ray restarts one that ends, but
# not one that hangs.

log = logging.getLogger("learner")

# Losses of one process in a row, each less than Patience.silence_s after the one before; one more ends the run, since
# the completions that it is asked about are then taken to be the cause.
MAX_LOSSES = 5


@dataclass(frozen=True, slots=True)
class Patience:
    """Deadlines of a process that serves generators. silence_s: seconds without an answer, then it hangs. start_s:
    seconds in which a fresh process must start. Their sum is at most three quarters of a group's deadline, after which
    a generator that waits for it would count as hung."""

    silence_s: float
    start_s: float

    @classmethod
    def of(cls, deadlines: Deadlines) -> Self:
        return cls(deadlines.silence, min(deadlines.start, deadlines.group / 2))


async def kept_answering(process: Remote[Any], patience: Patience) -> None:
    """Watches a process that serves generators until cancelled. Ends a process that hangs, so that Ray starts a fresh
    one, which gets the groups that the hung process had.

    Raises RunEnded if no fresh process starts in time, or if the process was lost more than MAX_LOSSES times in a row;
    StartFailed if the fresh process refused its arguments.
    """
    losses, lost_at = 0, -math.inf
    while True:
        try:
            await process.until_ended(patience.silence_s)
        except DeadlineExceeded as error:
            said = f"{error}: it hangs"
            await process.restart()
        except ActorDied as error:
            said = str(error)
        now = time.monotonic()
        losses, lost_at = (losses + 1 if now - lost_at < patience.silence_s else 1), now
        if losses > MAX_LOSSES:
            raise RunEnded(f"{said}; it was lost {losses} times in a row, so it is not started again")
        log.warning("%s; starting a fresh process", said)
        await _started(process, patience.start_s)


async def _started(process: Remote[Any], deadline_s: float) -> None:
    try:
        await process.ready(deadline_s)
    except DeadlineExceeded:
        raise RunEnded(
            f"{process.name}: it was lost, and no fresh process has started within {deadline_s:g} s: its node is gone, "
            "or none has room (cluster.rewards, cluster.gpus); start the same command again when there is, or raise "
            "cluster.patience"
        ) from None
