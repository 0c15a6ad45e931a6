"""How long the report of a long run takes, and how much memory.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.long_runs [--steps 10000] [--lines 200000]

Two run folders are made and `gleaner report` is run on each, in a process of its own: one of `--steps` steps, each with
64 completions (those of the demo's model, 2 to 60 tokens of text) and the metrics of the demo; and one of `--lines`
lines of such metrics. CPU-seconds and peak resident memory are the process's; wall time is given beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import MIB, as_table, conditions, save, under
from benchmarks.processes import spent
from benchmarks.system.report_page import MODEL, group
from rollout import ledger

GROUPS, TOKENS, DIFFERENT = 8, 30, 16  # groups of a step, mean tokens of a completion, step files that are not copies
METRICS = 58  # of a step, as in the demo


def make_metrics(folder: Path, lines: int) -> None:
    rng = np.random.default_rng(0)
    names = ["time/step", "reward/mean", "policy/entropy", *(f"time/part_{i}" for i in range(METRICS - 3))]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            values = dict(zip(sorted(names), rng.random(METRICS).tolist(), strict=True))
            scores = {"eval/accuracy": float(rng.random())} if step % 10 == 0 else {}
            file.write(json.dumps({"step": step, "at": round(1.7e9 + step, 3), **scores, **values}) + "\n")


def make_run(folder: Path, steps: int, *, rollouts: bool) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text(
        f"steps: {steps}\nmodel: {{path: {MODEL}}}\nlearner: {{algorithm: grpo, loss: {{advantage: batch}}}}\n"
    )
    make_metrics(folder, steps)
    if not rollouts:
        return
    rng, tokenizer = np.random.default_rng(0), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for step in range(1, steps + 1):
        if step <= DIFFERENT:
            made = [group(rng, tokenizer, GROUPS * step + i, TOKENS) for i in range(GROUPS)]
            ledger.write(folder / "rollouts", step, made)
        else:
            own = folder / "rollouts" / f"step-{step:06d}.parquet"
            os.link(own.with_name(f"step-{step % DIFFERENT + 1:06d}.parquet"), own)


def measure(what: str, folder: Path) -> dict[str, Any]:
    used = spent("learner.tools.cli", "report", str(folder))
    size = (folder / "report.html").stat().st_size
    metrics = (folder / "metrics.jsonl").stat().st_size
    return {
        "what": what, **used._asdict(), "page_bytes": size, "metrics_bytes": metrics,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--lines", type=int, default=200_000)
    options = parser.parse_args()
    told, found = conditions(("pyarrow", "numpy")), []
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as place:
        for name, steps, rollouts in (("steps", options.steps, True), ("lines", options.lines, False)):
            folder = Path(place) / name
            make_run(folder, steps, rollouts=rollouts)
            what = f"{steps:,} steps of 64 completions" if rollouts else f"{steps:,} lines of metrics.jsonl"
            found.append(measure(what, folder))
            print(found[-1], flush=True)
    rows = [
        [
            one["what"], f"{one['metrics_bytes'] / MIB:.0f}", f"{one['cpu_s']:.1f}", f"{one['wall_s']:.1f}",
            f"{one['peak_bytes'] / MIB:.0f}", f"{one['page_bytes'] / MIB:.1f}",
        ]
        for one in found
    ]  # fmt: skip
    header = ["run", "metrics.jsonl, MiB", "CPU-s", "wall s", "peak memory, MiB", "page, MiB"]
    how = under(told, "CPU time and peak resident memory of `gleaner report`, imports included")
    save(
        "long_runs",
        {"conditions": told, "runs": found},
        f"# Reports of long runs\n\n{as_table(header, rows)}\n\n{how}\n",
    )


if __name__ == "__main__":
    main()
