"""What another user of the machine, or of the network, can reach of a private cluster: tried from outside, no token."""

import contextlib
import http.client
import json
import os
import secrets
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.flow.run import wait_until

TOKEN = secrets.token_hex(32)
CLUSTER = """
import json, sys
from cluster.errors import WrongInput
from cluster.ray_cluster import connect, metrics_address
session = connect("local", min_cpus=1)
import asyncio, ray
ray.get(ray.remote(lambda: None).remote())  # a worker process, with its port
try:
    metrics = metrics_address()
except WrongInput as error:
    metrics = str(error)
print(json.dumps({"folder": str(session._folder.path), "metrics": metrics}), flush=True)
sys.stdin.readline()
asyncio.run(session.close())
"""
PAGES = ("/", "/metrics", "/api/jobs/", "/api/v0/logs", "/nodes", "/worker/traceback", "/get_or_create_runtime_env")
HEALTH = "/api/local_raylet_healthz"  # says "success" to anybody, and no more
NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
CALLS = (
    NODES,
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[psutil.Process, Path]]:
    """The driver of a private cluster, which shows no metrics, and its runtime folder."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"RAY_AUTH_TOKEN": TOKEN}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], env=env, **pipes) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        folder = Path(told["folder"])
        assert told["metrics"].startswith("trackers: prometheus needs Ray's metrics, and the cluster's node 127.0.0.1")
        driver = psutil.Process(process.pid)
        wait_until(lambda: 200 in [_page(port, HEALTH) for port in _ports(driver)], "the last agent to listen", 60)
        yield driver, folder
        process.communicate("\n", timeout=60)
    assert process.returncode == 0
    assert not folder.exists()


def _ports(driver: psutil.Process) -> dict[int, str]:
    """TCP and UDP ports on which driver and cluster listen: port -> address."""
    sockets = []
    for process in (driver, *driver.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that only started another
            sockets += process.net_connections("inet")
    return {c.laddr.port: c.laddr.ip for c in sockets if c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)}


def test_every_port_is_on_loopback(cluster: tuple[psutil.Process, Path]) -> None:
    ports = _ports(cluster[0])
    assert len(ports) >= 6  # gcs, raylet and its objects, two agents, driver, worker
    assert set(ports.values()) <= {"127.0.0.1", "::ffff:127.0.0.1"}, ports


def test_no_autoscaler_runs(cluster: tuple[psutil.Process, Path]) -> None:
    """Its process is put out in Ray's private part, where a newer Ray may have moved it."""
    commands = [" ".join(process.cmdline()) for process in cluster[0].children(recursive=True)]
    assert any("gcs_server" in command for command in commands)
    assert not any("autoscaler" in command and "monitor.py" in command for command in commands)


def test_no_port_answers_without_the_token(cluster: tuple[psutil.Process, Path]) -> None:
    ports = _ports(cluster[0])
    answers = {f"{port}{page}" for port in ports for page in PAGES if _page(port, page) == 200}
    assert answers == set()
    assert [_page(port, HEALTH) for port in ports].count(200) == 1  # the only page there is
    told = {(port, call): _call(port, call) for port in ports for call in CALLS}
    assert grpc.StatusCode.OK not in told.values()
    assert list(told.values()).count(grpc.StatusCode.UNAUTHENTICATED) >= 3  # gcs, raylet, agent
    with_token = [_call(port, NODES, ("authorization", f"Bearer {TOKEN}")) for port in ports]
    assert with_token.count(grpc.StatusCode.OK) == 1  # the question was a good one


def test_others_cannot_enter_its_folder(cluster: tuple[psutil.Process, Path]) -> None:
    folder = cluster[1]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    sockets = [path for path in folder.rglob("*") if path.is_socket()]
    assert {path.name for path in sockets} >= {"raylet", "plasma_store"}
    longest_pid = len(str(2**22)) - len(str(cluster[0].pid))  # twice in the path
    assert max(len(bytes(path)) for path in sockets) + 2 * longest_pid <= 107


def _page(port: int, page: str) -> int | None:
    """HTTP status; None where no HTTP is spoken."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return None


def _call(port: int, name: str, *metadata: tuple[str, str]) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(name)
        try:
            call(b"", timeout=5, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK
