"""What keeps a private Ray cluster private: a token, the loopback interface, and no page of metrics unless asked for;
and small: no autoscaler.

Ray reads all but the last from the environment, once, as it is imported here and in each process that it starts.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("cluster")

_ENV = {
    "RAY_AUTH_MODE": "token",
    # What Ray does on a desktop system, where nobody may be asked by a firewall: its node is 127.0.0.1, and every
    # port of every process listens there only. (`_node_ip_address="127.0.0.1"` is turned back into the outer address.)
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # The dashboard's Prometheus page answers without a token and has no switch; at no port none starts.
    "DASHBOARD_METRIC_PORT": "-1",
}


def close_doors() -> None:
    """Sets this process's environment for a private cluster; before anything imports ray."""
    os.environ.update(_ENV)
    # The token is in this process's environment alone, not in the home folder. Ray keeps the first one that it sees.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def system_config(shows_metrics: bool) -> dict[str, Any]:
    """Settings of Ray's own processes. shows_metrics: a tracker wants the page of the node's agent, which answers
    without a token; on 127.0.0.1, as all else."""
    return {
        "enable_metrics_collection": shows_metrics,
        # A process for each core, started at once for tasks; every role has a process of its own.
        "enable_worker_prestart": False,
        "prestart_worker_first_driver": False,
    }


@contextmanager
def without_autoscaler() -> Iterator[None]:
    """Ray starts no monitor, the process that asks a cloud for more nodes, which one machine has not: it takes half a
    second of a core at the start, and Ray's end waits for it for a second. ray.init has no argument for that."""
    from ray._private.node import Node

    ordinary = Node.start_monitor
    Node.start_monitor = lambda node: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Node.start_monitor = ordinary  # type: ignore[method-assign]


def check_doors(ray: Any) -> None:
    """Warns if close_doors came too late: ray had been imported before it, so its ports are open to the network."""
    address = ray.util.get_node_ip_address()
    if address not in ("127.0.0.1", "::1"):
        log.warning(
            "the private Ray cluster listens on %s and not on 127.0.0.1 only (a token is asked for): ray had been "
            "imported before this run; start it in a fresh process, or import gleaner first",
            address,
        )
