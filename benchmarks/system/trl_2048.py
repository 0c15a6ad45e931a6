"""An environment class of TRL's own, `Game2048Env` of its example grpo_2048.py, unchanged, through a whole run: vLLM,
learner, ledger.

    pip install --no-deps --target build/rivals -r benchmarks/requirements.txt          # the example imports trl
    PYTHONPATH=.:build/rivals .venv/bin/python -m benchmarks.system.trl_2048 TRL/examples/scripts/grpo_2048.py

The policy is a tiny model that is made first and shown games of random moves, some of which end early. Its moves are
read by our parser, answered by the class, and scored by the example's own reward function, which asks for the
environments. The prompt is the example's, too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from benchmarks.common import ENGINE_PACKAGES, conditions, save, under
from benchmarks.system.tiny_policy import RECIPE, Part, make
from benchmarks.system.trajectories import conversation, played, small_run, table
from benchmarks.system.workloads import Tree
from examples.tiny_model import END
from examples.tiny_tools import CHAT_TEMPLATE, SPECIAL, TAGS
from rewards.loader import load_own

DIRECTIONS = ("up", "down", "left", "right")
TURNS = 8


def shown(prompt: str, rng: random.Random) -> list[Part]:
    """A game as the model is shown it: up to TURNS moves at random, then a word, which ends it."""
    tools = "<|system|>Tools: move(direction)<|end|>"
    game: list[Part] = [(f"{tools}<|user|>{prompt}{_board(0, rng)}<|end|><|assistant|>", False)]
    for _ in range(rng.randint(1, TURNS)):
        move = json.dumps({"name": "move", "arguments": {"direction": rng.choice(DIRECTIONS)}})
        game += [
            (f"<tool_call>{move}</tool_call>{END}", True),
            (f"<|tool|>{_board(rng.randrange(10), rng)}<|end|><|assistant|>", False),
        ]
    return [*game, (f"enough{END}", True)]


def _board(merged: int, rng: random.Random) -> str:
    """Of the form of the class's answers; no game that could be played."""
    rows = "\n".join(" ".join(f"{rng.choice([0, 0, 2, 4, 8]):3d}" for _ in range(4)) for _ in range(4))
    return f"score={4.0 * merged}\n{rows}\ndone=False"


def tree(example: str, folder: Path, steps: int, seed: int) -> Tree:
    """The run's configuration."""
    return small_run(folder, "games.jsonl", steps, seed) | {
        "env": {
            "use": "trl_environment",
            "args": {"factory": f"{example}:Game2048Env", "rewards": [f"{example}:reward_score"]},
            "max_turns": TURNS,
            "step_timeout_s": 60,
        },
        "rollout": {
            "num_generations": 4, "max_prompt_length": 192, "max_completion_length": 768, "kv_cache": "64MiB",
            "max_num_seqs": 16, "process_memory": "4GiB",
        },
        "learner": {"learning_rate": 1e-3, "groups_per_step": 4},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path, help="grpo_2048.py of TRL's repository")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=900, help="seconds for the run")
    options = parser.parse_args()
    told = conditions((*ENGINE_PACKAGES, "trl"))
    example = str(options.example.resolve())
    prompt: str = vars(sys.modules[load_own(f"{example}:Game2048Env", "MyEnvironment").__module__])["PROMPT"]
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as name:
        folder = Path(name)
        (folder / "games.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for _ in range(64)))
        make(folder / "model", lambda rng: shown(prompt, rng), SPECIAL[1:], TAGS, CHAT_TEMPLATE, END, RECIPE)
        found = played(tree(example, folder, options.steps, options.seed), folder, options.limit)
    digest = sha256(options.example.read_bytes()).hexdigest()
    text = (
        "# TRL's Game2048Env through a whole run\n\n`Game2048Env` and `reward_score` of TRL's "
        f"examples/scripts/grpo_2048.py (sha256 {digest[:16]}), unchanged, as "
        f"the ledger of {options.steps} steps has it.\n\n{table(found)}\n\n{conversation(found[-1])}\n\n"
        f"{under(told, 'Nothing of this depends on the clock')}"
    )
    save("trl_2048", {"conditions": told, "trajectories": found}, text)


if __name__ == "__main__":
    main()
