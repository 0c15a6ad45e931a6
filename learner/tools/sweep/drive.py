"""Runs a sweep: several runs on the processes of one. Each has its own loop, buffer, policies and folder, as it would
have alone; generator and learner are shared.

While one run trains, the others generate, so that both processes have work though each run waits for its own turn.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from cluster.actor import Actor, ClusterLost, RevivableActor, SharedProcess, ValueLost
from cluster.config import Deadlines
from cluster.files import writing
from cluster.ray_actor import Remote
from cluster.ray_cluster import Session, connect
from learner.config import generator_roles, learner_roles, roles
from learner.driver import launch, process
from learner.driver.arrangement import Hooks, Turns
from learner.driver.console import Phases
from learner.driver.failure import LearnerLost, RunEnded, WatchedLearner, first_of, sentence_of, tell
from learner.driver.loop import Loop
from learner.driver.machine_checks import check_nodes
from learner.driver.memory import stored_bytes
from learner.driver.preflight import Prepared
from learner.driver.record import closed
from learner.driver.roles import ALLOCATOR, learner_started, make_trainers, rehearsed, started, worker_spec
from learner.tools.sweep import FILE
from learner.tools.sweep.runs import Named, Sweep, folder_of, rungs
from learner.tools.sweep.table import ACCURACY, RowProgress, SweepProgress
from learner.trainer.service import TrainerService
from rewards.limits import NAME as OUTPUT
from rollout.producer import Producer
from rollout.service import RolloutService
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorkers, WorkerSpec

log = logging.getLogger("learner")

RESTARTS = 3  # a lost learner is replaced so many times at least, since its loss would end all runs


# Whose turn the learner has.


class LearnerTurn:
    """One lock for the learner, which the runs take in the order in which they asked.

    A step's turn is all that happens between its batch and its policy (reward models, training, export): if another
    run's step came in between, the first run's generation would wait for it, and the runs would go in step with each
    other instead of filling each other's gaps.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._owner: int | None = None

    @asynccontextmanager
    async def of(self, run: int) -> AsyncIterator[None]:
        """Inside this block the learner works for this run alone. A call within the run's own turn does not wait."""
        if self._owner == run:
            yield
            return
        async with self._lock:
            self._owner = run
            try:
                yield
            finally:
                self._owner = None


AT_ONCE: tuple[Any, ...] = (TrainerService.pulse, TrainerService.sees)  # calls that do not wait for the learner's work


class LearnerOfRun:
    """The learner as one run calls it: an Actor. The deadline of a call begins when it has its turn."""

    def __init__(self, actor: Actor[Any], run: int, turn: LearnerTurn) -> None:
        self.name, self._actor, self.run, self.turn = actor.name, actor, run, turn

    async def call(self, method: Any, deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        """See Actor.call."""
        if method in AT_ONCE:
            return await self._actor.call(method, deadline_s, self.run, *args, **kwargs)
        async with self.turn.of(self.run):
            return await self._actor.call(method, deadline_s, self.run, *args, **kwargs)


class TurnOfRun(Turns):
    """The Turns of one run: its step has the learner to itself."""

    def __init__(self, turn: LearnerTurn, run: int) -> None:
        self._turn, self._run = turn, run

    @asynccontextmanager
    async def learner(self) -> AsyncIterator[None]:
        """Inside this block the learner works for this run alone."""
        async with self._turn.of(self._run):
            yield


class HooksOfRun(Hooks):
    """Hooks of one run of a sweep."""

    def __init__(self, turn: LearnerTurn, run: int) -> None:
        self._turns = TurnOfRun(turn, run)

    def wired(self, trainer: Actor[TrainerService], producers: Sequence[Producer], deadlines: Deadlines) -> Turns:
        return self._turns


# The runs, and what has become of each.


@dataclass(slots=True)
class Member:
    """One run of the sweep.

    number: of its objects in the processes of an attempt. before: its evaluations, [step, accuracy], as an earlier
    command has recorded them. prepared: what its next attempt starts from. state: waiting, running, done, stopped,
    dropped (by Halving), failed or interrupted. error: why it has failed. stop: ends it after its step, with a
    checkpoint.
    """

    number: int
    named: Named
    prepared: Prepared
    progress: RowProgress
    phases: Phases = field(default_factory=Phases)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    state: str = "waiting"
    error: str = ""
    dropped: bool = False
    before: list[tuple[int, float]] = field(default_factory=list)
    loop: Loop | None = None

    @property
    def open(self) -> bool:
        """Whether the run has not ended."""
        return self.state in ("waiting", "running")

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """[step, accuracy] of each evaluation so far."""
        found = [] if self.loop is None else self.loop.held_out.evaluations
        return [(one.step, one.metrics.get(ACCURACY, 0.0)) for one in found] or self.before

    def accuracy(self, step: int) -> float | None:
        """That of the first evaluation at this step or a later one; of a run that has ended before, that of its last.
        None if there is none yet."""
        reached = next((score for at, score in self.accuracies if at >= step), None)
        if reached is None and self.accuracies and not self.open:
            return self.accuracies[-1][1]
        return reached


class Halving:
    """Successive halving (Jamieson & Talwalkar 2016, 1502.07943): of n runs the ceil(n / 2) that are best by held-out
    accuracy go on at the first rung, ceil(n / 4) at the second, and so on, until `keep` are left. The rungs are a half,
    a quarter, an eighth ... of the steps, as many as halvings are needed. The others end with a checkpoint.

    A rung is decided when each run that is left has been evaluated there; until then all go on, so that the decision
    does not depend on which run was faster. A rung that was decided before the command was started again drops nobody.
    """

    def __init__(self, members: Sequence[Member], keep: int) -> None:
        self._members, self._keep = members, keep
        self._rungs = rungs(len(members), keep, members[0].prepared.total_steps)
        self._decided = 0
        for member in members:
            member.progress.evaluated = self.decide

    def decide(self) -> None:
        """Decides each rung that all have reached. To be called when a run was evaluated or has ended."""
        while self._decided < len(self._rungs):
            rung, stay = self._rungs[self._decided], math.ceil(len(self._members) / 2 ** (self._decided + 1))
            left = [member for member in self._members if member.state != "failed" and not member.dropped]
            scores = [(member.accuracy(rung), place) for place, member in enumerate(left)]
            known = [(-score, place) for score, place in scores if score is not None]
            if len(known) < len(left):
                return
            self._decided += 1
            for score, place in sorted(known)[max(self._keep, stay) :]:
                member = left[place]
                member.dropped = True
                member.stop.set()
                member.progress.note(f"dropped: its accuracy at step {rung}, {-score:.3f}, is behind")


class Record:
    """sweep.json: the runs with what each was given and what has become of it, for people and for `gleaner report`.
    Runs of an earlier command in the same folder stay in it; `newest` names those of the newest command, and `ended`
    says whether it came to its end.

    ended: to be set before the last `write`.
    """

    def __init__(self, folder: Path, members: Sequence[Member]) -> None:
        self._file, self._members, self.ended = folder / FILE, members, False

    def write(self) -> None:
        """Writes the file anew."""
        found = recorded(self._file.parent)
        found |= {"newest": [member.named.name for member in self._members], "ended": self.ended}
        for member in self._members:
            found["runs"][member.named.name] = {
                "given": dict(member.named.given),
                "state": member.state,
                "step": member.prepared.finished_steps if member.loop is None else member.loop.step,
                "of": member.prepared.total_steps,
                "evaluations": member.accuracies,
                **({"error": member.error} if member.error else {}),
            }
        partial_file = self._file.with_suffix(".partial")
        with writing(partial_file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial_file.write_text(json.dumps(found, indent=2))
            os.replace(partial_file, self._file)


def recorded(folder: Path) -> dict[str, Any]:
    """The content of sweep.json; without any runs where there is none."""
    file = folder / FILE
    return dict(json.loads(file.read_text())) if file.exists() else {"runs": {}}


# The sweep.


async def run(sweep: Sweep, prepared: Sequence[Prepared], keep: int | None = None) -> int:
    """Runs all runs to their last steps, or until asked to stop. Returns the exit code: 1 if a run has failed. Raises
    an error that ends all of them. keep: see Halving; None: all go on to their ends."""
    names, config = [one.name for one in sweep.runs], prepared[0].config
    with SweepProgress(names) as progress:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        members = [_member(*each, progress) for each in zip(range(len(names)), sweep.runs, prepared, strict=True)]
        record = Record(folder_of(sweep), members)
        _remember(members, folder_of(sweep), keeps=keep is not None)
        halving = None if keep is None else Halving(members, keep)
        for note in dict.fromkeys((prepared[0].budgets.note, *(note for one in prepared for note in one.notes))):
            progress.note(note)
        record.write()
        if any(member.open for member in members):
            progress.note("starting Ray, generators and learner (about 15 s on two cores)")
            cpus = sum(role.cpus for role in roles(config))
            stored = len(members) * stored_bytes(config, prepared[0].budgets.policy_bytes)
            session = connect(config.cluster.address, cpus, stored, False)
            process.end_by_cancelling(launch.NOT_BEGUN)
            try:
                await _attempts(members, Shared(session, progress, record, halving))
            finally:
                process.end_unheard()
                await session.close()
                for member in members:
                    member.state = "interrupted" if member.open else member.state
                record.write()
        record.ended = True
        record.write()
    _conclude(members, progress)
    return int(any(member.state == "failed" for member in members))


def _member(number: int, named: Named, prepared: Prepared, together: SweepProgress) -> Member:
    config, total = prepared.config, prepared.total_steps
    progress = RowProgress(named.name, total, config.kv_dtype, together, config.data.eval.every)
    member = Member(number, named, prepared, progress)
    launch.take_up(prepared, progress)
    if prepared.finished_steps >= total:
        member.state = "done"
        together.state(named.name, f"{total}/{total} done")
        progress.note(f"all {total} steps are done already")
    return member


def _remember(members: Sequence[Member], folder: Path, *, keeps: bool) -> None:
    """Takes the evaluations that earlier commands have recorded. keeps: leaves out the runs that were dropped."""
    before = recorded(folder)["runs"]
    for member in members:
        told = before.get(member.named.name, {})
        member.before = [(step, score) for step, score in told.get("evaluations", [])]
        if keeps and told.get("state") == "dropped":
            member.dropped, member.state = True, "dropped"


@dataclass(frozen=True, slots=True)
class Shared:
    """What all runs share beside their processes."""

    session: Session
    progress: SweepProgress
    record: Record
    halving: Halving | None

    def ended(self) -> None:
        """To be called when a run has ended. A disk that takes no record is no reason to end the others."""
        if self.halving is not None:
            self.halving.decide()
        try:
            self.record.write()
        except OSError as error:
            log.warning("%s: %s", FILE, sentence_of(error))


async def _attempts(members: Sequence[Member], shared: Shared) -> None:
    """Attempts until no run is open. A lost learner is lost for all runs: they begin again together, each from its
    newest checkpoint, with fresh processes, since an engine takes no earlier policy than it has served."""
    left = max(RESTARTS, *(member.prepared.config.learner.restarts for member in members))
    stop = asyncio.Event()
    stopping = asyncio.create_task(_all_stop(stop, members))
    try:
        while True:
            try:
                await _attempt([member for member in members if member.open], shared, stop)
                return
            except* (LearnerLost, ValueLost) as lost:
                if left == 0 or stop.is_set():
                    raise
                left -= 1
                said = sentence_of(first_of(lost))
                shared.progress.note(f"{said}; all runs go on from their checkpoints, with fresh processes")
            for member in members:
                if member.open:
                    member.prepared, member.state = launch.from_newest(member.prepared), "waiting"
            await shared.session.release()
    finally:
        stopping.cancel()


async def _attempt(members: Sequence[Member], shared: Shared, stop: asyncio.Event) -> None:
    """Starts the processes, and runs each run to its end. Raises what ends all of them."""
    for number, member in enumerate(members):
        member.number = number
    session, progress = shared.session, shared.progress
    generators, learner = await session.ray_processes.beside(_start(members, session, progress))
    turn = LearnerTurn()
    process.end_by_stopping(stop, progress.note)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(_run_of(member, generators, LearnerOfRun(learner, member.number, turn), shared))
                for member in members
            ]
            lost = next(filter(None, await asyncio.gather(*running)), None)
            process.end_unheard()
        if lost is not None:
            raise lost
    finally:
        ends = [generator.of_run(member.number) for member in members for generator in generators]
        await launch.close_all(ends)


async def _all_stop(stop: asyncio.Event, members: Sequence[Member]) -> None:
    await stop.wait()
    for member in members:
        member.stop.set()


async def _start(
    members: Sequence[Member], session: Session, progress: SweepProgress
) -> tuple[list[SharedProcess], Actor[Any]]:
    """Starts the generators and the learner of all runs."""
    prepared = [member.prepared for member in members]
    config, budgets, start = prepared[0].config, prepared[0].budgets, prepared[0].config.cluster.deadlines.start
    await session.reserve(roles(config), start, progress.note)
    for line in await check_nodes(config, session, start, budgets.policy_bytes):
        progress.note(line)
    env = required_env(cuda=config.cluster.gpus.generator > 0)
    generators = [
        session.spawn(role, RolloutWorkers, [[_spec(p, rank, len(prepared)) for p in prepared]], env)
        for rank, role in enumerate(generator_roles(config))
    ]
    overlap = config.cluster.gpus.learner == 0
    if not overlap:  # an engine measures the card's free memory as it starts
        for generator in generators:
            await started(cast("Remote[Any]", generator), start)
    settled = [p.config.model_copy(update={"learner": p.budgets.learner}) for p in prepared]
    learner_env = env if overlap else ALLOCATOR
    wanted = [settled, [p.total_steps for p in prepared], budgets.learner_bytes]
    learner = session.spawn(learner_roles(config)[0], make_trainers, wanted, learner_env)
    async with asyncio.TaskGroup() as starting:
        if overlap:
            for generator in generators:
                starting.create_task(started(cast("Remote[Any]", generator), start))
        starting.create_task(learner_started(cast("Remote[Any]", learner), start))
    return [SharedProcess(generator) for generator in generators], learner


def _spec(prepared: Prepared, rank: int, runs: int) -> WorkerSpec:
    """What one run's part of a generator is built from. All runs share the requests that a judge may get, and a file
    for what reward functions print, since they share the processes of these."""
    spec = worker_spec(prepared.config, rank, prepared.budgets, steps=prepared.total_steps)
    judged = replace(spec.judged, share=spec.judged.share / runs)
    return replace(spec, judged=judged, printed=prepared.config.run_dir.parent / OUTPUT)


async def _run_of(
    member: Member, generators: Sequence[SharedProcess], learner: LearnerOfRun, shared: Shared
) -> ClusterLost | None:
    """Runs one run to its end, and keeps how it ended. Raises the loss of the learner, which ends this attempt of all
    runs. That of Ray is returned: each run notices it, and has a few seconds for a checkpoint."""
    own = [cast("RevivableActor[RolloutService]", generator.of_run(member.number)) for generator in generators]
    try:
        await _train(member, own, learner, shared.session)
    except (Exception, BaseExceptionGroup) as error:
        cause = first_of(error)
        if isinstance(cause, LearnerLost | ValueLost):
            raise cause from None
        if isinstance(cause, ClusterLost):
            return cause
        member.error = sentence_of(cause)
        if not isinstance(cause, RunEnded):
            log.error("%s: %s", member.named.name, tell(cause)[0])
        _ended(member, "failed")
        member.progress.note(f"failed, and the other runs go on: {member.error}")
    shared.ended()
    await launch.close_all(own)
    return None


async def _train(
    member: Member, generators: Sequence[RevivableActor[RolloutService]], learner: LearnerOfRun, session: Session
) -> None:
    prepared, config = member.prepared, member.prepared.config
    trainer = WatchedLearner(learner, config.cluster.deadlines.heartbeat)
    sinks = launch.sinks_of(prepared, member.progress, member.phases)
    process.streams_kept_in(config.run_dir.parent / process.CONSOLE)
    member.state = "running"
    with closed(sinks):
        await rehearsed(prepared, trainer)
        inputs = replace(launch.inputs_of(prepared, False), hooks=HooksOfRun(learner.turn, learner.run))
        member.loop, _ = launch.wire(inputs, generators, trainer, sinks)
        member.loop.stop = member.stop
        await member.loop.run(prepared.resume_from, session.ray_processes.watch())
    finished = member.loop.step >= prepared.total_steps or not member.stop.is_set()
    _ended(member, "dropped" if member.dropped else "done" if finished else "stopped")
    member.phases.split(sinks.timeline, "end")
    member.phases.record(config.run_dir, resumed=prepared.resume_from is not None)
    metrics = member.loop.metrics
    for advised in (*metrics.watch.advice(), *metrics.signal.advice()):
        member.progress.note(f"advice: {advised}")


def _ended(member: Member, state: str) -> None:
    member.state = state
    step = 0 if member.loop is None else member.loop.step
    member.progress.ended(f"{step}/{member.prepared.total_steps} {state}")


def _conclude(members: Sequence[Member], progress: SweepProgress) -> None:
    """Prints what has become of each run, the best held-out score first."""
    for member in sorted(members, key=lambda member: -(member.accuracies[-1][1] if member.accuracies else 0.0)):
        found = member.accuracies
        scores = f"  accuracy {found[0][1]:.3f} -> {found[-1][1]:.3f}" if found else ""
        why = f"  {member.error}" if member.error else ""
        progress.note(f"{member.state:8} {member.prepared.config.run_dir}{scores}{why}")
