"""What whole systems are compared on: a configuration of gleaner, which benchmarks/system/trl_system.py reads as well.

    ragged   random weights (benchmarks/system/ragged_model.py), prompts of 200 to 400 tokens, completions that end by
    chance demo     the README's demo: examples/tiny-arithmetic learns sums, as in configs/local_cpu.yaml

Loads no torch: the reward functions' processes import it for `even_words`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROMPT_WORDS = (200, 400)
TEMPLATE_TOKENS = 2  # of the chat template, around the words of a prompt

Tree = dict[str, Any]


def even_words(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that random weights can move: the share of words w<even number>; 0.0 for an empty completion."""
    texts = [completion[0]["content"].split() for completion in completions]
    return [sum(word.endswith(("0", "2", "4", "6", "8")) for word in words) / max(len(words), 1) for words in texts]


def add_ragged_options(parser: argparse.ArgumentParser) -> None:
    """The shape of the ragged workload."""
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--steps", type=int, default=8, help="ragged: optimizer steps that count")
    parser.add_argument("--skip", type=int, default=2, help="ragged: steps before those")
    parser.add_argument("--groups", type=int, default=8, help="ragged: groups per step")
    parser.add_argument("--generations", type=int, default=8, help="ragged: completions per group")
    parser.add_argument("--completion", type=int, default=256, help="ragged: most tokens of a completion")
    parser.add_argument("--end-rate", type=float, default=0.01, help="ragged: probability of the end, per token")
    parser.add_argument("--kv-cache", default="1GiB", help="ragged: of gleaner's generator")


def ragged(folder: Path, options: argparse.Namespace) -> Tree:
    """Writes model and problems under `folder` and returns the configuration that uses them."""
    from benchmarks.system.ragged_model import make_model  # loads torch

    longest = PROMPT_WORDS[1] + TEMPLATE_TOKENS
    make_model(folder / "model", end_rate=options.end_rate, context=longest + options.completion)
    rng, steps = random.Random(0), options.steps + options.skip
    rows = [
        {"question": " ".join(f"w{rng.randrange(8000)}" for _ in range(rng.randint(*PROMPT_WORDS)))}
        for _ in range(steps * options.groups)
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "steps": steps,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "problems.jsonl"), "eval": {"every": 0}},
        "rewards": [{"use": f"{Path(__file__).absolute()}:even_words"}],
        "rollout": {
            "num_generations": options.generations,
            "max_prompt_length": longest,
            "max_completion_length": options.completion,
            "kv_cache": options.kv_cache,
        },
        "learner": {"groups_per_step": options.groups, "learning_rate": 1e-5},
        "checkpoint": {"every": steps},
        "trackers": [],
    }


def demo(steps: int, every: int) -> Tree:
    """configs/local_cpu.yaml, evaluated every `every` steps and saved at the end only."""
    from cluster.reading import read_yaml

    tree = read_yaml(ROOT / "configs" / "local_cpu.yaml")
    tree["model"]["path"] = str(ROOT / tree["model"]["path"])
    tree["data"]["eval"]["every"] = every
    return tree | {"steps": steps, "checkpoint": {"every": steps}, "trackers": []}


def demo_of_one(steps: int, every: int) -> Tree:
    """`demo` with one generator, which gets adapters: for what compares pushes, looks at one generator, or trains all
    weights."""
    tree = demo(steps, every)
    tree["rollout"]["workers"], tree["learner"]["push"] = 1, "adapter"
    return tree
