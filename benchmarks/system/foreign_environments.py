"""An environment of another library, unchanged, through a whole run: vLLM, learner, ledger.

TRL's own `Game2048Env` of its example grpo_2048.py. Its moves are read by our parser, answered by the class, and scored
by the example's own reward function, which asks for the environments. The prompt is the example's, too.

    pip install --no-deps --target build/rivals -r benchmarks/requirements.txt          # the example imports trl
    PYTHONPATH=.:build/rivals .venv/bin/python -m benchmarks.system.foreign_environments trl_2048 \\
        TRL/examples/scripts/grpo_2048.py

verifiers' own `glossary` environment, a tool behind MCP. An episode takes seconds, since verifiers starts two processes
for it: so the run is small.

    python -m venv build/verifiers
    build/verifiers/bin/pip install verifiers==0.4.0 uv GLOSSARY      # environments/glossary of verifiers' repository
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.foreign_environments glossary build/verifiers/bin/python

An agent of openai-agents (benchmarks/system/public_agents.py), which knows OpenAI's client alone. Its policy is the
model of the tool demo, which calls a calculator at times.

    pip install --no-deps --target build/rivals-agents openai-agents==0.24.0 griffe griffelib
    PYTHONPATH=.:build/rivals-agents .venv/bin/python -m benchmarks.system.foreign_environments agents \\
        examples/tiny-tools

The policy of the others is a tiny model that is made first and shown episodes: games of random moves, some of which
end early; or tasks, each played once by hand straight through the adapter, some of them with another fact than the tool
said and some without a call. It writes moves, calls and answers as it should and seldom asks for the right name, so
that few rewards are 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, parser_of, save, under
from benchmarks.system.system_run import Tree, finished
from examples.tiny_model import END, PAD, Recipe, make_model, make_tokenizer, padded, train
from examples.tiny_tools import CHAT_TEMPLATE, QUESTION, SPECIAL, TAGS
from rewards.loader import load_own
from rollout import ledger
from rollout.env.adapters.verifiers import CHILD, Verifiers
from rollout.env.protocol import Sampled
from rollout.schema import Problem, parts_of

Part = tuple[str, bool]
"""A piece of an episode as text, special tokens included, and whether the policy says it."""
RECIPE = Recipe(vocabulary=700, heads=3, layers=2, steps=250, batch=8, learning_rate=4e-3)

DIRECTIONS = ("up", "down", "left", "right")
TURNS = 8

GLOSSARY = {
    "taskset": {"id": "glossary"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4},
}
IM_END = "<|im_end|>"
IM_SPECIAL = ["<|im_start|>", IM_END, "<|endoftext|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
IM_TEMPLATE = (  # Only whether there is one counts: verifiers' renderer writes the conversation.
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RENDERER = {"name": "qwen3"}
WRONG_FACT, NO_CALL = 0.3, 0.2  # shares of the episodes that the model is shown


def make_policy(
    folder: Path, draw: Callable[[random.Random], Sequence[Part]], special: Sequence[str], marks: Sequence[str],
    template: str, end: str, recipe: Recipe = RECIPE,
) -> None:  # fmt: skip
    """Writes to folder a tiny model that plays episodes as it was shown them, and its tokenizer: so another library's
    environment is played by a real policy, without a download.

    draw: one episode. special: tokens that decoding leaves out, of which `end` ends a turn; marks: tokens that it
    keeps. A special token must stand at each border of an episode's parts.
    """
    torch.manual_seed(0)
    rng = random.Random(0)
    texts = [text for _ in range(100) for text, _ in draw(rng)]
    tokenizer = make_tokenizer(texts, recipe, [PAD, *special], marks, template)
    tokenizer.eos_token = end
    model = make_model(tokenizer, recipe)

    def row() -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        for text, own in draw(rng):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            labels += piece if own else [-100] * len(piece)
        return ids, labels

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield padded([row() for _ in range(recipe.batch)], int(tokenizer.pad_token_id))

    train(model, batches(), recipe, autocast=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def played(folder: Path, data: str, tree: Tree, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the model at folder/model on the problems in a file there and reads the run's ledger back -> a dict for each
    trajectory: where it stood, how it ended, its reward and the parts of that, its turns, and how many of its tokens
    were sampled. Raises RunFailed."""
    common = {
        "steps": options.steps,
        "seed": options.seed,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / data), "prompt": "prompt", "eval": {"every": 0}},
        "trackers": [],
    }
    with finished(common | tree, options.limit) as run:
        return [one for path in ledger.steps(run / "rollouts") for one in _read(path)]


def _read(path: Path) -> list[dict[str, Any]]:
    table, told = ledger.read(path), []
    for row, parts in zip(table.to_pylist(), parts_of(table), strict=True):
        turns = [(turn["start"], turn["stop"]) for turn in row["turns"]]
        mask = [any(start <= place < stop for start, stop in turns) for place in range(len(row["completion_ids"]))]
        assert mask == row["loss_mask"], "the mask must be true on the turns and nowhere else"
        told.append({
            "step": int(path.stem.rpartition("-")[2]), "problem": row["problem_id"],
            "sample": row["sample"], "outcome": row["finish_reason"], "reward": row["reward"], "parts": parts,
            "turns": turns, "sampled": sum(mask), "tokens": len(mask), "versions": sorted(set(row["token_versions"])),
            "env_ms": [round(turn["env_ms"]) for turn in row["turns"]], "messages": json.loads(row["messages"] or "[]"),
        })  # fmt: skip
    return told


def report(title: str, about: str, found: Sequence[dict[str, Any]], shown: dict[str, Any], told: dict[str, Any]) -> str:
    """A row for each trajectory, and what was said in the one that is shown, after its prompt."""
    header = ["step", "problem", "sample", "outcome", "reward", "parts", "turns at", "tokens sampled", "policy version"]
    rows = [
        [
            str(one["step"]), one["problem"], str(one["sample"]), one["outcome"], _number(one["reward"]),
            ", ".join(f"{name} {_number(value)}" for name, value in one["parts"].items()),
            ", ".join(f"{start}-{stop}" for start, stop in one["turns"]), f"{one['sampled']} of {one['tokens']}",
            ", ".join(map(str, one["versions"])),
        ]
        for one in found
    ]  # fmt: skip
    said = "\n".join(json.dumps(message, ensure_ascii=False) for message in shown["messages"])
    return (
        f"# {title} through a whole run\n\n{about}, as the ledger of the run has it.\n\n{as_table(header, rows)}\n\n"
        f"Step {shown['step']}, {shown['problem']}, sample {shown['sample']}:\n\n```\n{said}\n```\n\n"
        f"{under(told, 'Nothing of this depends on the clock')}"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def game(prompt: str, rng: random.Random) -> list[Part]:
    """A game as the model is shown it: up to TURNS moves at random, then a word, which ends it."""
    tools = "<|system|>Tools: move(direction)<|end|>"
    shown: list[Part] = [(f"{tools}<|user|>{prompt}{_board(0, rng)}<|end|><|assistant|>", False)]
    for _ in range(rng.randint(1, TURNS)):
        move = json.dumps({"name": "move", "arguments": {"direction": rng.choice(DIRECTIONS)}})
        shown += [
            (f"<tool_call>{move}</tool_call>{END}", True),
            (f"<|tool|>{_board(rng.randrange(10), rng)}<|end|><|assistant|>", False),
        ]
    return [*shown, (f"enough{END}", True)]


def _board(merged: int, rng: random.Random) -> str:
    """Of the form of the class's answers; no game that could be played."""
    lines = "\n".join(" ".join(f"{rng.choice([0, 0, 2, 4, 8]):3d}" for _ in range(4)) for _ in range(4))
    return f"score={4.0 * merged}\n{lines}\ndone=False"


def trl_2048(options: argparse.Namespace, folder: Path) -> None:
    example = Path(options.source).resolve()
    prompt: str = vars(sys.modules[load_own(f"{example}:Game2048Env", "MyEnvironment").__module__])["PROMPT"]
    (folder / "games.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for _ in range(64)))
    make_policy(folder / "model", lambda rng: game(prompt, rng), SPECIAL[1:], TAGS, CHAT_TEMPLATE, END)
    tree: Tree = {
        "env": {
            "use": "trl_environment",
            "args": {"factory": f"{example}:Game2048Env", "rewards": [f"{example}:reward_score"]},
            "max_turns": TURNS, "step_timeout_s": 60,
        },
        "rollout": {
            "num_generations": 4, "max_prompt_length": 192, "max_completion_length": 768, "kv_cache": "64MiB",
            "max_num_seqs": 16, "process_memory": "4GiB",
        },
        "learner": {"learning_rate": 1e-3, "groups_per_step": 4},
    }  # fmt: skip
    found, told = played(folder, "games.jsonl", tree, options), conditions((*ENGINE_PACKAGES, "trl"))
    digest = sha256(example.read_bytes()).hexdigest()[:16]
    about = f"`Game2048Env` and `reward_score` of TRL's examples/scripts/grpo_2048.py (sha256 {digest}), unchanged"
    text = report("TRL's Game2048Env", about, found, found[-1], told)
    save("trl_2048", {"conditions": told, "trajectories": found}, text)


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
            self.said.append(f"<tool_call>\n{call}\n</tool_call>{IM_END}")
        else:
            found = self.asked[-1].rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
            self.said.append(f"<answer>{found}</answer>{IM_END}")
        ids = self._tokenizer.encode(self.said[-1], add_special_tokens=False)
        return Sampled(ids, [0.0] * len(ids), "stop")

    @property
    def episode(self) -> tuple[str, str, str, str]:
        """The prompt, the call, what came back, the answer."""
        before, after = self.asked
        call, answer = self.said
        assert after.startswith(before + call)
        return before, call, after.removeprefix(before + call), answer


async def by_hand(python: str, folder: Path) -> list[tuple[str, str, str, str]]:
    """Every task of the environment played once; they are also written to folder/tasks.jsonl."""
    (folder / "environment.json").write_text(json.dumps(GLOSSARY))
    listed = subprocess.run(
        [python, "-P", str(CHILD), "tasks", str(folder / "environment.json")],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    (folder / "tasks.jsonl").write_text(listed.stdout)
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    tokenizer = make_tokenizer([row["prompt"] for row in rows], RECIPE, [PAD, *IM_SPECIAL], MARKS, IM_TEMPLATE)
    tokenizer.save_pretrained(folder / "by_hand")
    program, episodes = Verifiers(python, GLOSSARY, str(folder / "by_hand"), RENDERER), []
    for row in rows:
        hand = Hand(tokenizer)
        problem = Problem("by-hand", ({"role": "user", "content": row["prompt"]},), row, (1,), 0, 0)
        print(row["prompt"], await program.run(problem, 0, hand), flush=True)
        episodes.append(hand.episode)
    return episodes


def task(episodes: Sequence[tuple[str, str, str, str]], rng: random.Random) -> list[Part]:
    """An episode as the model is shown it."""
    prompt, call, seen, answer = rng.choice(episodes)
    draw = rng.random()
    if draw < NO_CALL:
        return [(prompt, False), (f"<answer>I know it.</answer>{IM_END}", True)]
    if draw < NO_CALL + WRONG_FACT:
        answer = rng.choice(episodes)[3]
    return [(prompt, False), (call, True), (seen, False), (answer, True)]


def glossary(options: argparse.Namespace, folder: Path) -> None:
    python, model, recipe = options.source, folder / "model", replace(RECIPE, steps=600)
    episodes = asyncio.run(by_hand(python, folder))
    make_policy(model, lambda rng: task(episodes, rng), IM_SPECIAL, MARKS, IM_TEMPLATE, IM_END, recipe)
    tree: Tree = {
        "env": {
            "use": "verifiers",
            "args": {"python": python, "model": str(model), "renderer": RENDERER, "environment": GLOSSARY},
            "max_turns": 4, "concurrency": 4, "step_timeout_s": 120,
        },
        "rollout": {
            "num_generations": 4, "max_prompt_length": 512, "max_completion_length": 256, "kv_cache": "64MiB",
            "max_num_seqs": 8, "process_memory": "4GiB",
        },
        "learner": {"learning_rate": 1e-3, "groups_per_step": 2},
    }  # fmt: skip
    found, told = played(folder, "tasks.jsonl", tree, options), conditions()
    longest = max(found, key=lambda one: one["tokens"])
    about = "verifiers 0.4.0 and its `environments/glossary`, unchanged"
    text = report("verifiers' glossary environment", about, found, longest, told)
    save("verifiers_glossary", {"conditions": told, "trajectories": found}, text)


def agents(options: argparse.Namespace, folder: Path) -> None:
    (folder / "model").symlink_to(Path(options.source).resolve())
    rng = random.Random(options.seed)
    pairs = [[rng.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(2)] for digits in [2, 3, 4] * 8]
    rows = [{"prompt": QUESTION.format(a, b), "answer": str(a * b)} for a, b in pairs]
    (folder / "products.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: Tree = {
        "env": {
            "use": "program",
            "args": {"function": f"{Path(__file__).with_name('public_agents.py')}:solve"},
            "max_turns": 3, "concurrency": 4,
        },
        "rollout": {
            "num_generations": 4, "max_prompt_length": 64, "max_completion_length": 128, "kv_cache": "64MiB",
            "max_num_seqs": 16,
        },
        "learner": {"learning_rate": 5e-4, "groups_per_step": 4},
    }  # fmt: skip
    found, told = played(folder, "products.jsonl", tree, options), conditions((*ENGINE_PACKAGES, "openai-agents"))
    longest = max(found, key=lambda one: one["tokens"])
    about = "An agent of openai-agents with a calculator as its tool, the package unchanged"
    text = report("An agent of openai-agents", about, found, longest, told)
    save("openai_agents", {"conditions": told, "trajectories": found}, text)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("which", choices=("trl_2048", "glossary", "agents"))
    parser.add_argument("source", help="TRL's grpo_2048.py; the interpreter with verifiers; or examples/tiny-tools")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1200, help="seconds for the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as name:
        {"trl_2048": trl_2048, "glossary": glossary, "agents": agents}[options.which](options, Path(name))


if __name__ == "__main__":
    main()
