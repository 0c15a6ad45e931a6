"""Prometheus, through the agents of Ray."""

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cluster.files import writing
from cluster.ray_metrics import RayMetrics, metrics_address
from cluster.reading import read_mapping
from cluster.trackers.tracker import Sample, TrackedRun

TARGETS = "prometheus.json"  # of the run folder, for Prometheus' file_sd_configs
AGAIN_S = 1.0  # after which the newest values are told again: Ray forgets a gauge after two of its reports, 20 s
STAY = "eval/"  # shown until the next evaluation; all else is of the newest step
ROLES = ("learner", "generator")

# Names in metrics.jsonl of which a part becomes a label: the gauge's name and the label. The first that fits holds.
FAMILIES = (
    (r"reward/status_(.+)", "reward_status", "reason"),
    (r"reward/(?!(?:mean|std|failed|ms|zero_variance_groups|zeroed)$)(.+)", "reward", "function"),
    (r"log/(.+)", "log", "name"),
    (r"eval/log_(.+)", "eval_log", "name"),
    (r"eval/(?!(?:accuracy|turns|calls|errors|unscored|failed)$)(.+)", "eval", "function"),
    (r"policy/staleness_(\d+)", "policy_staleness", "versions"),
    (r"env/outcome_(.+)", "env_outcome", "outcome"),
    (r"env/(?!(?:turns|turns_max|calls|malformed|seconds|observation_tokens|errors)$)(.+)", "env", "name"),
)
NO_FAILURE = "none"  # the reason of a completion that no function scores


class Shown(NamedTuple):
    """A gauge's name, without the `ray_` that Ray puts before it, and its labels."""

    name: str
    labels: dict[str, str]


def shown(told: str) -> Shown:
    """What a name in metrics.jsonl becomes: `reward/mean` is gleaner_reward_mean, and the mean of one reward function
    gleaner_reward with the label function."""
    for pattern, name, label in FAMILIES:
        if found := re.fullmatch(pattern, told):
            return Shown(f"gleaner_{name}", {label: found[1]})
    return Shown("gleaner_" + re.sub(r"\W", "_", told), {})


class Prometheus:
    """Gauges of the newest step, and counters, at the address where Ray's agent of the driver's node shows metrics;
    `prometheus.json` of the run folder says where that is, while the run lives."""

    def __init__(self, run: TrackedRun) -> None:
        self._run, self._folder = {"run": run.folder.name}, run.folder
        self._metrics, self._values = RayMetrics(), dict[str, float]()
        targets = [{"targets": [metrics_address()], "labels": {"job": "gleaner"}}]
        with writing(run.folder / TARGETS):
            (run.folder / TARGETS).write_text(json.dumps(targets) + "\n")
        self._telling, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._tell_again, name="tracker-prometheus-again", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self._telling:
            stay = {told: value for told, value in self._values.items() if told.startswith(STAY)}
            self._values = stay | dict(values) | self._planned() | {"step": float(step), "step_at": time.time()}
            self._tell()
            if "rollout/tokens" in values:  # else an evaluation before the first step that is taken here
                self._count(values)

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """Prometheus has numbers only."""

    def close(self) -> None:
        """Ray goes on to show the newest values for up to 20 s."""
        self._closed.set()
        self._thread.join()
        (self._folder / TARGETS).unlink(missing_ok=True)

    def _tell(self) -> None:
        for told, value in self._values.items():
            name, labels = shown(told)
            self._metrics.set(name, self._run | labels, value, f"{told} of metrics.jsonl")

    def _count(self, values: Mapping[str, float]) -> None:
        """What `increase` and `rate` of Prometheus want, of which one step may be missed."""
        self._metrics.add("gleaner_steps", self._run, 1, "Steps since the driver started")
        self._metrics.add(
            "gleaner_tokens", self._run, values["rollout/tokens"], "Completion tokens since the driver started"
        )
        for told, count in values.items():
            name, labels = shown(told)
            if name == "gleaner_reward_status" and labels["reason"] != NO_FAILURE:
                text = "Completions that a reward function failed on since the driver started"
                self._metrics.add("gleaner_reward_failures", self._run | labels, count, text)

    def _planned(self) -> dict[str, float]:
        """Bytes of each role in the memory plan, beside `memory/learner_peak` and `memory/generator_peak`."""
        file = self._folder / "plan.json"
        plan = read_mapping(file) if file.exists() else {}
        found = {f"memory/{role}_planned": plan.get(role, {}).get("planned") for role in ROLES}
        return {name: float(value) for name, value in found.items() if value is not None}

    def _tell_again(self) -> None:
        while not self._closed.wait(AGAIN_S):
            with self._telling:
                self._tell()
