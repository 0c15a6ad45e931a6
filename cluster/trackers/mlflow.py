"""MLflow."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.trackers.tracker import Sample, TrackedRun, run_config

FOLDER, ID = "gleaner.run_dir", "gleaner.run_id"  # tags; by the second a resumed run finds its own
MOST_PARAMS = 100  # that one request takes
REFUSED, LONGEST = re.compile(r"[^\w\-. :/]"), 250  # in the name of a metric


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
        before = self._client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'", max_results=1)
        if before:
            self._run_id = before[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {FOLDER: folder, ID: run.id}
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
    return "/".join(part for part in parts if part.strip("."))[:LONGEST].rstrip("/")
