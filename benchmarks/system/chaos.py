"""A run under faults: what was lost, what was trained twice, and how long each fault was felt.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.chaos --minutes 30 [--seed 0] [--every 15 20] [key=value ...]
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.chaos --kinds "kill driver" --every 8.5 12 --minutes 18 \\
        --name chaos_driver rollout.workers=1 cluster.learners=1
    mount -t tmpfs -o size=900m tmpfs DISK     # as root: a small disk, which may be filled
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.chaos --environments --keep DISK --name chaos_environments

The demo, with a reward process of its own, or with --environments the one with tools, where generators score;
asynchronous, with two generators and a learner of two ranks.
Every 15 to 20 seconds one process of it is killed, stopped or paused at random, or its disk is full for a while, also
while it recovers from the fault before. A run that ends is started again with the same command. At the end it is
stopped by SIGINT and goes on undisturbed for some steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from statistics import quantiles
from threading import Timer
from typing import Any, NamedTuple

from benchmarks.common import as_table, conditions, marked, parser_of, save, under
from benchmarks.system.system_run import counted, rows
from learner.api.calls import MetricsLines

SHARED = Path("/dev/shm")
QUIET_STEPS = 20  # at the end, without faults
AGENTS_S = 75.0  # of a killed driver's Ray two agents end 60 s later, as their last report to it times out
SETTINGS = (
    "name=chaos", "max_staleness=1", "rollout.workers=2", "cluster.learners=2", "learner.restarts=1000",
    "cluster.patience=0.1", "checkpoint.every=5",
    "trackers=[]", "data.eval.every=50", "data.eval.size=100",
)  # fmt: skip
WITHOUT_ENVIRONMENTS = ("cluster.rewards.processes=1",)


class Kind(NamedTuple):
    """often: beside the other kinds. signal: None, where no process gets one. command: what the command line of the
    process holds. damaging: the newest checkpoint, before. paused: seconds after which it goes on. filling: the disk
    of the run folder, for as long."""

    often: int
    signal: Signals | None
    command: str
    damaging: bool = False
    paused: float | None = None
    filling: bool = False


PAUSE_S = 5.0  # a third of what a process may be silent for
SMALL = 2**30  # bytes of a disk that may be filled
GENERATOR, RANK, REWARDS, DRIVER = "ray::generator-", "ray::learner-", "ray::rewards-", "-m learner.main"
ENVIRONMENT, DISK = "kill environment process", "fill disk"
KINDS = {
    "kill generator": Kind(4, SIGKILL, GENERATOR),
    "stop generator": Kind(2, SIGSTOP, GENERATOR),
    "kill rank": Kind(4, SIGKILL, RANK),
    "stop rank": Kind(2, SIGSTOP, RANK),
    "kill reward process": Kind(2, SIGKILL, "multiprocessing.spawn import spawn_main"),
    "kill reward server": Kind(2, SIGKILL, REWARDS),
    "stop reward server": Kind(1, SIGSTOP, REWARDS),
    "kill driver": Kind(2, SIGKILL, DRIVER),
    "kill driver, newest checkpoint damaged": Kind(1, SIGKILL, DRIVER, damaging=True),
    "kill raylet": Kind(1, SIGKILL, "/raylet/raylet "),
    "pause generator": Kind(2, SIGSTOP, GENERATOR, paused=PAUSE_S),
    "pause rank": Kind(2, SIGSTOP, RANK, paused=PAUSE_S),
    "pause driver": Kind(1, SIGSTOP, DRIVER, paused=PAUSE_S),
    ENVIRONMENT: Kind(4, SIGKILL, "rollout.env.preload"),  # or the one that they are forked from
    DISK: Kind(2, None, DRIVER, paused=PAUSE_S, filling=True),
}


class Fault(NamedTuple):
    """at: seconds since the benchmark began. pid: of the process that it was done to."""

    at: float
    kind: str
    pid: int


def possible(folder: Path, *, environments: bool) -> list[str]:
    """Kinds of faults of a run in this folder: its disk is filled only if it is small, hence made for it."""
    no_disk = shutil.disk_usage(folder).total > SMALL
    return [name for name in KINDS if not (name == ENVIRONMENT and not environments) and not (name == DISK and no_disk)]


def drawn(rng: random.Random, names: Sequence[str]) -> str:
    """The name of the next fault's kind, one of these."""
    (name,) = rng.choices(names, [KINDS[name].often for name in names])
    return name


def inject(name: str, rng: random.Random, at: float, processes: Mapping[int, str], run_dir: Path) -> Fault | None:
    """A fault of this kind; None if what it needs is not there (yet)."""
    kind = KINDS[name]
    pids = [pid for pid, command in processes.items() if kind.command in command]
    if not pids or (kind.damaging and not _damage(rng, run_dir)):
        return None
    pid = rng.choice(pids)
    if kind.filling:
        _fill(run_dir.parent / "filler", PAUSE_S)
    elif kind.signal is not None:
        try:
            os.kill(pid, kind.signal)
        except ProcessLookupError:
            return None
        if kind.paused is not None:
            Timer(kind.paused, _go_on, [pid]).start()
    return Fault(at, name, pid)


def _fill(file: Path, seconds: float) -> None:
    """Leaves no byte free for so long."""
    with suppress(OSError), file.open("ab", buffering=0) as stream:
        while True:
            stream.write(bytes(2**20))
    Timer(seconds, file.unlink).start()


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):  # it was killed meanwhile, as one that hangs
        os.kill(pid, SIGCONT)


def _damage(rng: random.Random, run_dir: Path) -> bool:
    """Flips a bit of the newest checkpoint; False where there is none."""
    newest = max((run_dir / "checkpoints").glob("step-*"), default=None)
    files = [] if newest is None else sorted(file for file in newest.rglob("*.pt") if file.stat().st_size)
    if not files:
        return False
    content = bytearray(files[0].read_bytes())
    content[rng.randrange(len(content))] ^= 1
    files[0].write_bytes(content)
    return True


class Runs:
    """The command, again and again, in one run folder. starts: how often. mark: of its processes."""

    def __init__(self, folder: Path, total_steps: int, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        config = "tools_cpu" if options.environments else "local_cpu"
        self.run_dir, self.mark, self.starts = folder / "chaos", f"gleaner-chaos-{uuid.uuid4().hex}", 0
        self._total_steps, self._environ = total_steps, {**environ, "XDG_GLEANER_CHAOS": self.mark}
        self._words = [sys.executable, "-m", "learner.main", "--config", f"configs/{config}.yaml"]
        more = () if options.environments else WITHOUT_ENVIRONMENTS
        self._words += [*SETTINGS, *more, f"output_dir={folder}"]
        self._words += options.overrides
        self._log = (folder / "output.log").open("ab")
        self._driver = self._start(total_steps)

    def _start(self, steps: int) -> subprocess.Popen[bytes]:
        self.starts += 1
        return subprocess.Popen(
            [*self._words, f"steps={steps}"], stdout=self._log, stderr=subprocess.STDOUT, env=self._environ,
            start_new_session=True,
        )  # fmt: skip

    def again_if_ended(self) -> None:
        if self._driver.poll() is not None:
            self._driver = self._start(self._total_steps)

    def finish(self) -> int:
        """Once the last fault is over, SIGINT, then the same command for some steps more; its exit code."""
        time.sleep(2 * PAUSE_S)
        self._driver.send_signal(signal.SIGINT)
        try:
            self._driver.wait(180)
        except subprocess.TimeoutExpired:
            self._driver.kill()
        self._driver = self._start(rows(self.run_dir)[-1]["step"] + QUIET_STEPS)
        return self._driver.wait(300)


def under_faults(folder: Path, options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """What such a run in this folder is found to have done."""
    shared_before = set(SHARED.iterdir())
    options.kinds = options.kinds or possible(folder, environments=options.environments)
    runs = Runs(folder, int(300 * options.minutes), options, environ)  # no more than five steps a second
    faults, moments = chaos(runs, options)
    code = runs.finish()
    deadline = time.monotonic() + AGENTS_S
    while marked(runs.mark) and time.monotonic() < deadline:
        time.sleep(1)
    return {"minutes": options.minutes, "exit code": code} | summary(runs, faults, moments, shared_before)


def chaos(runs: Runs, options: argparse.Namespace) -> tuple[list[Fault], list[float]]:
    """The faults, and when the run was further than ever before, in seconds since the begin."""
    rng, began = random.Random(options.seed), time.monotonic()
    faults: list[Fault] = []
    moments: list[float] = []
    lines, furthest = MetricsLines(runs.run_dir / "metrics.jsonl"), -1.0
    due, kind = float("inf"), drawn(rng, options.kinds)
    while (now := time.monotonic() - began) < 60 * options.minutes:
        runs.again_if_ended()
        step = max((line["step"] or 0 for line in lines.new()), default=-1)
        if step > furthest:
            due = due if moments else now + options.every[0]  # the first fault
            furthest = step
            moments.append(now)
        if now >= due and (fault := inject(kind, rng, now, marked(runs.mark), runs.run_dir)) is not None:
            print(f"{now:6.0f} s  step {furthest:5.0f}  {fault.kind}, pid {fault.pid}", flush=True)
            faults.append(fault)
            due, kind = now + rng.uniform(*options.every), drawn(rng, options.kinds)
        time.sleep(0.2)
    return faults, moments


def summary(runs: Runs, faults: list[Fault], moments: list[float], shared_before: set[Path]) -> dict[str, Any]:
    steps = rows(runs.run_dir)
    felt = [next(at for at in moments if at > fault.at) - fault.at for fault in faults if moments[-1] > fault.at]
    accuracies = [line["eval/accuracy"] for line in steps if "eval/accuracy" in line]
    return {
        "faults": dict(Counter(fault.kind for fault in faults)),
        "starts of the command": runs.starts,
        "steps in order": [line["step"] for line in steps] == list(range(len(steps))),
        **counted(runs.run_dir),
        "s until it was further than before": _spread(felt),
        "faults after which it came no further": len(faults) - len(felt),
        "first and last held-out accuracy": accuracies[:1] + accuracies[-1:],
        "processes left": len(marked(runs.mark)),
        "bytes of shared memory left": sum(file.stat().st_size for file in set(SHARED.iterdir()) - shared_before),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"median": round(cuts[49], 1), "p99": round(cuts[98], 1), "most": round(max(seconds), 1)}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, nargs=2, default=[15, 20], help="seconds between two faults")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), metavar="KIND", help="of faults; else all")
    parser.add_argument("--environments", action="store_true", help="the demo with tools")
    parser.add_argument("--name", default="chaos", help="of the result")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of the run folder and output.log; else they go")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as folder:
        found = under_faults(Path(folder), options, os.environ)
    told = conditions()
    rows = [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in found.items()]
    text = f"# A run under faults\n\n{as_table(['what', 'found'], rows)}\n\n{under(told, 'Wall time')}\n"
    save(options.name, {"conditions": told} | found, text)
    sys.exit(found["exit code"] or found["lost"] or found["doubled"] or found["processes left"])


if __name__ == "__main__":
    main()
