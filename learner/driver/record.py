"""Writes what a run leaves in its folder, for learner.driver.loop: for each step its rollouts, metrics, mismatch and
the digest of its policy; and checkpoints. Also the advice on idle times that a run ends with."""

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.actor import Actor
from cluster.errors import WrongInput
from cluster.files import Digest, writing
from cluster.reading import MIB, json_value, lines
from cluster.telemetry import Metrics, Timeline, overlap, seconds
from learner.config import RunConfig
from learner.driver import checkpoint
from learner.driver.checkpoint import TRAINER, publish
from learner.driver.console import Phases, Progress, RewardOutput
from learner.driver.evaluate import Evaluation
from learner.driver.identity import FILE, Fingerprints
from learner.driver.memory import PlanFile
from learner.driver.metrics import RewardWatch, SignalWatch
from learner.trainer.service import Arithmetic, TrainerService
from rewards.base import JUDGE
from rewards.config import functions_of
from rollout import ledger
from rollout.data import curriculum
from rollout.delivery import Answer, Receipt
from rollout.producer import Pipes, Producer
from rollout.types import PolicyId

# mismatch/ of a run: by how much the learner's logprob of each token differs from the sampler's, one file a step.
#
# The mismatch has a file of its own, since only the learner knows it, and only after the step, when the rollouts are on
# the disk already. In float16 a difference of 1e-6 nats is still known to 3 %.


MISMATCH_FOLDER = "mismatch"
MISMATCH_SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        # [T] nats, nan for tokens that the policy did not sample; null: the row was not trained on.
        pa.field("mismatch", pa.list_(pa.float16())),
    ]
)


def write_mismatch(run_dir: Path, step: int, groups: Sequence[pa.Table], mismatch: pa.Array) -> Path:
    """Writes the file of a step and returns its path. groups: the groups that the learner was given. mismatch: a list
    for each row of the groups (learner.trainer.service.TrainerService.mismatch)."""
    folder = run_dir / MISMATCH_FOLDER
    rows = pa.concat_tables([group.select(MISMATCH_SCHEMA.names[:2]) for group in groups])
    path = folder / f"step-{step:06d}.parquet"
    partial = path.with_suffix(".partial")
    with writing(partial):
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table([*rows.columns, mismatch], schema=MISMATCH_SCHEMA), partial)
        os.replace(partial, path)
    return path


def read_mismatch(path: Path) -> dict[str, list[list[float] | None]]:
    """group_id -> for each row of the group, the [T] differences in nats, or None if the row was not trained on. Raises
    OSError or ValueError (pa.ArrowException)."""
    rows = ledger.read_table(path)
    if not rows.schema.equals(MISMATCH_SCHEMA):
        raise ValueError(
            f"{path.name}: columns must be {', '.join(MISMATCH_SCHEMA.names)}, got {', '.join(rows.column_names)}"
        )
    found: dict[str, list[list[float] | None]] = {}
    for group, values in zip(rows.column("group_id").to_pylist(), rows.column("mismatch").to_pylist(), strict=True):
        found.setdefault(group, []).append(values)
    return found


def forget_mismatch_after(run_dir: Path, step: int) -> None:
    """Deletes the files of steps that a resumed run takes again."""
    ledger.forget_after(run_dir / MISMATCH_FOLDER, step)


# Advice on the settings, from the measured idle times of a run.

WORTH_SAYING = 0.15  # an idle share of the time below this, or a bound on the gain below 1 + this, gets no advice
REWARDS_SHARE = 0.3  # share of the time from which on the wait for a reward is named


@dataclass(slots=True)
class IdleTimes:
    """Seconds, added up over the steps of a run. total: all of them. generator, learner: those in which a generator
    (mean over the generators) or the learner had no work. reward: those in which a completion waited for its reward
    (mean over the completions of each step)."""

    total: float = 0.0
    generator: float = 0.0
    learner: float = 0.0
    reward: float = 0.0

    def add(self, metrics: dict[str, float]) -> None:
        """Adds a step's times. A step with an evaluation or a checkpoint in it is left out: both sides wait for it."""
        if metrics["time/evaluate"] > 0 or metrics["time/checkpoint"] > 0:
            return
        self.total += metrics["time/step"]
        self.generator += metrics["time/generator_idle"]
        self.learner += metrics["time/learner_idle"]
        self.reward += metrics["reward/ms"] / 1e3


def advice(idle: IdleTimes, config: RunConfig) -> str | None:
    """A sentence on what would make the run faster, or None where the idle times suggest no change.

    If generators and learner overlapped completely, a step would take as long as the busier of them, so the gain in
    samples per second is at most total / max(generator busy, learner busy). This holds where each has hardware of its
    own: on shared cores, or on slices of one card, they slow each other down.
    """
    if idle.total <= 0:
        return None
    learner_waits = idle.learner >= max(idle.generator, WORTH_SAYING * idle.total)
    if learner_waits and idle.reward > REWARDS_SHARE * idle.total and (ways := _of_rewards(config)):
        share = f"{idle.reward / idle.total:.0%}"
        return f"a completion's reward took {share} of the time of a step; what shortens that helps ({ways})"
    share, other = (f"{idle_s / idle.total:.0%}" for idle_s in (idle.generator, idle.learner))
    shares = f"generators were idle {share} of the time, the learner {other}"
    if config.max_staleness > 0:
        if max(idle.generator, idle.learner) < WORTH_SAYING * idle.total:
            return None
        if idle.generator < idle.learner:
            return (
                f"{shares}: generation is the longer side; what shortens it helps (rollout.workers, its cores or card)"
            )
        return f"{shares}: training is the longer side; what shortens it helps (the learner's cores or card)"
    gain = idle.total / max(idle.total - idle.generator, idle.total - idle.learner)
    if gain < 1 + WORTH_SAYING:
        return None
    bound = f"max_staleness=1 lets them work at once: at most {gain:.1f} times the samples per second"
    if _share_hardware(config):
        return (
            f"{shares}, since they take turns. {bound} if each had hardware of its own; here they share it, so try it"
        )
    return f"{shares}, since they take turns. {bound}"


def _of_rewards(config: RunConfig) -> str:
    """The settings that may shorten the wait for rewards."""
    functions = functions_of(config.rewards)
    ways = []
    if any(reward.use != JUDGE for reward in functions):
        ways.append("rollout.reward_workers; async def for a function that waits for somebody else")
    if any(reward.use == JUDGE for reward in functions):
        ways.append("a judge's args.at_once")
    return "; ".join(ways)


def _share_hardware(config: RunConfig) -> bool:
    gpus = config.cluster.gpus
    on_cpu = gpus.generator == gpus.learner == 0
    return on_cpu or (0 < gpus.generator < 1 and 0 < gpus.learner < 1)


# The record of each step: its rollouts and the digest of its policy, from which a replay repeats and checks the step,
# and the mismatch of its tokens.

POLICIES = "policies.jsonl"
LONGEST = MIB  # most bytes of a line


class PolicyLine(NamedTuple):
    """A line of policies.jsonl, which describes one policy version.

    step: the step that made the policy; 0: the policy that the run began with. sha256: digest of the bytes that were
    sent to the generators. total_steps: number of steps that the learning-rate schedule was made for. arithmetic: what
    the learner computed the step with.
    """

    step: int
    sha256: str
    total_steps: int
    arithmetic: Arithmetic


class StepRecord:
    """Writes the record of each step. Some of it comes from the learner, for whose answers it waits.

    folder: the run's folder. total_steps: number of steps that the learning-rate schedule is made for. deadline_s:
    seconds that an answer of the learner may take.
    """

    def __init__(self, folder: Path, total_steps: int, trainer: Actor[TrainerService], deadline_s: float) -> None:
        self._folder, self._total_steps = folder, total_steps
        self._rollouts, self._policies = folder / "rollouts", folder / POLICIES
        self._trainer, self._deadline_s = trainer, deadline_s
        self._arithmetic: Arithmetic | None = None
        self._known = -1  # the newest policy version that has a line in policies.jsonl

    async def begin(self, step: int) -> None:
        """Continues from this step. The records of later steps are deleted, since those steps will be taken again."""
        ledger.forget_after(self._rollouts, step)
        forget_mismatch_after(self._folder, step)
        curriculum.forget_after(self._folder, step)
        kept = [line for line in read_policies(self._policies.parent) if line.step <= step and step > 0]
        partial = self._policies.with_suffix(".partial")
        with writing(partial):
            partial.write_text("".join(map(_written, kept)))
            os.replace(partial, self._policies)
        self._known = max((line.step for line in kept), default=-1)
        self._arithmetic = await self._trainer.call(TrainerService.arithmetic, self._deadline_s)

    def rollouts(self, step: int, groups: Sequence[pa.Table]) -> None:
        """Writes the groups that the step consumes to the ledger."""
        ledger.write(self._rollouts, step, groups)

    async def mismatch(self) -> pa.Array:
        """The mismatch of the newest step's tokens (TrainerService.mismatch), from the learner."""
        return await self._trainer.call(TrainerService.mismatch, self._deadline_s)

    def keep_mismatch(self, step: int, groups: Sequence[pa.Table], mismatch: pa.Array) -> None:
        """Writes the mismatch of a step. groups: the groups that the step trained on."""
        write_mismatch(self._folder, step, groups, mismatch)

    def policy(self, sent: PolicyId) -> None:
        """Writes the line of a policy that was sent out. The policy that a resumed run begins with has one already."""
        assert self._arithmetic is not None, "begin() comes first"
        if sent.version <= self._known:
            return
        line = PolicyLine(sent.version, sent.digest, self._total_steps, self._arithmetic)
        with writing(self._policies), self._policies.open("a") as file:
            file.write(_written(line))
        self._known = sent.version


def read_policies(run_dir: Path) -> list[PolicyLine]:
    """The lines of policies.jsonl in a run's folder, oldest first; empty where an older version of gleaner wrote no
    such file. A line that a kill cut short is left out. Raises WrongInput."""
    try:
        return [line for _, text in lines(run_dir / POLICIES, LONGEST) if (line := _read(text)) is not None]
    except FileNotFoundError:
        return []


def _written(line: PolicyLine) -> str:
    return json.dumps(line._asdict() | {"arithmetic": line.arithmetic._asdict()}) + "\n"


def _read(text: bytes) -> PolicyLine | None:
    try:
        found = json_value(text, "line")
        line = PolicyLine(**found | {"arithmetic": Arithmetic(**found["arithmetic"])})
    except (ValueError, TypeError, KeyError):
        return None
    return line if type(line.step) is int and isinstance(line.sha256, str) else None


# The metrics of each step: the batch's, the learner's, and where seconds and memory went.

KINDS = ("generate", "train", "push", "wait", "evaluate", "checkpoint")


@dataclass(slots=True)
class Sinks:
    """Where a run writes what it reports: files in its folder, trackers, and the terminal."""

    folder: Path
    metrics: Metrics
    timeline: Timeline
    progress: Progress
    phases: Phases
    plan: PlanFile | None = None


@contextmanager
def closed(sinks: Sinks) -> Iterator[None]:
    """Closes metrics and timeline at the end of this block. If an exception ends the block, it is raised, and not an
    OSError of the closing."""
    try:
        yield
    except BaseException:
        for one in (sinks.metrics, sinks.timeline):
            with suppress(OSError):
                one.close()
        raise
    sinks.metrics.close()
    sinks.timeline.close()


class StepMetrics:
    """Adds times and counters to the metrics of each step, and writes them to every sink.

    The metrics of the newest step are held back until all of them are known; `flush` then writes them.
    """

    def __init__(
        self, sinks: Sinks, producers: Sequence[Producer], pipes: Pipes, signal: SignalWatch, watch: RewardWatch
    ) -> None:
        self._sinks, self._producers, self._pipes = sinks, producers, pipes
        self.idle, self.printed = IdleTimes(), RewardOutput(sinks.folder)
        self.signal, self.watch = signal, watch
        self._accounted = time.perf_counter()  # end of the newest step, to which the run's seconds are accounted for
        self._held: dict[str, float] | None = None  # metrics of the newest step, while they are not written

    def start(self) -> None:
        """Starts the clock of the first step."""
        self._sinks.phases.split(self._sinks.timeline, "processes")
        self._accounted = time.perf_counter()

    def times(self, tokens: float) -> dict[str, float]:
        """The metrics of where the seconds since the last call went. tokens: number of tokens sampled for the step.

        time/overlap: generators and learner were busy at once. time/generator_idle: a generator had no request (mean
        over the generators). time/learner_idle: the learner neither trained nor made the next policy. time/push_load,
        time/push_probe: the slowest generator's own times for the newest policy that has reached it.
        """
        start, now, timeline = self._accounted, time.perf_counter(), self._sinks.timeline
        busy = {kind: timeline.busy(kind, start, now) for kind in KINDS}
        generating = timeline.busy_by_role("generate", start, now)
        learning = seconds(busy["train"]) + seconds(timeline.busy("policy", start, now))
        self._sinks.phases.split(timeline, "other")
        timeline.forget_before(start)
        self._accounted, step = now, now - start
        receipts = self._receipts()
        return {f"time/{kind}": seconds(spans) for kind, spans in busy.items()} | {
            "time/step": step,
            "time/push_load": max(receipt.load_s for receipt in receipts),
            "time/push_probe": max((answer.seconds for answer in self._answers()), default=0.0),
            "time/overlap": overlap(busy["generate"], busy["train"]),
            "time/generator_idle": step - sum(map(seconds, generating.values())) / len(self._producers),
            "time/learner_idle": step - learning,
            "rollout/tokens_per_s": tokens / step,
        }

    def _receipts(self) -> list[Receipt]:
        """Each generator's receipt of the newest policy that it has loaded, at worst that of the step before; a
        generator that has not loaded any has none."""
        return [producer.feed.receipt for producer in self._producers if producer.feed.receipt is not None]

    def _answers(self) -> list[Answer]:
        return [producer.feed.answer for producer in self._producers if producer.feed.answer is not None]

    def hold(self, metrics: dict[str, float]) -> None:
        """Holds the metrics of the newest step, in place of those held before."""
        self._held = metrics

    def completions(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Sends a few completions of held-out problems to the trackers."""
        self._sinks.metrics.completions(step, samples)

    def add(self, metrics: dict[str, float]) -> None:
        """Adds to the metrics that are held."""
        self._held = (self._held or {}) | metrics

    def flush(self, step: int) -> dict[str, float]:
        """Writes the metrics that are held, if any, and returns them."""
        held, self._held = self._held, None
        if held is None:
            return {}
        if "time/step" not in held:  # the run ends before the step was complete
            held |= self.times(held["rollout/tokens"])
        self.write(step, held)
        return held

    def check_folder(self, step: int) -> None:
        """Raises FolderGone if the run folder was deleted or replaced since the run began."""
        self._sinks.metrics.check_folder(step)

    def note(self, text: str) -> None:
        """Prints a line for the user."""
        self._sinks.progress.note(text)

    def write_late(self, step: int, metrics: dict[str, float]) -> None:
        """Adds the metrics of an evaluation to a step that is written already, or is step 0."""
        if metrics:
            self.signal.evaluated(metrics)
            self._sinks.metrics.amend(step, metrics)
            self._sinks.progress.step(step, metrics)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of a step to every sink."""
        self.idle.add(metrics)
        buffer = self._pipes.buffer
        metrics["memory/generator_peak"] = max(receipt.peak_memory for receipt in self._receipts())
        metrics["buffer/dropped_stale"] = float(buffer.dropped_stale)
        metrics["buffer/groups"] = float(len(buffer))
        metrics["rollout/restarts"] = float(sum(p.worker.restarts for p in self._producers))
        metrics["rollout/begun_anew"] = float(self._pipes.losses.total())
        if self._pipes.curriculum is not None:
            metrics["rollout/weighted_epoch"] = float(self._pipes.curriculum.newest)
        if self._sinks.plan is not None:
            self._sinks.plan.measure(metrics)
        self._sinks.metrics.log(step, metrics)
        self._sinks.progress.step(step, metrics)
        for sentence in (*self.signal.add(metrics), *self.watch.add(step, metrics)):
            self.note(f"step {step}: {sentence}")
        for printed in filter(None, (self.printed.first(), self.printed.bound())):
            self.note(printed)


# The checkpoints of one run. learner.driver.checkpoint commits and publishes them.
#
# A checkpoint is one folder: the learner's part (weights, optimizer, random state), the place in the problem stream,
# the evaluations so far, and what the run was made from (configuration and fingerprints of its inputs).

SEEN = ".seen-"


class RunCheckpoints:
    """Saves and restores the learner, the place in the problem stream, and the evaluations. Waits for the learner, for
    as long as a step may take.

    total_steps: number of steps that the run is planned for. saved: step of the newest checkpoint, None before one.
    """

    def __init__(
        self,
        config: RunConfig,
        total_steps: int,
        fingerprints: Fingerprints,
        trainer: Actor[TrainerService],
        pipes: Pipes,
        sinks: Sinks,
    ) -> None:
        self._config, self._total_steps, self._fingerprints = config, total_steps, fingerprints
        self._trainer, self._pipes, self._sinks = trainer, pipes, sinks
        self.deadline_s = config.cluster.deadlines.step
        self.saved: int | None = None

    async def check_shared(self) -> None:
        """Raises WrongInput if the learner does not see the run folder, before a checkpoint would show it."""
        for left in self._sinks.folder.glob(f"{SEEN}*"):  # files that a killed start has left
            left.unlink()
        mark = self._sinks.folder / f"{SEEN}{uuid.uuid4().hex[:8]}"
        with writing(mark):
            mark.touch()
        try:
            seen = await self._trainer.call(TrainerService.sees, self._config.cluster.deadlines.push, mark)
        finally:
            mark.unlink()
        if not seen:
            raise WrongInput(
                "output_dir: must be a folder that the learner's node and the driver's share, and the learner does not "
                f"see what the driver writes in {self._sinks.folder}; put output_dir on a shared file system, or both "
                "on one node"
            )

    async def save(self, step: int, evaluations: Sequence[Evaluation], spared: int | None = None) -> None:
        """Commits a checkpoint, then publishes its adapter or model. If the run is killed between the two, the next
        start publishes it.

        spared: a step whose checkpoint is kept, however many newer ones there are.
        """
        with self._sinks.timeline.span("checkpoint", "loop", step=step):
            await self._commit(step, evaluations, spared)
            self.saved = step
            folder = self._root / checkpoint.name_of(step)
            whole = self._config.learner.mode == "full"
            await checkpoint.to_its_end(partial(publish, folder, self._sinks.folder, whole_model=whole))
        self._sinks.progress.note(f"checkpoint of step {step}")

    async def _commit(self, step: int, evaluations: Sequence[Evaluation], spared: int | None) -> None:
        written: dict[str, Digest] = {}
        await checkpoint.to_its_end(ledger.settle, self._sinks.folder / "rollouts", self.saved or 0)
        async with checkpoint.commit(self._root, step, self._config.checkpoint.keep, written, spared) as folder:
            theirs = await self._trainer.call(TrainerService.save, self.deadline_s, folder / TRAINER)
            written |= {f"{TRAINER}/{name}": digest for name, digest in theirs.items()}
            state = {
                "step": step,
                "total_steps": self._total_steps,
                "problems": len(self._pipes.problems),
                "cursor": self._pipes.cursor.state(),
                "dropped_stale": self._pipes.buffer.dropped_stale,
                "evaluations": [e.to_dict() for e in evaluations],
            }
            if self._pipes.curriculum is not None:
                self._pipes.curriculum.save(folder, self._pipes.cursor.low)
            with writing(folder):
                (folder / checkpoint.STATE).write_text(json.dumps(state))
                (folder / "config.json").write_text(self._config.model_dump_json())
                (folder / FILE).write_text(self._fingerprints.to_json())

    async def load(self, folder: Path) -> tuple[int, list[Evaluation]]:
        """Restores the learner and the place in the problem stream; returns the step and the evaluations up to it. A
        checkpoint of step 0, which is saved when only batches without a reward were taken, gives no evaluations, so
        that step 0 is evaluated again."""
        state = checkpoint.read_state(folder)
        await self._trainer.call(TrainerService.load, self.deadline_s, folder / TRAINER)
        self._pipes.cursor.restore(state.cursor.low, state.cursor.done)
        if self._pipes.curriculum is not None:
            own = folder.parent.resolve() == self._root.resolve()
            self._pipes.curriculum.restore(folder, state.cursor.low, own=own)
        self._pipes.buffer.dropped_stale = state.dropped_stale
        self.saved = checkpoint.step_of(folder) if state.step is None else state.step
        self._pipes.buffer.resume(self.saved)
        self._sinks.progress.note(f"resumed at step {self.saved} from {folder}")
        return self.saved, [Evaluation(**dict(e)) for e in state.evaluations if self.saved > 0]

    @property
    def _root(self) -> Path:
        return self._sinks.folder / "checkpoints"
