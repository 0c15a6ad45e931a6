"""Where metrics go beside metrics.jsonl. A tracker is one class here and one row of TRACKERS."""

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

# The configuration of a run as one level: what trackers, reports and cards show of it.


def dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with dots between their parts -> values, in the order of the tree. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = dotted(value) if isinstance(value, Mapping) else {}
        flat |= {f"{key}.{name}": part for name, part in inner.items()} or {key: value}
    return flat


# What a tracker is.

Sample = Mapping[str, Any]  # of an evaluation: prompt, completion, reward
ID = "tracker_id"  # of the run folder
LONGEST = 1000  # bytes of it


class TrackedRun(NamedTuple):
    """A run as a tracker knows it.

    id: a run that goes on from a checkpoint keeps it; one that begins anew, in the same folder or in one of the same
    path elsewhere, has another. finished: steps before this start; later ones may have been told already, if the run
    goes back to a checkpoint.
    """

    folder: Path
    id: str
    finished: int


def tracked(folder: Path, finished: int) -> TrackedRun:
    """The run of this folder, with the id that lies there, or a new one; one that began before there were such goes on
    by the digest of its path."""
    file = folder / ID
    kept = known_id(folder) if finished > 0 else ""
    if not kept:
        begun = finished > 0 and not file.exists()
        kept = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16] if begun else secrets.token_hex(8)
        with writing(file):
            file.write_text(kept + "\n")
    return TrackedRun(folder, kept, finished)


def known_id(folder: Path) -> str:
    """The id that lies in a run's folder, or ''. Raises WrongInput."""
    try:
        kept = read_text(folder / ID, LONGEST).strip()
    except FileNotFoundError:
        return ""
    if not re.fullmatch(r"[\w.-]*", kept):
        raise WrongInput(f"{folder / ID} must hold the run's id, of letters, digits, dots and dashes; take it away")
    return kept


class Tracker(Protocol):
    """One place that shows metrics. All of its methods run in a thread of its own, and what they raise ends it, not
    the run. A class may name what has to be installed for it: PACKAGE."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of one step by name; finite ones only."""
        ...

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """A few completions to held-out problems, for those who have a place for text."""
        ...

    def close(self) -> None:
        """Writes what is still held back, and lets go."""
        ...


def run_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of the run, with dots between the parts of a key."""
    return dotted(read_yaml(run_dir / "config.yaml"))


# A tracker in a thread of its own: one that is slow, down, or wants a login costs the run one line, and no time.

CLOSE_S = 60.0  # for what a tracker still has to send

log = logging.getLogger(__name__)


class Background:
    """Takes what a tracker is to be told, and returns at once. name: as in the configuration."""

    def __init__(self, name: str, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        self._name = name
        self._inbox: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        # Daemon: a tracker that never returns does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(make, run), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._inbox.put(lambda tracker: tracker.log(step, values))

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        self._inbox.put(lambda tracker: tracker.completions(step, samples))

    def close(self) -> None:
        """Waits for what is still to be sent, for a minute at most."""
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
        except Exception as error:  # whatever a library of others raises, the run is not about it
            text = " ".join(str(error).split())[:300]
            log.warning(
                "trackers: %s failed (%s: %s); the run goes on without it, metrics.jsonl has all metrics",
                self._name, type(error).__name__, text,
            )  # fmt: skip


# MLflow.

FOLDER_TAG, RUN_TAG = "gleaner.run_dir", "gleaner.run_id"  # tags; by the second a resumed run finds its own
MOST_PARAMS = 100  # that one request takes
REFUSED, LONGEST_NAME = re.compile(r"[^\w\-. :/]"), 250  # in the name of a metric


class MLflow:
    """A run of the experiment of MLFLOW_EXPERIMENT_NAME, or gleaner, on the server of MLFLOW_TRACKING_URI; without one
    in `mlflow.db` of the run folder. A resumed run goes on in it."""

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
    """The name of a metric as MLflow takes it: as a path without detours."""
    parts = REFUSED.sub("_", name).split("/")
    return "/".join(part for part in parts if part.strip("."))[:LONGEST_NAME].rstrip("/")


# TensorBoard.


class TensorBoard:
    """Event files in `tensorboard/` of the run folder. The first of a start says that what earlier ones have of the
    steps to come no longer holds."""

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
        """This writer has scalars only."""

    def close(self) -> None:
        self._writer.close()


# trackio.


class Trackio:
    """A run of the project of TRACKIO_PROJECT, or gleaner, in trackio's own folder (TRACKIO_DIR); `trackio show` shows
    it. Its name is that of the run folder with a part of the id: trackio finds a resumed run by its name."""

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
    """A run of the project of WANDB_PROJECT, or gleaner, named as the run folder; a resumed run goes on in it.

    Curves are over `step`, a metric of its own: of a step of W&B's own that it has had already it takes no more.

    WANDB_MODE=offline writes to `wandb/` of the run folder, for `wandb sync` later.
    """

    PACKAGE = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        offline = os.environ.get("WANDB_MODE", "online") in ("offline", "disabled")
        if not offline and not wandb.login(prompt=False):  # or else it would ask on the terminal
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
        """One table, which grows: W&B shows the newest of a name."""
        self._rows += [(step, str(s["prompt"]), s["completion"], s["reward"]) for s in samples]
        table = self._wandb.Table(columns=list(COLUMNS), data=self._rows)
        self._run.log({"completions": table, "step": step})

    def close(self) -> None:
        self._run.finish()


# Prometheus, through the agents of Ray.

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


# Where metrics go beside metrics.jsonl. A tracker is one class in a file here and one row of TRACKERS.

__all__ = ["PROMETHEUS", "TRACKERS", "Background", "Sample", "TrackedRun", "Tracker", "known_tracker", "tracked"]

PROMETHEUS = "prometheus"  # for which Ray has to show its metrics

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
    PROMETHEUS: Prometheus,
}


def known_tracker(name: str) -> str:
    """The name itself if it is one of TRACKERS and its package is installed. Raises ValueError."""
    if name not in TRACKERS:
        raise ValueError(f"must be one of {', '.join(TRACKERS)}, got {name!r}; leave it out")
    package = getattr(TRACKERS[name], "PACKAGE", None)
    if package is not None and find_spec(package) is None:
        raise ValueError(
            f"{name} needs the package {package}, which is not installed; run: pip install 'gleaner-rl[{name}]'"
        )
    return name
