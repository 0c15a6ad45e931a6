"""Three steps of the whole system (Ray, vLLM, learner) on a tiny random model of each family, float32.

What is shown: with its cap, scale, experts or fused layers each family is sampled and scored alike. Sampler and learner
are other programs with the same weights, so the largest difference of their logprobs of one token is rounding, or else
one of them leaves something out. Synchronous, so that the policy's own change is in no difference.

    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.model_families [--families NAME ...] [--steps 3]

A family that is not asked for keeps what an earlier call found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, as_table, conditions, save, under
from benchmarks.system.system_run import BOTH
from tests.families import FAMILIES, make_family
from tests.flow.run import Run

LIMIT = 1e-4  # nats
REWARD = """
def distinct(prompts, completions, **columns):  # differs in nearly every group, so that every step trains
    return [len(set(completion[0]["content"])) for completion in completions]
"""
COLUMNS = ("policy/mismatch_max", "policy/mismatch_k3", "policy/entropy", "loss/grad_norm")


def run(name: str, folder: Path, steps: int) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of a whole run, its adapter moved by each step."""
    model, reward = make_family(folder / "model", name), folder / "distinct.py"
    reward.write_text(REWARD)
    one = Run(folder, model, steps=steps, rewards=[{"use": f"{reward}:distinct"}])
    process = subprocess.run(
        [sys.executable, "-m", "learner.main", "--config", str(one.config)],
        capture_output=True, text=True, env=one.environment(), timeout=600, check=False,
    )  # fmt: skip
    if process.returncode != 0:
        raise SystemExit(f"{name}: exit code {process.returncode}\n{process.stdout[-4000:]}{process.stderr[-4000:]}")
    return [line for line in one.metrics() if "policy/mismatch_max" in line]


def report(found: dict[str, Any]) -> tuple[str, bool]:
    """(Markdown, whether every family is below LIMIT in each of its steps)."""
    rows, bad = [], []
    for name, one in found.items():
        greatest = [max(step[column] for step in one["steps"]) for column in COLUMNS]
        rows.append([name, str(len(one["steps"])), *(f"{value:.1e}" for value in greatest)])
        if len(one["steps"]) != one["asked"] or greatest[0] >= LIMIT:
            bad.append(name)
    verdict = f"not below {LIMIT:.0e} in every step: {', '.join(bad)}" if bad else f"all below {LIMIT:.0e} nats"
    newest = list(found.values())[-1]["conditions"]
    text = (
        f"# Families in the whole system\n\nGreatest value over the steps, nats; {verdict}.\n\n"
        f"{as_table(['family', 'steps', *COLUMNS], rows)}\n\n"
        f"{under(newest, 'Tiny random models, float32, LoRA on all-linear')} Those of each family are in the JSON.\n"
    )
    return text, not bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    earlier = RESULTS / "model_families.json"
    found: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {}
    for name in options.families:
        told = conditions(BOTH)
        with tempfile.TemporaryDirectory() as folder:
            lines = run(name, Path(folder), options.steps)
        steps = [{column: line[column] for column in COLUMNS} for line in lines]
        found[name] = {"asked": options.steps, "steps": steps, "conditions": told}
        found = {family: found[family] for family in FAMILIES if family in found}
        print(name, [step["policy/mismatch_max"] for step in steps], flush=True)
        text, good = report(found)
        save("model_families", found, text)
    sys.exit(not good)


if __name__ == "__main__":
    main()
