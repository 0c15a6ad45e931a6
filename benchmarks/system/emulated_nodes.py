"""Emulated nodes: a Ray cluster of several raylets on this machine, of which one can be killed and started again.

By `ray start`, so that each node is a tree of processes of its own. All of them, and what they start, carry a mark in
their environment: no process of another cluster is touched.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from benchmarks.processes import marked

STORE = 128 * 2**20  # bytes of a node's object store
START_S = 60.0
_RAY = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats"]
_SMALL = [f"--object-store-memory={STORE}", "--min-worker-port=0", "--max-worker-port=0"]


class EmulatedNodes:
    """A head without cores, and nodes by name. The head's node has the driver."""

    def __init__(self) -> None:
        self._mark = f"gleaner-nodes-{uuid.uuid4().hex}"
        self._folder = tempfile.TemporaryDirectory(prefix="gn-")  # short: paths of sockets have 107 characters
        self.address = f"127.0.0.1:{_free_port()}"
        self._logs: dict[str, Path] = {}  # of each node's newest start
        self._starts = 0

    def __enter__(self) -> EmulatedNodes:
        port = self.address.rpartition(":")[2]
        where = ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={self._folder.name}"]
        self._spawn("head", ["--head", f"--port={port}", "--num-cpus=0", *where, *_SMALL])
        _until_listening(int(port))
        self.until_joined("head")
        return self

    def __exit__(self, *error: object) -> None:
        _kill(self.pids())
        self._folder.cleanup()

    def start(self, name: str, cpus: int = 1, **environment: str) -> None:
        """Starts the node, with more in its environment, or starts it again; it joins a few seconds later."""
        where = [
            f"--address={self.address}",
            "--node-ip-address=127.0.0.1",
            f"--node-name={name}",
            f"--num-cpus={cpus}",
        ]
        self._spawn(name, [*where, "--dashboard-agent-listen-port=0", *_SMALL], environment)

    def until_joined(self, *names: str) -> None:
        """Waits until Ray says that these nodes have started."""
        deadline = time.monotonic() + START_S
        for name in names:
            while "Ray runtime started" not in self._logs[name].read_text():
                assert time.monotonic() < deadline, f"{name} has not joined: {self._logs[name].read_text()}"
                time.sleep(0.1)

    def kill(self, name: str) -> float:
        """SIGKILL to the raylet and all processes below it, at once; the time of it (of time.time)."""
        pids = self.pids(name)
        assert any("raylet" in command for command in pids.values()), f"no raylet of {name} runs: {pids}"
        at = time.time()
        _kill(pids)
        return at

    def roles(self, name: str) -> set[str]:
        """The processes of a run on this node: learner, generator-0, ..."""
        commands = self.pids(name).values()
        return {words[0].removeprefix("ray::").split(".")[0] for c in commands if (words := c.split())[:1]
                and words[0].startswith(("ray::generator", "ray::learner", "ray::rewards"))}  # fmt: skip

    def node_of(self, role: str, names: list[str]) -> str:
        """The node that runs this role. LookupError if none does."""
        found = [name for name in names if role in self.roles(name)]
        if not found:
            raise LookupError(f"no node runs {role}: { {name: self.roles(name) for name in names} }")
        return found[0]

    def pids(self, name: str | None = None) -> dict[int, str]:
        """Living processes of one node, or of all: pid -> command line."""
        return marked(self._mark if name is None else f"{self._mark}-{name}-")

    def _spawn(self, name: str, options: list[str], environment: Mapping[str, str] | None = None) -> None:
        own = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "OMP_", "VLLM_"))}
        self._starts += 1
        self._logs[name] = Path(self._folder.name) / f"{name}-{self._starts}.log"
        with self._logs[name].open("w") as log:
            subprocess.Popen(
                [*_RAY, *options], stdout=log, stderr=log, start_new_session=True,
                env={**own, **(environment or {}), "XDG_GLEANER_NODE": f"{self._mark}-{name}-"},
            )  # fmt: skip


def _kill(pids: dict[int, str]) -> None:
    """All are stopped first, so that none of them sees another die."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it ended by itself


def _free_port() -> int:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _until_listening(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, f"Ray's head does not listen at port {port} after {START_S:g} s"
            time.sleep(0.1)
