"""What a run leaves on the disk: metrics and mismatch of each step, the digest of its policy, and its checkpoints."""

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
from learner.driver.metrics import SignalWatch
from learner.trainer.service import Arithmetic, TrainerService
from rewards.base import JUDGE
from rewards.config import functions_of
from rollout import ledger
from rollout.delivery import Answer, Receipt
from rollout.producer import Pipes, Producer
from rollout.types import PolicyId

# mismatch/ of a run: of each step, by how much the learner's logprob of each token differs from the sampler's.
#
# A file beside that of the step's rollouts, since the learner alone knows it, and only after the step. Facts of
# rollouts go to disk before. float16: a difference of 1e-6 nats is still known to 3 %.


MISMATCH_FOLDER = "mismatch"
MISMATCH_SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("mismatch", pa.list_(pa.float16())),  # [T] nats, nan of an observation; null: not trained on
    ]
)


def write_mismatch(run_dir: Path, step: int, groups: Sequence[pa.Table], mismatch: pa.Array) -> Path:
    """The file of a step. groups: those that the learner was given. mismatch: a list for each row of theirs
    (learner.trainer.service.TrainerService.mismatch)."""
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
    """group_id -> of each of its rows the [T] differences in nats. Raises OSError or ValueError (pa.ArrowException)."""
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


# What the measured idle times of a run say about its settings.

WORTH_SAYING = 0.15  # share of the time: idle for less, or a bound on the gain below 1 + that, is not worth a line
REWARDS_SHARE = 0.3  # of the time, from which on the wait for a reward is named


@dataclass(slots=True)
class IdleTimes:
    """Seconds over the steps of a run: in all, and of them those in which a generator (the mean) or the learner had
    nothing to do. reward: from asking for a completion's reward to having it, the mean of each step."""

    total: float = 0.0
    generator: float = 0.0
    learner: float = 0.0
    reward: float = 0.0

    def add(self, metrics: dict[str, float]) -> None:
        """One more step; one with an evaluation or a checkpoint in it says nothing of the two sides."""
        if metrics["time/evaluate"] > 0 or metrics["time/checkpoint"] > 0:
            return
        self.total += metrics["time/step"]
        self.generator += metrics["time/generator_idle"]
        self.learner += metrics["time/learner_idle"]
        self.reward += metrics["reward/ms"] / 1e3


def advice(idle: IdleTimes, config: RunConfig) -> str | None:
    """One sentence for the end of a run, or None where nothing measured speaks for a change.

    Sides that overlap wholly take as long as the longer one, so the bound on the gain in samples per second is
    total / max(generator busy, learner busy). It holds for sides with hardware of their own: on shared cores, or on
    slices of one card, each is slower beside the other.
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
    """What may shorten the wait for rewards."""
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


# What each step of a run leaves behind: its rollouts and the digest of its policy, so that it can be taken again, and
# the mismatch of its tokens for people.

POLICIES = "policies.jsonl"
LONGEST = MIB  # bytes of a line


class PolicyLine(NamedTuple):
    """One line of policies.jsonl: a policy version.

    step: after which it came; 0: what the run began with. sha256: of the bytes that were sent to the generators.
    total_steps: for which the learning-rate schedule was made. arithmetic: of the learner that made it.
    """

    step: int
    sha256: str
    total_steps: int
    arithmetic: Arithmetic


class StepRecord:
    """Waits for: the learner.

    folder: of the run. total_steps: of the learning-rate schedule. deadline_s: for the learner's answer.
    """

    def __init__(self, folder: Path, total_steps: int, trainer: Actor[TrainerService], deadline_s: float) -> None:
        self._folder, self._total_steps = folder, total_steps
        self._rollouts, self._policies = folder / "rollouts", folder / POLICIES
        self._trainer, self._deadline_s = trainer, deadline_s
        self._arithmetic: Arithmetic | None = None
        self._known = -1  # newest version that has its line

    async def begin(self, step: int) -> None:
        """The run goes on from that step: what is left of later ones is deleted, since those will be taken again."""
        ledger.forget_after(self._rollouts, step)
        forget_mismatch_after(self._folder, step)
        kept = [line for line in read_policies(self._policies.parent) if line.step <= step and step > 0]
        partial = self._policies.with_suffix(".partial")
        with writing(partial):
            partial.write_text("".join(map(_written, kept)))
            os.replace(partial, self._policies)
        self._known = max((line.step for line in kept), default=-1)
        self._arithmetic = await self._trainer.call(TrainerService.arithmetic, self._deadline_s)

    def rollouts(self, step: int, groups: Sequence[pa.Table]) -> None:
        """Those that the step consumes."""
        ledger.write(self._rollouts, step, groups)

    async def mismatch(self) -> pa.Array:
        """That of the newest step's tokens, from the learner."""
        return await self._trainer.call(TrainerService.mismatch, self._deadline_s)

    def keep_mismatch(self, step: int, groups: Sequence[pa.Table], mismatch: pa.Array) -> None:
        """groups: those that the step trained on."""
        write_mismatch(self._folder, step, groups, mismatch)

    def policy(self, sent: PolicyId) -> None:
        """The policy after a step; one that a resumed run began with has its line already."""
        assert self._arithmetic is not None, "begin() comes first"
        if sent.version <= self._known:
            return
        line = PolicyLine(sent.version, sent.digest, self._total_steps, self._arithmetic)
        with writing(self._policies), self._policies.open("a") as file:
            file.write(_written(line))
        self._known = sent.version


def read_policies(run_dir: Path) -> list[PolicyLine]:
    """Of a run's folder, oldest first; none where a version of gleaner wrote it that kept none. A line that a kill cut
    short is left out. Raises WrongInput."""
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


# What a run says of itself after each step: where the seconds went, memory, metrics, progress.

KINDS = ("generate", "train", "push", "wait", "evaluate", "checkpoint")


@dataclass(slots=True)
class Sinks:
    """Where a run leaves its traces."""

    folder: Path
    metrics: Metrics
    timeline: Timeline
    progress: Progress
    phases: Phases
    plan: PlanFile | None = None


@contextmanager
def closed(sinks: Sinks) -> Iterator[None]:
    """Behind this block they are. What ended it matters more than that last lines cannot be written either."""
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
    """Turns spans and counters into the metrics of a step, and hands them to every sink."""

    def __init__(self, sinks: Sinks, producers: Sequence[Producer], pipes: Pipes, signal: SignalWatch) -> None:
        self._sinks, self._producers, self._pipes = sinks, producers, pipes
        self.idle, self.signal, self.printed = IdleTimes(), signal, RewardOutput(sinks.folder)
        self._accounted = time.perf_counter()  # up to which the seconds of the run are accounted for
        self._held: dict[str, float] | None = None  # of the newest step, not written yet

    def start(self) -> None:
        """The seconds of steps are counted from here."""
        self._sinks.phases.split(self._sinks.timeline, "processes")
        self._accounted = time.perf_counter()

    def times(self, tokens: float) -> dict[str, float]:
        """Where the seconds since the step before went.

        time/overlap: generators and learner busy at once. time/generator_idle: mean over the generators of the seconds
        in which one had no request. time/learner_idle: neither training nor making the next policy. time/push_load,
        time/push_probe: of the newest policy that has come so far, as the slowest generator timed itself.
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
        """The receipt of the newest policy that each generator took, at worst of the step before; a late one has
        none."""
        return [producer.feed.receipt for producer in self._producers if producer.feed.receipt is not None]

    def _answers(self) -> list[Answer]:
        return [producer.feed.answer for producer in self._producers if producer.feed.answer is not None]

    def hold(self, metrics: dict[str, float]) -> None:
        """Those of the newest step, in the place of those held before."""
        self._held = metrics

    def completions(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """A few completions to held-out problems, for the trackers."""
        self._sinks.metrics.completions(step, samples)

    def add(self, metrics: dict[str, float]) -> None:
        """More of the newest step."""
        self._held = (self._held or {}) | metrics

    def flush(self, step: int) -> dict[str, float]:
        """Writes what is held, once, and returns it."""
        held, self._held = self._held, None
        if held is None:
            return {}
        if "time/step" not in held:  # the run ends before the step was whole
            held |= self.times(held["rollout/tokens"])
        self.write(step, held)
        return held

    def check_folder(self, step: int) -> None:
        """Raises FileNotFoundError if the run folder was deleted or replaced since the run began."""
        self._sinks.metrics.check_folder(step)

    def note(self, text: str) -> None:
        """A line for the user."""
        self._sinks.progress.note(text)

    def write_late(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation before the first step of this process: of step 0, or one that failed and ended the run."""
        if metrics:
            self._sinks.metrics.amend(step, metrics)
            self._sinks.progress.step(step, metrics)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One step, to every sink."""
        self.idle.add(metrics)
        buffer = self._pipes.buffer
        metrics["memory/generator_peak"] = max(receipt.peak_memory for receipt in self._receipts())
        metrics["buffer/dropped_stale"] = float(buffer.dropped_stale)
        metrics["buffer/groups"] = float(len(buffer))
        metrics["rollout/restarts"] = float(sum(p.worker.restarts for p in self._producers))
        metrics["rollout/begun_anew"] = float(self._pipes.losses.total())
        if self._sinks.plan is not None:
            self._sinks.plan.measure(metrics)
        self._sinks.metrics.log(step, metrics)
        self._sinks.progress.step(step, metrics)
        for sentence in self.signal.add(metrics):
            self.note(f"step {step}: {sentence}")
        for printed in filter(None, (self.printed.first(), self.printed.bound())):
            self.note(printed)


# The checkpoints of one run: what is in them, when they are committed, and what is published from them.
#
# A checkpoint is one folder: the learner's part (weights, optimizer, random state), the place in the problem stream,
# the evaluations so far, and what the run was made from (configuration and fingerprints of its inputs).

SEEN = ".seen-"


class RunCheckpoints:
    """Saves and restores the learner and the pipes. Waits for the learner, by its deadline for a step.

    total_steps: that the run is planned for.
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
        self.saved: int | None = None  # step of the newest checkpoint

    async def check_shared(self) -> None:
        """Raises WrongInput if the learner's process does not see the run folder: better now than at the first
        checkpoint."""
        for left in self._sinks.folder.glob(f"{SEEN}*"):  # by a start that was killed
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
        """Commits a checkpoint, then publishes its adapter or model; killed between the two, the next start does.

        spared: a step whose checkpoint stays, however many are newer.
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
            with writing(folder):
                (folder / checkpoint.STATE).write_text(json.dumps(state))
                (folder / "config.json").write_text(self._config.model_dump_json())
                (folder / FILE).write_text(self._fingerprints.to_json())

    async def load(self, folder: Path) -> tuple[int, list[Evaluation]]:
        """Restores learner and pipes; returns the step and the evaluations up to it. Before the first step (nothing
        but batches without a reward came before) there are none: as from the start, that step is evaluated anew."""
        state = checkpoint.read_state(folder)
        await self._trainer.call(TrainerService.load, self.deadline_s, folder / TRAINER)
        self._pipes.cursor.restore(state.cursor.low, state.cursor.done)
        self._pipes.buffer.dropped_stale = state.dropped_stale
        self.saved = checkpoint.step_of(folder) if state.step is None else state.step
        self._pipes.buffer.resume(self.saved)
        self._sinks.progress.note(f"resumed at step {self.saved} from {folder}")
        return self.saved, [Evaluation(**dict(e)) for e in state.evaluations if self.saved > 0]

    @property
    def _root(self) -> Path:
        return self._sinks.folder / "checkpoints"
