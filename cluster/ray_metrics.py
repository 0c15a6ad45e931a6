"""Numbers that Ray's agent of this node shows to Prometheus, and where it does."""

from collections.abc import Mapping
from typing import Any

from cluster.placement import PlacementError


def metrics_address() -> str:
    """host:port at which the agent of this process's node answers to GET /metrics. Raises PlacementError where this
    process is not in a Ray cluster, or in one that shows no metrics."""
    import ray

    if not ray.is_initialized():
        raise PlacementError("trackers: prometheus shows metrics by way of Ray, and this process has joined no cluster")
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)
    if node["MetricsExportPort"] <= 0:
        raise PlacementError(
            f"trackers: prometheus needs Ray's metrics, and the cluster's node {node['NodeManagerAddress']} was "
            "started with enable_metrics_collection false; start Ray without that setting, or leave prometheus out"
        )
    return f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"


class RayMetrics:
    """Gauges and counters of this process by name; Ray puts `ray_` before a name, and `_total` behind a counter's.

    A gauge that was not set for two of Ray's reports (20 s) is shown no more, so one that is to stay is set again.
    """

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def set(self, name: str, labels: Mapping[str, str], value: float, description: str) -> None:
        """Of a gauge. labels: a name has always the same keys."""
        from ray.util.metrics import Gauge

        if name not in self._known:
            self._known[name] = Gauge(name, description, tuple(labels))
        self._known[name].set(value, dict(labels))

    def add(self, name: str, labels: Mapping[str, str], value: float, description: str) -> None:
        """To a counter; nothing where the value is 0."""
        from ray.util.metrics import Counter

        if name not in self._known:
            self._known[name] = Counter(name, description, tuple(labels))
        if value > 0:
            self._known[name].inc(value, dict(labels))
