"""What a run says of itself after each step: where the seconds went, memory, metrics, progress."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.telemetry import Metrics, Timeline, overlap, seconds
from learner.driver.console import Progress
from learner.driver.idle_advice import IdleTimes
from learner.driver.phases import Phases
from learner.driver.plan_file import PlanFile
from learner.driver.reward_output import RewardOutput
from learner.driver.signal_watch import SignalWatch
from rollout.producer import Pipes, Producer
from rollout.weight_sync import Answer, Receipt

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
