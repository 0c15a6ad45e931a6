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
from collections.abc import AsyncIterator, Mapping, Sequence
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
from learner.driver import checkpoint, launch, process
from learner.driver.arrangement import Hooks, Turns
from learner.driver.console import Phases
from learner.driver.failure import LearnerLost, RunEnded, WatchedLearner, first_of, sentence_of, tell
from learner.driver.loop import Loop
from learner.driver.memory import stored_bytes
from learner.driver.preflight import Prepared
from learner.driver.record import closed
from learner.driver.roles import ALLOCATOR, check_nodes, learner_started, make_trainers, started, worker_spec
from learner.tools.sweep import FILE
from learner.tools.sweep.runs import Named, Sweep, folder_of
from learner.tools.sweep.table import ACCURACY, RowProgress, SweepProgress
from learner.trainer.service import TrainerService
from rollout.producer import Producer
from rollout.service import RolloutService
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorkers

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
        self.name, self._actor, self._run, self._turn = actor.name, actor, run, turn

    async def call(self, method: Any, deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        """See Actor.call."""
        if method in AT_ONCE:
            return await self._actor.call(method, deadline_s, self._run, *args, **kwargs)
        async with self._turn.of(self._run):
            return await self._actor.call(method, deadline_s, self._run, *args, **kwargs)


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

    prepared: what its next attempt starts from. state: waiting, running, done, stopped, dropped (by Halving) or failed.
    error: why it has failed. stop: ends it after its step, with a checkpoint.
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
    loop: Loop | None = None

    @property
    def open(self) -> bool:
        """Whether the run has not ended."""
        return self.state in ("waiting", "running")

    def accuracy(self, step: int) -> float | None:
        """That of the first evaluation at this step or a later one; None before it."""
        found = [] if self.loop is None else self.loop.held_out.evaluations
        return next((one.metrics.get(ACCURACY, 0.0) for one in found if one.step >= step), None)


class Halving:
    """Successive halving (Jamieson & Talwalkar 2016, 1502.07943): of the runs that are left at a rung, the better half
    by held-out accuracy goes on, until `keep` are left. The rungs are a half, a quarter, an eighth ... of the steps, as
    many as halvings are needed. The others end with a checkpoint.

    A rung is decided when each run that is left has been evaluated there; until then all go on, so that the decision
    does not depend on which run was faster.
    """

    def __init__(self, members: Sequence[Member], keep: int) -> None:
        self._members, self._keep = members, keep
        steps = members[0].prepared.total_steps
        halvings = max(0, math.ceil(math.log2(len(members) / keep)))
        self._rungs = [steps >> (halvings - i) for i in range(halvings)]
        for member in members:
            member.progress.evaluated = self.decide

    def decide(self) -> None:
        """Decides each rung that all have reached."""
        while self._rungs:
            left = [member for member in self._members if member.state != "failed" and not member.dropped]
            scores = {member.number: member.accuracy(self._rungs[0]) for member in left}
            if None in scores.values():
                return
            rung = self._rungs.pop(0)
            best = sorted(left, key=lambda member: (-(scores[member.number] or 0.0), member.number))
            for member in best[max(self._keep, math.ceil(len(left) / 2)) :]:
                member.dropped = True
                member.stop.set()
                member.progress.note(
                    f"dropped after step {rung}: its accuracy of {scores[member.number]:.3f} is behind"
                )


class Record:
    """sweep.json: the runs with what each was given and what has become of it, for people and for `gleaner report`.
    Runs of an earlier command in the same folder stay in it."""

    def __init__(self, folder: Path, members: Sequence[Member]) -> None:
        self._file, self._members = folder / FILE, members

    def write(self) -> None:
        """Writes the file anew."""
        found = recorded(self._file.parent)
        for member in self._members:
            found["runs"][member.named.name] = {
                "given": dict(member.named.given),
                "state": member.state,
                "step": member.prepared.finished_steps if member.loop is None else member.loop.step,
                "of": member.prepared.total_steps,
                "evaluations": [] if member.loop is None else _accuracies(member.loop),
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


def _accuracies(loop: Loop) -> list[tuple[int, Mapping[str, float]]]:
    return [(one.step, one.metrics) for one in loop.held_out.evaluations]


# The sweep.


async def run(sweep: Sweep, prepared: Sequence[Prepared], keep: int | None = None) -> int:
    """Runs all runs to their last steps, or until asked to stop. Returns the exit code: 1 if a run has failed. Raises
    an error that ends all of them. keep: see Halving; None: all go on to their ends."""
    names, config = [one.name for one in sweep.runs], prepared[0].config
    with SweepProgress(names) as progress:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        members = [_member(*each, progress) for each in zip(range(len(names)), sweep.runs, prepared, strict=True)]
        record = Record(folder_of(sweep), members)
        if keep is not None:
            _drop_again(members, folder_of(sweep))
            Halving(members, keep)
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
                await _attempts(members, session, progress, record)
            finally:
                process.end_unheard()
                await session.close()
                record.write()
        record.write()
    _conclude(members, progress)
    return int(any(member.state == "failed" for member in members))


def _member(number: int, named: Named, prepared: Prepared, together: SweepProgress) -> Member:
    config, total = prepared.config, prepared.total_steps
    progress = RowProgress(named.name, total, config.kv_dtype, together, config.data.eval.every)
    member = Member(number, named, prepared, progress)
    for skipped in prepared.skipped_checkpoints:
        progress.note(f"checkpoint skipped: {skipped}")
    for changed in prepared.changed:
        progress.note(f"changed since the checkpoint, as resume_allow_changed allows: {changed}")
    checkpoint.forget_leftovers(config.run_dir / "checkpoints")
    launch.publish_newest(prepared, progress)
    if prepared.finished_steps >= total:
        member.state = "done"
        together.state(named.name, f"{total}/{total} done")
        progress.note(f"all {total} steps are done already")
    return member


def _drop_again(members: Sequence[Member], folder: Path) -> None:
    """Leaves out the runs that an earlier start of the same command has dropped."""
    before = recorded(folder)["runs"]
    for member in members:
        if before.get(member.named.name, {}).get("state") == "dropped":
            member.dropped, member.state = True, "dropped"


async def _attempts(members: Sequence[Member], session: Session, progress: SweepProgress, record: Record) -> None:
    """Attempts until no run is open. A lost learner is lost for all runs: they begin again together, each from its
    newest checkpoint, with fresh processes, since an engine takes no earlier policy than it has served."""
    left = max(RESTARTS, *(member.prepared.config.learner.restarts for member in members))
    while True:
        try:
            await _attempt(members, session, progress, record)
            return
        except* (LearnerLost, ValueLost) as lost:
            if left == 0 or any(member.stop.is_set() and not member.dropped for member in members):
                raise
            left -= 1
            progress.note(f"{sentence_of(first_of(lost))}; all runs go on from their checkpoints, with fresh processes")
        for member in members:
            if member.open:
                member.prepared, member.state = launch.from_newest(member.prepared), "waiting"
        await session.release()


async def _attempt(members: Sequence[Member], session: Session, progress: SweepProgress, record: Record) -> None:
    """Starts the processes, and runs each run that is open to its end. Raises what ends all of them."""
    open_ones = [member for member in members if member.open]
    generators, learner = await session.ray_processes.beside(_start(members, session, progress))
    turn, stop = LearnerTurn(), asyncio.Event()
    process.end_by_stopping(stop, progress.note)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(_run_of(member, generators, learner, turn, session, record)) for member in open_ones
            ]
            stopping = tasks.create_task(_all_stop(stop, members))
            lost = next(filter(None, await asyncio.gather(*running)), None)
            stopping.cancel()
            process.end_unheard()
        if lost is not None:
            raise lost
    finally:
        shared = [generator.of_run(member.number) for member in members for generator in generators]
        await launch.close_all(shared)


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
        session.spawn(
            role, RolloutWorkers, [[worker_spec(p.config, rank, p.budgets, steps=p.total_steps) for p in prepared]], env
        )
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


async def _run_of(
    member: Member,
    generators: Sequence[SharedProcess],
    learner: Actor[Any],
    turn: LearnerTurn,
    session: Session,
    record: Record,
) -> ClusterLost | None:
    """Runs one run to its end, and keeps how it ended. Raises the loss of the learner, which ends this attempt of all
    runs. That of Ray is returned: each run notices it, and has a few seconds for a checkpoint."""
    prepared, number = member.prepared, member.number
    config = prepared.config
    trainer = WatchedLearner(LearnerOfRun(learner, number, turn), config.cluster.deadlines.heartbeat)
    own = [cast("RevivableActor[RolloutService]", generator.of_run(number)) for generator in generators]
    sinks = launch.sinks_of(prepared, member.progress, member.phases)
    process.streams_kept_in(config.run_dir.parent / process.CONSOLE)
    member.state = "running"
    try:
        with closed(sinks):
            if config.cluster.gpus.learner > 0 or prepared.budgets.learner_bytes is not None:
                longest, taught = config.rollout.max_prompt_length, config.data.teacher.longest
                await trainer.call(TrainerService.rehearse, config.cluster.deadlines.step, longest, taught)
            inputs = replace(launch.inputs_of(prepared, False), hooks=HooksOfRun(turn, number))
            member.loop, _ = launch.wire(inputs, own, trainer, sinks)
            member.loop.stop = member.stop
            await member.loop.run(prepared.resume_from, session.ray_processes.watch())
        finished = member.loop.step >= prepared.total_steps or not member.stop.is_set()
        _ended(member, "dropped" if member.dropped else "done" if finished else "stopped")
        member.phases.split(sinks.timeline, "end")
        member.phases.record(config.run_dir, resumed=prepared.resume_from is not None)
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
    else:
        for advised in member.loop.metrics.signal.advice():
            member.progress.note(f"advice: {advised}")
    record.write()
    await launch.close_all(own)
    return None


def _ended(member: Member, state: str) -> None:
    member.state = state
    step = 0 if member.loop is None else member.loop.step
    member.progress.ended(f"{step}/{member.prepared.total_steps} {state}")


def _conclude(members: Sequence[Member], progress: SweepProgress) -> None:
    """Prints what has become of each run, the best held-out score first."""
    told = sorted(members, key=lambda member: -(_last(member) or 0.0))
    for member in told:
        before, after = _first(member), _last(member)
        scores = "" if before is None or after is None else f"  accuracy {before:.3f} -> {after:.3f}"
        why = f"  {member.error}" if member.error else ""
        progress.note(f"{member.state:8} {member.prepared.config.run_dir}{scores}{why}")


def _first(member: Member) -> float | None:
    found = [] if member.loop is None else member.loop.held_out.evaluations
    return found[0].metrics.get(ACCURACY) if found else None


def _last(member: Member) -> float | None:
    found = [] if member.loop is None else member.loop.held_out.evaluations
    return found[-1].metrics.get(ACCURACY) if found else None
