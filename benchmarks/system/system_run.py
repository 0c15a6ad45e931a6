"""One run of a whole system as a user starts it, in processes of its own, and what it told about itself.

Seconds are wall time, since a system is all its processes and their waits; the load average is kept beside them. The
time of held-out evaluations is not in a step's seconds. gleaner's generators work ahead during one, so the steps that
may have gained from it are charged at least the median of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.compute as pc
import yaml

from benchmarks.common import ENGINE_PACKAGES, PACKAGES, as_table
from benchmarks.system.workloads import ROOT, Tree
from rollout import ledger

TIMES = ("generate", "train", "overlap", "push", "push_export", "generator_idle", "learner_idle")
BOTH = tuple(dict.fromkeys([*PACKAGES, *ENGINE_PACKAGES]))  # packages that a whole system is made of
RIVALS = {"generate": "TRL", "vllm": "TRL with vLLM"}  # engine of TRL -> the system's name
FOREIGN = ("RAY_", "VLLM_", "TORCH_COMPILE")  # settings of a shell that a system should not inherit


class RunFailed(RuntimeError):
    """A system did not come to its end; the text is the last that it said."""


@dataclass
class Record:
    """What a run was. `steps`: seconds, samples, tokens and, where the system tells, TIMES of each step from the first.
    `lengths`: tokens of every completion. `ended`: share of them that sampled the end. `accuracy`: (step, score).
    `start_s`: from the command to the first step; `wall_s`: to the end of the process; `load`: average before."""

    system: str
    seed: int
    dtype: str
    start_s: float
    wall_s: float
    load: float
    steps: list[dict[str, float]]
    lengths: list[int]
    ended: float
    accuracy: list[tuple[int, float]] = field(default_factory=list)

    def steady(self, skip: int) -> list[dict[str, float]]:
        """Steps after the first `skip`, less those that an evaluation disturbed, where others are left."""
        later = self.steps[skip:]
        return [step for step in later if not step.get("evaluated")] or later

    def rate(self, skip: int, what: str = "samples") -> float:
        """`what` per second over the steady steps."""
        steps = self.steady(skip)
        return sum(step[what] for step in steps) / sum(step["seconds"] for step in steps)

    def mean(self, skip: int, what: str) -> float:
        steps = self.steady(skip)
        return sum(step[what] for step in steps) / len(steps)

    def other(self, skip: int) -> float:
        """Seconds of a step in which neither generation nor training went on."""
        parts = {what: self.mean(skip, what) for what in ("seconds", "generate", "train", "overlap")}
        return parts["seconds"] - (parts["generate"] + parts["train"] - parts["overlap"])

    def curve(self) -> list[tuple[float, float]]:
        """(seconds of training, held-out accuracy)."""
        return [(sum(step["seconds"] for step in self.steps[:count]), score) for count, score in self.accuracy]

    def seconds_to(self, accuracy: float) -> float | None:
        """Of training, to the first evaluation at or above `accuracy`; None if there was none."""
        return next((seconds for seconds, score in self.curve() if score >= accuracy), None)


@dataclass(frozen=True)
class Mode:
    """How gleaner runs: policy versions that generation may run ahead, cores of each role, what completions under way
    do when a newer policy comes (rollout.in_flight), and the ranks of the learner, each with that many cores."""

    staleness: int
    generator: int
    learner: int
    in_flight: str = "finish"
    ranks: int = 1

    @classmethod
    def parse(cls, text: str) -> Mode:
        """`STALENESS:GENERATOR/LEARNER[xRANKS][:IN_FLIGHT]`, for example 1:1/1x2:continue. Raises
        ArgumentTypeError."""
        if (found := re.fullmatch(r"(\d+):(\d+)/(\d+)(?:x(\d+))?(?::(finish|continue))?", text)) is None:
            raise argparse.ArgumentTypeError(
                f"must be STALENESS:CORES/CORES[xRANKS][:finish|:continue], for example 1:1/1x2, got {text}"
            )
        staleness, generator, learner, ranks, in_flight = found.groups()
        return cls(int(staleness), int(generator), int(learner), in_flight or "finish", int(ranks or 1))

    @property
    def name(self) -> str:
        way = f"async, {self.staleness} ahead" if self.staleness else "sync"
        way += f", in flight {self.in_flight}" * (self.in_flight != "finish")
        ranks = f" x {self.ranks} ranks" * (self.ranks > 1)
        return f"gleaner {way}, {self.generator}/{self.learner} cores{ranks}"


def run_gleaner(tree: Tree, mode: Mode, limit_s: float) -> Record:
    """`python -m learner.main` on the configuration. Raises RunFailed."""
    cores = {"generator": mode.generator, "learner": mode.learner}
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        more: Tree = {"name": "run", "output_dir": folder, "max_staleness": mode.staleness}
        more["cluster"] = {"cpus": cores, "learners": mode.ranks}
        more["rollout"] = tree["rollout"] | {"in_flight": mode.in_flight}
        load, started = os.getloadavg()[0], time.time()
        command(tree | more, ["-m", "learner.main", "--config"], [], limit_s)
        wall = time.time() - started
        run = Path(folder) / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows = [ledger.read(path) for path in ledger.steps(run / "rollouts")]
    lengths = [n for table in rows for n in pc.list_value_length(table.column("completion_ids")).to_pylist()]
    ended = [reason == "stop" for table in rows for reason in table.column("finish_reason").to_pylist()]
    told = [line for line in lines if line["step"] > 0]
    return Record(
        system=mode.name,
        seed=tree["seed"],
        dtype=tree["model"]["dtype"],
        start_s=told[0]["at"] - told[0]["time/step"] - started,
        wall_s=wall,
        load=load,
        steps=_steps(told, [table.num_rows for table in rows], mode.staleness),
        lengths=lengths,
        ended=sum(ended) / len(ended),
        accuracy=[(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line],
    )


def _steps(lines: Sequence[dict[str, float]], samples: Sequence[int], staleness: int) -> list[dict[str, float]]:
    """Of lines of metrics.jsonl, those of steps. `evaluated`: the step holds an evaluation, or gained from one."""
    steps = [_step(line, count) for line, count in zip(lines, samples, strict=True)]
    for index, step in enumerate(steps):
        step["evaluated"] = float(
            any(line["time/evaluate"] > 0 for line in lines[max(0, index - staleness) : index + 1])
        )
    quiet = [step["seconds"] for step in steps if not step["evaluated"]]
    if not quiet:
        raise RunFailed("every step holds an evaluation or gained from one: evaluate less often, or take more steps")
    for step in steps:
        if step["evaluated"]:
            step["seconds"] = max(step["seconds"], median(quiet))
    return steps


def _step(line: dict[str, float], samples: int) -> dict[str, float]:
    told = {what: line[f"time/{what}"] for what in TIMES if f"time/{what}" in line}
    # Where a run does not tell how long a role idled, it is what it was not busy for.
    derived = {
        "generator_idle": line["time/step"] - line["time/generate"],
        "learner_idle": line["time/step"] - line["time/train"],
    }
    counts = {"samples": samples, "tokens": line["rollout/tokens"]}
    return derived | told | counts | {"seconds": line["time/step"] - line["time/evaluate"] - line["time/checkpoint"]}


def run_trl(tree: Tree, micro_batch: int, engine: str, limit_s: float) -> Record:
    """benchmarks.system.trl_system on the configuration; engine: a key of RIVALS. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="trl-bench-") as folder:
        out = Path(folder) / "out.json"
        after = [str(out), "--micro-batch", str(micro_batch), "--engine", engine]
        load, started = os.getloadavg()[0], time.time()
        command(tree, ["-m", "benchmarks.system.trl_system"], after, limit_s)
        wall, told = time.time() - started, json.loads(out.read_text())
    return Record(
        system=RIVALS[engine],
        seed=tree["seed"],
        dtype=tree["model"]["dtype"],
        start_s=told["began_at"] - started,
        wall_s=wall,
        load=load,
        steps=told["steps"],
        lengths=told["lengths"],
        ended=told["ended"],
        accuracy=[(step, score) for step, score in told["accuracy"]],
    )


def command(
    tree: Tree,
    before: Sequence[str],
    after: Sequence[str],
    limit_s: float,
    root: Path = ROOT,
    cores: Sequence[int] = (),
) -> None:
    """python BEFORE config.yaml AFTER in a checkout's root, in a session of its own that ends with it, on all cores or
    on those given. RunFailed."""
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
    with tempfile.TemporaryDirectory() as folder:
        config, said = Path(folder) / "config.yaml", Path(folder) / "said.txt"
        config.write_text(yaml.safe_dump(tree))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        environment["PYTHONPATH"] = f"{root}:{environment.get('PYTHONPATH', '')}"
        with said.open("w") as file:
            process = subprocess.Popen(
                [*pinned, sys.executable, *before, str(config), *after],
                stdout=file, stderr=subprocess.STDOUT, cwd=root, env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=limit_s)
            except BaseException as error:  # Ctrl-C is not seen by a session of its own
                _end(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise RunFailed(f"{before[1]}: not done after {limit_s:g} s; raise --limit\n{_tail(said)}") from None
        if code != 0:
            raise RunFailed(f"{before[1]}: exit status {code}\n{_tail(said)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, by which gleaner takes its processes down, then SIGKILL to what is left of the session."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(said: Path) -> str:
    return said.read_text(errors="replace")[-4000:]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """`median (min - max)`."""
    return f"{median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def parts_of(records: Sequence[Record], skip: int, names: Sequence[str], form: str = ".2f") -> list[str]:
    """Of each named part of a step, the spread over the runs."""
    return [spread([record.mean(skip, name) for record in records], form) for name in names]


def lengths_table(records: Sequence[Record]) -> str:
    """What was sampled, by system: they sample from one model, so these must agree within noise."""
    shares = (0.1, 0.25, 0.5, 0.75, 0.9)
    rows = []
    for system, dtype in dict.fromkeys((record.system, record.dtype) for record in records):
        own = [record for record in records if (record.system, record.dtype) == (system, dtype)]
        lengths = sorted(n for record in own for n in record.lengths)
        cells = [str(lengths[int(share * (len(lengths) - 1))]) for share in shares]
        ended = sum(record.ended * len(record.lengths) for record in own) / len(lengths)
        rows.append([system, dtype, str(len(lengths)), f"{sum(lengths) / len(lengths):.1f}", *cells, f"{ended:.3f}"])
    quantiles = [f"{share:.0%} below" for share in shares]
    return as_table(["system", "type", "completions", "mean tokens", *quantiles, "share that ended itself"], rows)


def wall_text(told: dict[str, Any], records: Sequence[Record]) -> str:
    """The conditions of runs that are timed by the clock on the wall."""
    loads = [record.load for record in records]
    versions = ", ".join(f"{name} {value}" for name, value in told["versions"].items() if value)
    return (
        f"{told['date']}, `{told['command']}`, {told['cpu']}, {told['cores']} cores, wall time; load average before "
        f"the runs {min(loads):.1f} to {max(loads):.1f} (a run leaves its own behind), Python {told['python']}, "
        f"{versions}."
    )
