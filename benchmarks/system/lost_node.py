"""What the loss of a node costs a run: emulated nodes, real Ray and vLLM, the demo's model.

    python -m benchmarks.system.lost_node [--away 5]

Four nodes on this machine, a raylet each: the head with the driver, one for the learner and one for each of two
generators; a spare one where the learner's is lost. In the middle of an asynchronous run a node is killed (SIGKILL to
its raylet and all below it), and started again `--away` seconds later; the run is stopped when the lost role has taken
part in steps again. Lost and doubled groups are counted in the run's own ledger: each position of the stream must be in
it once.
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
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import as_table, conditions, marked, parser_of, save, under
from benchmarks.system.system_run import counted, rows, trained

NAMES = ["node-0", "node-1", "node-2"]
STEPS, PER_STEP = 3000, 8  # more steps than are waited for
BEFORE, AFTER = 12, 8  # steps before the kill, and with the lost role back
PATIENCE_S = 300.0
SETTLED_S = 5.0  # after which no group of the killed process can be in a batch any more; a fresh one starts for longer
STORE = 128 * 2**20  # bytes of a node's object store
START_S = 60.0
_RAY = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats"]
_SMALL = [f"--object-store-memory={STORE}", "--min-worker-port=0", "--max-worker-port=0"]


class EmulatedNodes:
    """A Ray cluster of several raylets on this machine: a head without cores, which has the driver, and nodes by name.

    By `ray start`, so that each node is a tree of processes of its own. All of them, and what they start, carry a mark
    in their environment: no process of another cluster is touched.
    """

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


class Run:
    """A run of the demo on those nodes, in a process of its own."""

    def __init__(self, nodes: EmulatedNodes, folder: Path, *overrides: str) -> None:
        self.folder = folder / "run"
        self._log = (folder / "run.log").open("w+")
        command = [sys.executable, "-m", "learner.main", "--config", "configs/local_cpu.yaml"]
        wanted = [
            f"cluster.address={nodes.address}", "name=run", f"output_dir={folder}", f"steps={STEPS}",
            "rollout.workers=2", "max_staleness=2", "trackers=[]", "checkpoint.every=10", *overrides,
        ]  # fmt: skip
        self.process = subprocess.Popen([*command, *wanted], stdout=self._log, stderr=subprocess.STDOUT)

    def rows(self) -> list[dict[str, Any]]:
        """The steps so far, as metrics.jsonl has them."""
        return [row for row in rows(self.folder) if "loss/total" in row]

    def until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{'the run ended' if ended else 'too long'} before: {what}\n{self.said()}")
            time.sleep(0.1)

    def finish(self) -> None:
        """Stops after the step under way, with a checkpoint."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        if code != 0:
            raise RuntimeError(f"the run ended with {code}\n{self.said()}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def said(self) -> str:
        return Path(self._log.name).read_text()[-6000:]


def lost(role: str, away_s: float, *overrides: str, after_s: float = 0.0) -> dict[str, Any]:
    """Kills the node of `role` in the middle of a run, so many seconds after a step, brings it back; what that cost.
    For the learner a spare node is there, since without its node there is no run."""
    names = [*NAMES, "spare"] if role == "learner" else NAMES
    with tempfile.TemporaryDirectory() as folder, EmulatedNodes() as nodes:
        for name in names:  # one by one: on two cores Ray gives up on nodes that start at once
            nodes.start(name)
            nodes.until_joined(name)
        run = Run(nodes, Path(folder), *overrides)
        try:
            run.until(lambda: len(run.rows()) >= BEFORE, f"{BEFORE} steps")
            time.sleep(after_s)
            victim = nodes.node_of(role, names)
            killed, before = nodes.kill(victim), run.rows()[-1]["step"]
            time.sleep(away_s)
            nodes.start(victim)
            back = time.time()
            run.until(lambda: any(role in nodes.roles(name) for name in names), f"a fresh {role}")
            took_part = _took_part(run, role, killed, back)
            run.until(took_part, f"{AFTER} steps with the fresh {role}")
            joined = time.time()
            run.finish()
            at = [row["at"] for row in run.rows()]
            later = sorted(moment for moment in at if moment > killed)
            steady = [b - a for a, b in pairwise(at) if b < killed]
            gaps = [b - a for a, b in pairwise([killed, *later])]
            return {
                "role": role, "away_s": away_s, "steps_before": before, "next_step_s": later[0] - killed,
                "longest_wait_s": max(gaps), "median_step_s": sorted(steady)[len(steady) // 2],
                "steps_while_away": sum(killed < moment < back for moment in at),
                "took_part_s": joined - back, **counted(run.folder),
            }  # fmt: skip
        finally:
            run.end()


def _took_part(run: Run, role: str, killed: float, back: float) -> Callable[[], bool]:
    """A generator: groups of it in steps that came after its return. A learner: steps."""

    def generator() -> bool:
        times = {row["step"]: row["at"] for row in run.rows()}
        mine = {
            step
            for step, _, _, worker in trained(run.folder)
            if f"generator-{worker}" == role and times.get(step, 0.0) > back + SETTLED_S
        }
        return len(mine) >= AFTER

    def learner() -> bool:
        return len([row for row in run.rows() if row["at"] > killed]) >= AFTER

    return learner if role == "learner" else generator


def report(found: list[dict[str, Any]], told: dict[str, Any]) -> str:
    names = {
        "next_step_s": "s from the kill to the next step", "longest_wait_s": "longest wait for a step after it, s",
        "median_step_s": "a step before it, s", "steps_while_away": "steps while the node was away",
        "took_part_s": f"s from the node's start to the {AFTER}th step with it", "steps": "steps in all",
        "trained": "groups trained", "reissued": "of them issued again", "dropped": "dropped as stale",
        "lost": "lost", "doubled": "doubled",
    }  # fmt: skip
    lines = [
        [text, *(f"{row[key]:.1f}" if isinstance(row[key], float) else str(row[key]) for row in found)]
        for key, text in names.items()
    ]
    table = as_table(["", *(f"node of {row['role']}" for row in found)], lines)
    return f"# A lost node\n\n{table}\n\nConditions: {under(told, 'wall time, on emulated nodes of one machine')}\n"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--away", type=float, default=5.0, help="seconds until the node is started again")
    parser.add_argument("--roles", nargs="+", default=["generator-1", "learner"])
    options = parser.parse_args()
    told = conditions()
    more = {"learner": ["learner.restarts=2", "checkpoint.every=1"]}
    found = []
    for role in options.roles:
        found.append(lost(role, options.away, *more.get(role, [])))
        print(found[-1], flush=True)
    save("lost_node", {"conditions": told, "rows": found}, report(found, told))


if __name__ == "__main__":
    main()
