"""A push by part: what bringing a new policy to the generator costs, and its share of a step, sync and async.

    PYTHONPATH=. .venv/bin/python -m benchmarks.push [--steps 30] [key=value ...]

Runs `python -m learner.main` on the demo (or another --config) once with max_staleness 0 and once with 1, and reads the
run's own metrics.jsonl. What goes on between the end of a step's update and the generator's proof:

    export         the learner builds the adapter
    push           the call that brings it to the generator, with its transport; of it the generator times
      load         into vLLM, digest
    probe          the generator scores the probe tokens, beside the first requests of the new policy
    learner probe  the learner scores them, while the policy travels

Synchronous training waits for export and push, asynchronous for the export only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under

PARTS = {
    "export": "time/push_export",
    "push": "time/push",
    "of it load": "time/push_load",
    "probe": "time/push_probe",
    "learner probe": "time/push_learner_probe",
}
WARM = 3  # steps, in which caches fill and kernels are built
MODES = {"sync": 0, "async": 1}


def run(config: str, staleness: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the steps after the first ones, seconds; and the adapter's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"output_dir={folder}", "name=push", f"steps={options.steps}", f"max_staleness={staleness}",
            "data.eval.every=0", f"checkpoint.every={options.steps}", "trackers=[]", *options.overrides,
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "learner.main", "--config", config, *overrides], check=True)
        home = Path(folder) / "push"
        lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
        size = (home / "adapter" / "adapter_model.safetensors").stat().st_size
    steps = [line for line in lines if line["step"] > WARM]
    keys = ["time/step", "time/train", "time/generate", *PARTS.values()]
    return {"adapter_bytes": size, "steps": len(steps)} | {key: median(step[key] for step in steps) for key in keys}


def report(found: dict[str, dict[str, Any]], told: dict[str, Any], config: str) -> str:
    rows = []
    lines = PARTS | {"generate": "time/generate", "train": "time/train", "step": "time/step"}
    for name, key in lines.items():
        rows.append([name])
        for run in found.values():
            rows[-1] += [f"{1e3 * run[key]:.1f}", f"{run[key] / run['time/step']:.2%}"]
    header = ["part"]
    for mode in found:
        header += [f"{mode}, ms", "of a step"]
    any_run = next(iter(found.values()))
    return (
        f"# A push by part: {config}, adapter of {any_run['adapter_bytes'] / 1e6:.2f} MB\n\n"
        f"{as_table(header, rows)}\n\n"
        f"Medians of {any_run['steps']} steps after the first {WARM}. sync: max_staleness 0, export and push are on "
        "the critical path. async: max_staleness 1, the export is; the push runs while groups are generated, and its "
        "seconds are mostly waits for the engine's steps. The probes are proofs that nobody waits for: groups of a "
        "policy enter the buffer once it is proven.\n\n"
        f"Conditions: {under(told, 'Wall time')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/local_cpu.yaml")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    options = parser.parse_args()
    if options.steps <= WARM:
        parser.error(f"--steps must be above {WARM}, which are not counted; got {options.steps}")
    told = conditions(ENGINE_PACKAGES)
    found = {mode: run(options.config, staleness, options) for mode, staleness in MODES.items()}
    save("push", {"conditions": told, "runs": found}, report(found, told, options.config))


if __name__ == "__main__":
    main()
