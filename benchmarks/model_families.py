"""Three steps of the whole system (Ray, vLLM, learner) on a tiny random model of each family, float32.

What is shown: with its cap, scale, experts or fused layers each family is sampled and scored alike. Sampler and learner
are other programs with the same weights, so the largest difference of their logprobs of one token is rounding, or else
one of them leaves something out. Synchronous, so that the policy's own change is in no difference.

    PYTHONPATH=. .venv/bin/python -m benchmarks.model_families [--families NAME ...] [--steps 3]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import as_table, conditions, save, under
from benchmarks.system_run import BOTH
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    told = conditions(BOTH)
    found: dict[str, list[dict[str, float]]] = {}
    for name in options.families:
        with tempfile.TemporaryDirectory() as folder:
            lines = run(name, Path(folder), options.steps)
        found[name] = [{column: line[column] for column in COLUMNS} for line in lines]
        print(name, [line["policy/mismatch_max"] for line in lines], flush=True)
    rows = [
        [name, str(len(lines)), *(f"{max(line[column] for line in lines):.1e}" for column in COLUMNS)]
        for name, lines in found.items()
    ]
    bad = [name for name, lines in found.items()
           if len(lines) != options.steps or max(line["policy/mismatch_max"] for line in lines) >= LIMIT]  # fmt: skip
    verdict = f"not below {LIMIT:.0e} in every step: {', '.join(bad)}" if bad else f"all below {LIMIT:.0e} nats"
    text = (
        f"# Families in the whole system, {options.steps} steps each\n\nGreatest value over the steps, nats; {verdict}."
        f"\n\n{as_table(['family', 'steps', *COLUMNS], rows)}\n\n{under(told, 'Tiny random models, float32, LoRA')}\n"
    )
    save("model_families", {"conditions": told, "steps": found}, text)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
