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
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, as_table, conditions, save, under
from benchmarks.system.system_run import BOTH, command
from benchmarks.system.workloads import Tree
from examples.random_families import FAMILIES, make_family

LIMIT = 1e-4  # nats
REWARD = """
def distinct(prompts, completions, **columns):  # differs in nearly every group, so that every step trains
    return [len(set(completion[0]["content"])) for completion in completions]
"""
COLUMNS = ("policy/mismatch_max", "policy/mismatch_k3", "policy/entropy", "loss/grad_norm")


def run(name: str, folder: Path, steps: int) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of a whole run, its adapter moved by each step."""
    reward, data = folder / "distinct.py", folder / "data.jsonl"
    reward.write_text(REWARD)
    rows = [{"question": f"Say something about {word}", "answer": word} for word in "abcdefghijklmnopqrst"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: Tree = {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "steps": steps,
        "model": {"path": str(make_family(folder / "model", name)), "dtype": "float32"},
        "data": {"path": str(data), "eval": {"every": 0}},
        "rewards": [{"use": f"{reward}:distinct"}],
        "rollout": {
            "num_generations": 4, "max_prompt_length": 96, "max_completion_length": 24, "kv_cache": "32MiB",
        },
        "learner": {"groups_per_step": 3, "learning_rate": 1e-3},
        "trackers": [],
    }  # fmt: skip
    command(tree, ["-m", "learner.main", "--config"], [], limit_s=600)
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "policy/mismatch_max" in line]


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
