"""A run from its first process to its last: start them, run the loop between them, end them whatever happens."""

import asyncio
import logging
from collections.abc import Mapping

from cluster.files import writing
from cluster.ray_cluster import Session, connect
from cluster.telemetry import Metrics, Timeline
from cluster.trackers import PROMETHEUS
from learner.config import RunConfig, roles
from learner.driver import checkpoint, end_requests, standard_streams
from learner.driver.config_io import to_yaml
from learner.driver.console import Progress
from learner.driver.idle_advice import advice
from learner.driver.loop import Loop
from learner.driver.phases import Phases
from learner.driver.plan_file import PlanFile
from learner.driver.plan_request import stored_bytes
from learner.driver.preflight import Prepared
from learner.driver.processes import Processes, start_processes
from learner.driver.publishing import publish
from learner.driver.restarts import Restarts
from learner.driver.reward_processes import Patience, kept_answering
from learner.driver.step_metrics import Sinks, closed
from learner.driver.wiring import Inputs, wire
from rewards.service import RewardService
from rollout.service import RolloutService

CLOSE_S = 20.0
NOT_BEGUN = "before the run began"  # of a CancelledError


async def run(prepared: Prepared, commands: Mapping[str, str]) -> int:
    """The exit code, once all steps are done or the run was asked to stop. Raises what ended it otherwise.

    commands: of the workers of roles that are prestarted.
    """
    config, phases = prepared.config, Phases()
    phases.until_now("preflight")
    with Progress(prepared.total_steps, prepared.config.kv_dtype) as progress:
        # Set up in here, where lines for the terminal go around the live table.
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        progress.note(f"run folder {config.run_dir}")
        for skipped in prepared.skipped_checkpoints:
            progress.note(f"checkpoint skipped: {skipped}")
        for changed in prepared.changed:
            progress.note(f"changed since the checkpoint, as resume_allow_changed allows: {changed}")
        checkpoint.forget_leftovers(config.run_dir / "checkpoints")
        _publish(prepared, progress)
        if prepared.finished_steps >= prepared.total_steps:
            progress.note(
                f"all {prepared.total_steps} steps are done already: raise steps or epochs, or give another name="
                f"{_unscored(prepared)}"
            )
            return 0
        for note in (prepared.budgets.note, *prepared.notes):
            progress.note(note)
        progress.note("starting Ray, generators and learner (about 10 s on two cores)")
        cpus = sum(role.cpus for role in roles(config))
        metered = PROMETHEUS in config.trackers
        stored = stored_bytes(config, prepared.budgets.policy_bytes)
        session = connect(config.cluster.address, cpus, stored, metered, commands)
        end_requests.cancelled(NOT_BEGUN)
        phases.until_now("Ray")
        restarts, stop = Restarts(prepared, progress.note), asyncio.Event()
        try:
            while (loop := await _attempt(restarts, session, progress, phases, stop)) is None:
                await session.release()
        except BaseException:
            progress.note(_where_it_goes_on(config))
            raise
        finally:
            end_requests.unheard()
            await session.close()
    phases.until_now("end")
    phases.record(config.run_dir, resumed=prepared.resume_from is not None)
    idle = advice(loop.metrics.idle, config)
    advised = loop.metrics.signal.advice() or ([] if idle is None else [idle])
    progress.summary(loop.held_out.evaluations, config.run_dir, phases, advised)
    if printed := loop.metrics.printed.total():
        progress.note(printed)
    if stop.is_set() and loop.step < prepared.total_steps:
        progress.note(f"stopped  at step {loop.step} of {prepared.total_steps}; the same command goes on from there")
    return 0


async def _attempt(
    restarts: Restarts, session: Session, progress: Progress, phases: Phases, stop: asyncio.Event
) -> Loop | None:
    """Starts all processes and runs the loop to its end; None if the learner was lost and there is to be another."""
    prepared, ray_processes = restarts.prepared, session.ray_processes
    processes: Processes | None = None
    loop: Loop | None = None
    try:
        processes = await ray_processes.beside(start_processes(prepared, session, progress.note))
        phases.until_now("processes")
        sinks = _sinks(prepared, progress, phases)
        with closed(sinks):
            inputs = _inputs(prepared, processes.weights_stay)
            loop, _ = wire(inputs, processes.generators, processes.learner, sinks)
            loop.stop = stop
            end_requests.stopped(stop, lambda said: progress.note(f"{said}; {_if_it_is_killed(prepared.config)}"))
            patience = Patience.of(prepared.config.cluster.deadlines)
            try:
                kept = [kept_answering(one, patience) for one in processes.rewards]
                await loop.run(prepared.resume_from, ray_processes.watch(), *kept)
                end_requests.unheard()
            finally:
                phases.split(sinks.timeline, "other")
        return loop
    except Exception as error:
        if stop.is_set() or not restarts.after(error, begun=loop is not None):
            raise
        return None
    finally:
        # A generator that still can ends its reward functions and files itself; one that cannot is killed right after.
        if processes is not None:
            await _close(processes)


async def _close(processes: Processes) -> None:
    """Generators before what scores for them."""
    generators, rewards = processes.generators, processes.rewards
    await asyncio.gather(*(one.call(RolloutService.close, CLOSE_S) for one in generators), return_exceptions=True)
    await asyncio.gather(*(one.call(RewardService.close, CLOSE_S) for one in rewards), return_exceptions=True)


def _inputs(prepared: Prepared, weights_stay: bool) -> Inputs:
    return Inputs(
        prepared.config,
        prepared.total_steps,
        prepared.problems,
        prepared.heldout,
        prepared.fingerprints,
        prepared.budgets.alternating,
        weights_stay,
    )


def _sinks(prepared: Prepared, progress: Progress, phases: Phases) -> Sinks:
    """From here on the run folder exists, and holds nothing of steps that are taken again."""
    folder, config = prepared.config.run_dir, prepared.config
    folder.mkdir(parents=True, exist_ok=True)
    standard_streams.kept_in(folder / standard_streams.CONSOLE)
    checkpoint.set_aside_after(folder / "checkpoints", prepared.finished_steps)
    with writing(folder / "config.yaml"):
        (folder / "config.yaml").write_text(to_yaml(config))
    timeline = Timeline(folder / "timeline.json", prepared.finished_steps)
    metrics = Metrics(folder, config.trackers, prepared.finished_steps)
    return Sinks(folder, metrics, timeline, progress, phases, PlanFile(folder, prepared.budgets))


def _publish(prepared: Prepared, progress: Progress) -> None:
    """What a kill between a checkpoint and its publication left undone."""
    if prepared.resume_from is None:
        return
    whole = prepared.config.learner.mode == "full"
    repaired = publish(prepared.resume_from, prepared.config.run_dir, whole_model=whole)
    if repaired is not None:
        progress.note(f"{repaired} was not that of {prepared.resume_from.name}: it is now")


def _unscored(prepared: Prepared) -> str:
    """What is to be said of a finished run whose last step was not evaluated: that failed, or it was not due."""
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
    """Said before it may be: who has asked for the end mostly kills next, and Ray's part of this process ends it
    without a word where Ray's own processes end first."""
    there = checkpoint.listing(config.run_dir / "checkpoints")
    behind = f"goes on from the checkpoint of step {checkpoint.step_of(there[-1])}" if there else "begins again"
    return f"if it is killed before, {_again(config)} {behind}"


def _again(config: RunConfig) -> str:
    return "the same command" if config.resume == "auto" else "the same command with resume=auto"
