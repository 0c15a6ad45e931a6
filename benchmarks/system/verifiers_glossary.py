"""verifiers' own `glossary` environment (a tool behind MCP), unchanged, through a whole run: vLLM, learner, ledger.

    python -m venv build/verifiers
    build/verifiers/bin/pip install verifiers==0.4.0 uv GLOSSARY      # environments/glossary of verifiers' repository
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.verifiers_glossary build/verifiers/bin/python

The policy is a tiny model that is made first. To see how an episode is written, each task is played once by hand,
straight through the adapter; the model is then shown these episodes, some of them with another fact than the tool said
and some without a call. It writes calls and answers as it should and seldom asks for the right name, so few rewards are
1. An episode takes seconds, since verifiers starts two processes for it: so the run is small.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from benchmarks.common import ENGINE_PACKAGES, conditions, save, under
from benchmarks.system.tiny_policy import RECIPE, Part, make
from benchmarks.system.trajectories import conversation, played, small_run, table
from benchmarks.system.workloads import Tree
from examples.tiny_model import PAD, make_tokenizer
from rollout.env.adapters.verifiers import CHILD, Verifiers
from rollout.env.protocol import Sampled
from rollout.schema import Problem

ENVIRONMENT = {
    "taskset": {"id": "glossary"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4},
}
END = "<|im_end|>"
SPECIAL = ["<|im_start|>", END, "<|endoftext|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEMPLATE = (  # Only whether there is one counts: verifiers' renderer writes the conversation.
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RENDERER = {"name": "qwen3"}
LONGER = replace(RECIPE, steps=600)
WRONG_FACT, NO_CALL = 0.3, 0.2  # shares of the episodes that the model is shown


class Hand:
    """A policy by hand, for one episode: calls the tool, then says what it was told. Keeps what it was asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.asked: list[str] = []
        self.said: list[str] = []

    async def generate(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Sampled:
        self.asked.append(str(self._tokenizer.decode(list(token_ids))))
        if len(self.asked) == 1:
            name = re.findall(r'look up "([^"]+)"', self.asked[0])[-1]
            call = json.dumps({"name": "facts_lookup", "arguments": {"name": name}})
            self.said.append(f"<tool_call>\n{call}\n</tool_call>{END}")
        else:
            found = self.asked[-1].rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
            self.said.append(f"<answer>{found}</answer>{END}")
        ids = self._tokenizer.encode(self.said[-1], add_special_tokens=False)
        return Sampled(ids, [0.0] * len(ids), "stop")

    @property
    def episode(self) -> tuple[str, str, str, str]:
        """The prompt, the call, what came back, the answer."""
        before, after = self.asked
        call, answer = self.said
        assert after.startswith(before + call)
        return before, call, after.removeprefix(before + call), answer


def tasks(python: str, folder: Path) -> list[dict[str, Any]]:
    """The environment's tasks as data, which are also written to folder/tasks.jsonl."""
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    listed = subprocess.run(
        [python, "-P", str(CHILD), "tasks", str(folder / "environment.json")],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    (folder / "tasks.jsonl").write_text(listed.stdout)
    return [json.loads(line) for line in listed.stdout.splitlines()]


async def by_hand(python: str, folder: Path, rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Every task played once."""
    tokenizer = make_tokenizer([row["prompt"] for row in rows], RECIPE, [PAD, *SPECIAL], MARKS, TEMPLATE)
    tokenizer.save_pretrained(folder / "by_hand")
    program, episodes = Verifiers(python, ENVIRONMENT, str(folder / "by_hand"), RENDERER), []
    for row in rows:
        hand = Hand(tokenizer)
        problem = Problem("by-hand", ({"role": "user", "content": row["prompt"]},), row, (1,), 0, 0)
        print(row["prompt"], await program.run(problem, 0, hand), flush=True)
        episodes.append(hand.episode)
    return episodes


def shown(episodes: Sequence[tuple[str, str, str, str]], rng: random.Random) -> list[Part]:
    """An episode as the model is shown it."""
    prompt, call, seen, answer = rng.choice(episodes)
    draw = rng.random()
    if draw < NO_CALL:
        return [(prompt, False), (f"<answer>I know it.</answer>{END}", True)]
    if draw < NO_CALL + WRONG_FACT:
        answer = rng.choice(episodes)[3]
    return [(prompt, False), (call, True), (seen, False), (answer, True)]


def tree(python: str, folder: Path, steps: int, seed: int) -> Tree:
    """The run's configuration."""
    return small_run(folder, "tasks.jsonl", steps, seed) | {
        "env": {
            "use": "verifiers",
            "args": {
                "python": python, "model": str(folder / "model"), "renderer": RENDERER, "environment": ENVIRONMENT,
            },
            "max_turns": 4,
            "concurrency": 4,
            "step_timeout_s": 120,
        },
        "rollout": {
            "num_generations": 4, "max_prompt_length": 512, "max_completion_length": 256, "kv_cache": "64MiB",
            "max_num_seqs": 8, "process_memory": "4GiB",
        },
        "learner": {"learning_rate": 1e-3, "groups_per_step": 2},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="interpreter of the virtual environment with verifiers, uv and glossary")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1200, help="seconds for the run")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as name:
        folder = Path(name)
        episodes = asyncio.run(by_hand(options.python, folder, tasks(options.python, folder)))
        make(folder / "model", lambda rng: shown(episodes, rng), SPECIAL, MARKS, TEMPLATE, END, LONGER)
        found = played(tree(options.python, folder, options.steps, options.seed), folder, options.limit)
    longest = max(found, key=lambda one: one["tokens"])
    text = (
        "# verifiers' glossary environment through a whole run\n\nverifiers 0.4.0 and its `environments/glossary`, "
        f"unchanged, as the ledger of {options.steps} steps has it.\n\n{table(found)}\n\n"
        f"{conversation(longest)}\n\n{under(told, 'Nothing of this depends on the clock')}"
    )
    save("verifiers_glossary", {"conditions": told, "trajectories": found}, text)


if __name__ == "__main__":
    main()
