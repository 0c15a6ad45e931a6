"""Trackers, which show metrics in addition to metrics.jsonl: MLflow, TensorBoard, trackio, Weights & Biases,
Prometheus. Each tracker is a class of this module and a row of TRACKERS; Background runs it in a thread for
cluster.telemetry.
"""

import hashlib
import json
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cluster.errors import WrongInput
from cluster.files import writing
from cluster.ray_cluster import RayMetrics, metrics_address
from cluster.reading import read_mapping, read_text, read_yaml


def dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens nested mappings, such as a run's configuration, into one with dotted keys, in the order of the tree. An
    empty mapping is kept as a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = dotted(value) if isinstance(value, Mapping) else {}
        flat |= {f"{key}.{name}": part for name, part in inner.items()} or {key: value}
    return flat


Sample = Mapping[str, Any]  # prompt, completion and reward of a held-out problem
ID = "tracker_id"  # name of the file with the id, in the run folder
LONGEST = 1000  # bytes of that file, at most


class TrackedRun(NamedTuple):
    """A run as a tracker sees it.

    folder: the run folder. id: kept by a run that resumes from a checkpoint; a run that begins anew gets another id,
    even in the same folder. finished: steps before this start. The tracker may have later steps already, if the run
    goes back to a checkpoint.
    """

    folder: Path
    id: str
    finished: int


def tracked(folder: Path, finished: int) -> TrackedRun:
    """The run of this folder, with its id from the folder, or a new id for a new run. A resumed run without a file of
    an id was begun by a version of gleaner that wrote none, and keeps the digest of its path as its id."""
    file = folder / ID
    kept = known_id(folder) if finished > 0 else ""
    if not kept:
        begun = finished > 0 and not file.exists()
        kept = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16] if begun else secrets.token_hex(8)
        with writing(file):
            file.write_text(kept + "\n")
    return TrackedRun(folder, kept, finished)


def known_id(folder: Path) -> str:
    """The id in a run's folder, '' if there is none. Raises WrongInput."""
    try:
        kept = read_text(folder / ID, LONGEST).strip()
    except FileNotFoundError:
        return ""
    if not re.fullmatch(r"[\w.-]*", kept):
        raise WrongInput(f"{folder / ID} must hold the run's id, of letters, digits, dots and dashes; take it away")
    return kept


class Tracker(Protocol):
    """Shows the metrics of a run in one place. All of its methods run in one thread of Background; an exception ends
    the tracker and not the run. A class can have PACKAGE, the name of the package that must be installed for it."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the metrics of one step by name; all are finite."""
        ...

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """Takes a few completions of held-out problems; a tracker without a place for text ignores them."""
        ...

    def close(self) -> None:
        """Writes what was not written yet, and frees files and connections."""
        ...


def run_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of the run, with dotted keys."""
    return dotted(read_yaml(run_dir / "config.yaml"))


CLOSE_S = 60.0  # a tracker may take this long to send the rest after the last step

log = logging.getLogger(__name__)


class Background:
    """Runs a tracker in a thread of its own, so that its methods return at once here. A tracker that is slow, down or
    not logged in costs the run a warning and no time. name: that of the tracker in the configuration."""

    def __init__(self, name: str, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        self._name = name
        self._inbox: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        # A daemon thread, so that a tracker that never returns does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(make, run), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._inbox.put(lambda tracker: tracker.log(step, values))

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        self._inbox.put(lambda tracker: tracker.completions(step, samples))

    def close(self) -> None:
        """Waits until the tracker has sent everything, for CLOSE_S seconds at most."""
        self._inbox.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning(
                "trackers: %s has not taken all metrics %.0f s after the last step and is left behind; "
                "metrics.jsonl has them all", self._name, CLOSE_S,
            )  # fmt: skip

    def _run(self, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        try:
            tracker = make(run)
            while (told := self._inbox.get()) is not None:
                told(tracker)
            tracker.close()
        except Exception as error:  # an error in a tracker's library must not end the run
            text = " ".join(str(error).split())[:300]
            log.warning(
                "trackers: %s failed (%s: %s); the run goes on without it, metrics.jsonl has all metrics",
                self._name, type(error).__name__, text,
            )  # fmt: skip


# MLflow.

FOLDER_TAG, RUN_TAG = "gleaner.run_dir", "gleaner.run_id"  # tags; a resumed run is found by the second
MOST_PARAMS = 100  # parameters that one request may have
REFUSED, LONGEST_NAME = re.compile(r"[^\w\-. :/]"), 250  # characters that a metric's name may not have; its length


class MLflow:
    """Logs to a run of the experiment MLFLOW_EXPERIMENT_NAME (default: gleaner) on the server MLFLOW_TRACKING_URI
    (default: `mlflow.db` in the run folder). A resumed run continues its MLflow run."""

    PACKAGE = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        address = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.folder.resolve()}/mlflow.db")
        name, folder = os.environ.get("MLFLOW_EXPERIMENT_NAME", "gleaner"), str(run.folder.resolve())
        self._metric: Any = Metric
        self._client = MlflowClient(tracking_uri=address)
        found = self._client.get_experiment_by_name(name)
        place = f"file://{folder}/mlflow" if address.startswith("sqlite") else None
        experiment = found.experiment_id if found else self._client.create_experiment(name, artifact_location=place)
        before = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        if before:
            self._run_id = before[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {FOLDER_TAG: folder, RUN_TAG: run.id}
        self._run_id = self._client.create_run(experiment, run_name=run.folder.name, tags=tags).info.run_id
        params = [Param(key, str(value)) for key, value in run_config(run.folder).items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        told = {_taken(name): value for name, value in values.items()}
        self._client.log_batch(self._run_id, [self._metric(name, value, now, step) for name, value in told.items()])

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        self._client.log_dict(self._run_id, {"samples": [dict(s) for s in samples]}, f"completions/step-{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _taken(name: str) -> str:
    """The name under which MLflow accepts a metric: a path without parts of dots only, such as `..`."""
    parts = REFUSED.sub("_", name).split("/")
    return "/".join(part for part in parts if part.strip("."))[:LONGEST_NAME].rstrip("/")


# TensorBoard.


class TensorBoard:
    """Writes event files to `tensorboard/` in the run folder. Each start of the run first writes an event by which
    TensorBoard discards the steps after the checkpoint in earlier files."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary import Writer  # torch's own writer would load torch into this process
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = str(run.folder / "tensorboard")
        begin = run.finished + 1 if run.finished > 0 else 0
        start = EventFileWriter(folder)
        start.add_event(Event(step=begin, session_log=SessionLog(status=SessionLog.START)))
        start.close()
        self._writer = Writer(folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """Ignores them: this writer has scalars only."""

    def close(self) -> None:
        self._writer.close()


# trackio.


class Trackio:
    """Logs to a run of the project TRACKIO_PROJECT (default: gleaner) in trackio's own folder (TRACKIO_DIR), for
    `trackio show`. The run's name is that of the run folder with a part of the id, since trackio finds a resumed run by
    name."""

    PACKAGE = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "gleaner"),
            name=f"{run.folder.name}-{run.id[:6]}",
            config=run_config(run.folder),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        from pandas import DataFrame

        rows = [{**sample, "prompt": str(sample["prompt"])} for sample in samples]
        self._run.log({"completions": self._trackio.Table(dataframe=DataFrame(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()


# Weights & Biases.

INIT_S = 60.0
COLUMNS = ("step", "prompt", "completion", "reward")


class WandB:
    """Logs to a run of the project WANDB_PROJECT (default: gleaner) with the name of the run folder. A resumed run
    continues its W&B run.

    Curves are drawn over the metric `step`, since W&B accepts no more values for an earlier one of its own steps.

    WANDB_MODE=offline writes to `wandb/` in the run folder, for a later `wandb sync`.
    """

    PACKAGE = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        offline = os.environ.get("WANDB_MODE", "online") in ("offline", "disabled")
        if not offline and not wandb.login(prompt=False):  # wandb would ask for a key on the terminal
            raise RuntimeError("it wants a login: run `wandb login`, or set WANDB_MODE=offline")
        self._wandb: Any = wandb
        self._rows: list[tuple[Any, ...]] = []
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gleaner"),
            name=run.folder.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config=run_config(run.folder),
            settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_S),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs one table with all samples so far, since W&B shows only the newest table of a name."""
        self._rows += [(step, str(s["prompt"]), s["completion"], s["reward"]) for s in samples]
        table = self._wandb.Table(columns=list(COLUMNS), data=self._rows)
        self._run.log({"completions": table, "step": step})

    def close(self) -> None:
        self._run.finish()


# Prometheus, through Ray's agents.

TARGETS = "prometheus.json"  # a file in the run folder, for Prometheus' file_sd_configs
AGAIN_S = 1.0  # the gauges are set again after this, since Ray drops a gauge after two of its reports, 20 s
STAY = "eval/"  # metrics of an evaluation are shown until the next evaluation, all others until the next step
ROLES = ("learner", "generator")

# Metrics of which a part of the name becomes a label: (pattern, name of the gauge, label). The first match counts.
FAMILIES = (
    (r"reward/status_(.+)", "reward_status", "reason"),
    (r"reward/(?!(?:mean|std|failed|ms|zero_variance_groups|zeroed)$)(.+)", "reward", "function"),
    *((rf"watch/{kind}_(.+)", f"watch_{kind}", "function") for kind in ("gap", "correlation", "failed")),
    (r"log/(.+)", "log", "name"),
    (r"eval/log_(.+)", "eval_log", "name"),
    (r"eval/(?!(?:accuracy|turns|calls|errors|unscored|failed)$)(.+)", "eval", "function"),
    (r"policy/staleness_(\d+)", "policy_staleness", "versions"),
    (r"env/outcome_(.+)", "env_outcome", "outcome"),
    (r"env/(?!(?:turns|turns_max|calls|malformed|seconds|observation_tokens|errors)$)(.+)", "env", "name"),
)
NO_FAILURE = "none"  # the status of a completion that no reward function scores, which is no failure


class Shown(NamedTuple):
    """A gauge's name, without Ray's prefix `ray_`, and its labels."""

    name: str
    labels: dict[str, str]


def shown(told: str) -> Shown:
    """The gauge for a metric of metrics.jsonl: `reward/mean` becomes gleaner_reward_mean, and the mean of one reward
    function becomes gleaner_reward with the label `function`."""
    for pattern, name, label in FAMILIES:
        if found := re.fullmatch(pattern, told):
            return Shown(f"gleaner_{name}", {label: found[1]})
    return Shown("gleaner_" + re.sub(r"\W", "_", told), {})


class Prometheus:
    """Exports gauges of the newest step, and counters, through Ray's agent on the driver's node. While the run lives,
    `prometheus.json` in the run folder has the agent's address."""

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
            if "rollout/tokens" in values:  # an evaluation before the first step has none
                self._count(values)

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """Ignores them: Prometheus has numbers only."""

    def close(self) -> None:
        """Stops setting the gauges, which Ray still shows for up to 20 s."""
        self._closed.set()
        self._thread.join()
        (self._folder / TARGETS).unlink(missing_ok=True)

    def _tell(self) -> None:
        for told, value in self._values.items():
            name, labels = shown(told)
            self._metrics.set(name, self._run | labels, value, f"{told} of metrics.jsonl")

    def _count(self, values: Mapping[str, float]) -> None:
        """Adds to the counters, for `increase` and `rate` of Prometheus; it may not see the gauges of every step."""
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
        """Bytes of each role in the memory plan, to compare with `memory/learner_peak` and `memory/generator_peak`."""
        file = self._folder / "plan.json"
        plan = read_mapping(file) if file.exists() else {}
        found = {f"memory/{role}_planned": plan.get(role, {}).get("planned") for role in ROLES}
        return {name: float(value) for name, value in found.items() if value is not None}

    def _tell_again(self) -> None:
        while not self._closed.wait(AGAIN_S):
            with self._telling:
                self._tell()


# The table of trackers.

__all__ = ["PROMETHEUS", "TRACKERS", "Background", "Sample", "TrackedRun", "Tracker", "known_tracker", "tracked"]

PROMETHEUS = "prometheus"  # the tracker for which Ray must export metrics

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
    PROMETHEUS: Prometheus,
}


def known_tracker(name: str) -> str:
    """Returns the name. Raises ValueError if it is not in TRACKERS, or if its package is not installed."""
    if name not in TRACKERS:
        raise ValueError(f"must be one of {', '.join(TRACKERS)}, got {name!r}; leave it out")
    package = getattr(TRACKERS[name], "PACKAGE", None)
    if package is not None and find_spec(package) is None:
        raise ValueError(
            f"{name} needs the package {package}, which is not installed; run: pip install 'gleaner-rl[{name}]'"
        )
    return name
