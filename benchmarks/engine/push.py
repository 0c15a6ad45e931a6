"""A push by part: what bringing a new policy to the generator costs, and its share of a step, sync and async.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.push [--workloads demo] [key=value ...]

Runs `python -m learner.main` on the demo and on the ragged workload of benchmarks/system/workloads.py, each once with
max_staleness 0 and once with 1, and reads the run's own metrics.jsonl. What goes on between the end of a step's update
and the generator's proof:

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
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.workloads import Tree, add_ragged_options, demo_of_one, ragged

PARTS = {
    "export": "time/push_export",
    "push": "time/push",
    "of it load": "time/push_load",
    "probe": "time/push_probe",
    "learner probe": "time/push_learner_probe",
}
WAITED = {"sync": ("time/push_export", "time/push"), "async": ("time/push_export",)}
MODES = {"sync": 0, "async": 1}

Found = dict[str, dict[str, Any]]  # of each mode, medians and the adapter's bytes


def run(tree: Tree, mode: str, skip: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Medians over the steps after the first `skip`, seconds; and the adapter's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        more: Tree = {"output_dir": folder, "name": "push", "max_staleness": MODES[mode]}
        config.write_text(yaml.safe_dump(tree | more))
        subprocess.run([sys.executable, "-m", "learner.main", "--config", str(config), *overrides], check=True)
        home = Path(folder) / "push"
        lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
        size = (home / "adapter" / "adapter_model.safetensors").stat().st_size
    steps = [line for line in lines if line["step"] > skip]
    keys = ["time/step", "time/train", "time/generate", *PARTS.values()]
    return {"adapter_bytes": size, "steps": len(steps)} | {key: median(step[key] for step in steps) for key in keys}


def table(name: str, found: Found) -> str:
    rows = []
    lines = PARTS | {"generate": "time/generate", "train": "time/train", "step": "time/step"}
    for part, key in lines.items():
        rows.append([part])
        for told in found.values():
            rows[-1] += [f"{1e3 * told[key]:.1f}", f"{told[key] / told['time/step']:.2%}"]
    rows.append(["**training waits**"])
    for mode, told in found.items():
        waited = sum(told[key] for key in WAITED[mode])
        rows[-1] += [f"{1e3 * waited:.1f}", f"{waited / told['time/step']:.2%}"]
    header = ["part"]
    for mode in found:
        header += [f"{mode}, ms", "of a step"]
    size, steps = found["sync"]["adapter_bytes"], found["sync"]["steps"]
    return f"## {name}: adapter of {size / 1e6:.2f} MB, medians of {steps} steps\n\n{as_table(header, rows)}\n\n"


def report(found: dict[str, Found], told: dict[str, Any], options: argparse.Namespace) -> str:
    tables = "".join(table(name, runs) for name, runs in found.items())
    return (
        f"# A push by part\n\n{tables}"
        f"Steps after the first {options.skip}. sync: max_staleness 0, training waits for export and push. async: "
        "max_staleness 1, it waits for the export; the push runs while groups are generated, and its seconds are "
        "mostly waits for the engine's steps. Generation goes on while a policy is proven by its probe; its groups "
        "enter the buffer after that. demo: `configs/local_cpu.yaml` with one generator, 0.4M weights. ragged: a Llama "
        f"of 25M random weights, {options.groups} groups of {options.generations} completions a step.\n\n"
        f"Conditions: {under(told, 'Wall time')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_ragged_options(parser)
    parser.add_argument("--workloads", nargs="+", choices=["demo", "ragged"], default=["demo", "ragged"])
    parser.add_argument("--demo-steps", type=int, default=30)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    options = parser.parse_args()
    if options.demo_steps <= options.skip:
        parser.error(f"--demo-steps must be above the {options.skip} steps of --skip, got {options.demo_steps}")
    told, found = conditions(ENGINE_PACKAGES), dict[str, Found]()
    with tempfile.TemporaryDirectory() as folder:
        trees = {"demo": demo_of_one(options.demo_steps, every=0)} if "demo" in options.workloads else {}
        if "ragged" in options.workloads:
            tree = ragged(Path(folder), options)
            trees |= {f"ragged, {dtype}": tree | {"model": tree["model"] | {"dtype": dtype}} for dtype in options.dtype}
        for name, tree in trees.items():
            found[name] = {mode: run(tree, mode, options.skip, options.overrides) for mode in MODES}
    save("push", {"conditions": told, "runs": found}, report(found, told, options))


if __name__ == "__main__":
    main()
