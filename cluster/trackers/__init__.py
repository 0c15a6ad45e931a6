"""Where metrics go beside metrics.jsonl. A tracker is one class in a file here and one row of TRACKERS."""

from importlib.util import find_spec

from cluster.trackers.background import Background
from cluster.trackers.mlflow import MLflow
from cluster.trackers.prometheus import Prometheus
from cluster.trackers.tensorboard import TensorBoard
from cluster.trackers.tracker import Sample, TrackedRun, Tracker, tracked
from cluster.trackers.trackio import Trackio
from cluster.trackers.wandb import WandB

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
