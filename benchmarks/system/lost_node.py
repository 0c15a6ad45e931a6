"""What the loss of a node costs a run: emulated nodes, real Ray and vLLM, the demo's model.

    python -m benchmarks.system.lost_node [--away 5]

Four nodes on this machine, a raylet each: the head with the driver, one for the learner and one for each of two
generators; a spare one where the learner's is lost. In the middle of an asynchronous run a node is killed (SIGKILL to
its raylet and all below it), and started again `--away` seconds later; the run is stopped when the lost role has taken
part in steps again. Lost and doubled groups are counted in the run's own ledger: each position of the stream must be in
it once.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.emulated_nodes import EmulatedNodes
from benchmarks.system.run_folder import counted, rows, trained

NAMES = ["node-0", "node-1", "node-2"]
STEPS, PER_STEP = 3000, 8  # more steps than are waited for
BEFORE, AFTER = 12, 8  # steps before the kill, and with the lost role back
PATIENCE_S = 300.0
SETTLED_S = 5.0  # after which no group of the killed process can be in a batch any more; a fresh one starts for longer


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--away", type=float, default=5.0, help="seconds until the node is started again")
    parser.add_argument("--roles", nargs="+", default=["generator-1", "learner"])
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    more = {"learner": ["learner.restarts=2", "checkpoint.every=1"]}
    found = []
    for role in options.roles:
        found.append(lost(role, options.away, *more.get(role, [])))
        print(found[-1], flush=True)
    save("lost_node", {"conditions": told, "rows": found}, report(found, told))


if __name__ == "__main__":
    main()
