"""A run under faults: what was lost, what was trained twice, and how long each fault was felt.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.chaos --minutes 30 [--seed 0] [--every 15 20] [key=value ...]

The demo, asynchronous, with two generators and a learner of two ranks. Every 15 to 20 seconds one process of it is
killed or stopped at random (benchmarks/system/chaos_faults.py), also while it recovers from the fault before. A run
that ends is started again with the same command. At the end it is stopped by SIGINT and goes on undisturbed for some
steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.chaos_faults import MARK, Fault, drawn, inject, processes_of
from rollout import ledger

SHARED = Path("/dev/shm")
QUIET_STEPS = 20  # at the end, without faults
SETTINGS = (
    "name=chaos", "max_staleness=1", "rollout.workers=2", "cluster.learners=2", "learner.restarts=1000",
    "cluster.deadlines.start=60", "cluster.deadlines.group=30", "cluster.deadlines.heartbeat=30", "checkpoint.every=5",
    "trackers=[]", "data.eval.every=50", "data.eval.size=100",
)  # fmt: skip


class Runs:
    """The command, again and again, in one run folder. starts: how often."""

    def __init__(self, folder: Path, total_steps: int, overrides: list[str]) -> None:
        self.run_dir, self.starts = folder / "chaos", 0
        self._mark, self._known = uuid.uuid4().hex, set[psutil.Process]()
        self._total_steps = total_steps
        self._words = [sys.executable, "-m", "learner.main", "--config", "configs/local_cpu.yaml"]
        self._words += [*SETTINGS, f"output_dir={folder}", *overrides]
        self._log = (folder / "output.log").open("ab")
        self.driver = self._start(total_steps)

    def _start(self, steps: int) -> subprocess.Popen[bytes]:
        self.starts += 1
        return subprocess.Popen(
            [*self._words, f"steps={steps}"], stdout=self._log, stderr=subprocess.STDOUT,
            env=os.environ | {MARK: self._mark}, start_new_session=True,
        )  # fmt: skip

    def again_if_ended(self) -> None:
        if self.driver.poll() is not None:
            self.driver = self._start(self._total_steps)

    def processes(self) -> dict[psutil.Process, str]:
        """Those alive, and their command lines."""
        found = processes_of(self._mark)
        self._known.update(found)
        return found

    def left(self) -> int:
        """How many of all that were ever seen are alive."""
        return sum(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in self._known)

    def finish(self) -> int:
        """SIGINT, then the same command for some steps more; its exit code."""
        self.driver.send_signal(signal.SIGINT)
        try:
            self.driver.wait(180)
        except subprocess.TimeoutExpired:
            self.driver.kill()
        self.driver = self._start(len(self.steps()) + QUIET_STEPS)
        return self.driver.wait(300)

    def steps(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far."""
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]


def chaos(runs: Runs, options: argparse.Namespace) -> tuple[list[Fault], list[tuple[float, int]]]:
    """The faults, and when the run was further than ever before: (seconds since the begin, step)."""
    rng, began = random.Random(options.seed), time.monotonic()
    faults: list[Fault] = []
    seen: list[tuple[float, int]] = []
    due, kind = 0.0, drawn(rng)
    while (now := time.monotonic() - began) < 60 * options.minutes:
        runs.again_if_ended()
        steps = runs.steps()
        if steps and (not seen or steps[-1]["step"] > seen[-1][1]):
            seen.append((now, steps[-1]["step"]))
        if not seen:
            due = now + options.every[0]
        elif now >= due:
            fault = inject(kind, rng, now, runs.processes(), runs.driver.pid, runs.run_dir)
            if fault is not None:
                print(f"{now:6.0f} s  step {seen[-1][1]:5}  {fault.kind}, pid {fault.pid}", flush=True)
                faults.append(fault)
                due, kind = now + rng.uniform(*options.every), drawn(rng)
        time.sleep(0.2)
    return faults, seen


def ledger_of(run_dir: Path) -> Counter[int]:
    """Position of a problem -> in how many steps of the surviving line it was trained."""
    trained: Counter[int] = Counter()
    for file in ledger.steps(run_dir / "rollouts"):
        trained.update(set(ledger.read(file).column("position").to_pylist()))
    return trained


def summary(runs: Runs, faults: list[Fault], seen: list[tuple[float, int]], shared_before: set[Path]) -> dict[str, Any]:
    steps, trained = runs.steps(), ledger_of(runs.run_dir)
    newest = max((runs.run_dir / "checkpoints").glob("step-*"))
    low = json.loads((newest / "state.json").read_text())["cursor"]["low"]  # every position below is done
    gaps = sorted(next((at for at, _ in seen if at > fault.at), float("nan")) - fault.at for fault in faults)
    felt = [gap for gap in gaps if gap == gap]
    accuracies = [line["eval/accuracy"] for line in steps if "eval/accuracy" in line]
    cuts = quantiles(felt, n=100) if len(felt) > 1 else [float("nan")] * 99
    return {
        "faults": dict(Counter(fault.kind for fault in faults)),
        "starts of the command": runs.starts,
        "steps": steps[-1]["step"],
        "steps in order": [line["step"] for line in steps] == list(range(len(steps))),
        "problems trained": len(trained),
        "lost": sum(position not in trained for position in range(low)),
        "doubled": sum(count > 1 for count in trained.values()),
        "s until it was further than before": {
            "median": cuts[49],
            "p99": cuts[98],
            "most": max(felt, default=float("nan")),
        },
        "faults after which it came no further": len(gaps) - len(felt),
        "first and last held-out accuracy": accuracies[:1] + accuracies[-1:],
        "processes left": runs.left(),
        "bytes of shared memory left": sum(file.stat().st_size for file in set(SHARED.iterdir()) - shared_before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, nargs=2, default=[15, 20], help="seconds between two faults")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of the run folder and output.log; else they go")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    shared_before = set(SHARED.iterdir())
    with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), int(60 * options.minutes), options.overrides)  # no more than one step a second
        faults, seen = chaos(runs, options)
        code = runs.finish()
        time.sleep(5)  # for processes whose parent has ended
        found = {"minutes": options.minutes, "exit code": code} | summary(runs, faults, seen, shared_before)
    told = conditions(ENGINE_PACKAGES)
    rows = [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in found.items()]
    text = f"# A run under faults\n\n{as_table(['what', 'found'], rows)}\n\n{under(told, 'Wall time')}\n"
    save("chaos", {"conditions": told} | found, text)
    sys.exit(code or found["lost"] or found["doubled"])


if __name__ == "__main__":
    main()
