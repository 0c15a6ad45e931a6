"""Preference pairs for the demo: of two answers of its model to a sum the right one is preferred, as by a labeller.

    python -m examples.arithmetic_pairs OUT.jsonl [--sums 4000] [--seed 0]

The model (examples/tiny-arithmetic) answers each sum twice, by sampling; sums that it gets right or wrong both times
give no pair. The sums are far from those of a run (data.path: rg:chain_sum) and of examples/tiny_model.py.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model import CHAIN_SUM

MODEL = Path(__file__).with_name("tiny-arithmetic")
FIRST_SEED = 1_500_000_000  # reasoning_gym makes problem i of a data set from seed + i
AT_ONCE, MOST_TOKENS = 200, 64


def pairs(sums: int, seed: int) -> Iterator[dict[str, str]]:
    """Rows of prompt, chosen and rejected."""
    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    problems = reasoning_gym.create_dataset("chain_sum", size=sums, seed=FIRST_SEED + seed, **CHAIN_SUM)
    for first in range(0, sums, AT_ONCE):
        some = [problems[i] for i in range(first, min(first + AT_ONCE, sums))]
        for problem, answers in zip(some, _answers(model, tokenizer, [one["question"] for one in some]), strict=True):
            right = [answer for answer in answers if _number(answer) == problem["answer"]]
            wrong = [answer for answer in answers if answer and _number(answer) != problem["answer"]]
            if right and wrong:
                yield {"prompt": problem["question"], "chosen": right[0], "rejected": wrong[0]}


def _answers(model: Any, tokenizer: Any, questions: list[str]) -> list[tuple[str, str]]:
    """Two samples of each."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompts, do_sample=True, num_return_sequences=2, max_new_tokens=MOST_TOKENS)
    texts = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return list(zip(texts[::2], texts[1::2], strict=True))


def _number(answer: str) -> str | None:
    found = re.search(r"<answer>(-?\d+)</answer>", answer)
    return found and found[1]


def main() -> None:
    """Read the command line, write the file."""
    parser = argparse.ArgumentParser(description="Make preference pairs from the demo model's own answers.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--sums", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)  # not found missing after minutes of sampling
    rows = list(pairs(args.sums, args.seed))
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} pairs of {args.sums} sums -> {args.out}")


if __name__ == "__main__":
    main()
