"""The learner's step on a real model: packed, with each completion in a row of its own, and by transformers and PEFT.

    make smollm2 && OMP_NUM_THREADS=1 PYTHONPATH=. .venv/bin/python -m benchmarks.learner.real_step

SmolLM2-135M-Instruct (examples/smollm2.py), LoRA r = 32 on all linear layers, 4 groups of 8 completions: chat prompts
of about 40 tokens, completions of 24 to 120, whose tokens are English text. One thread, CPU-seconds of the process; the
ways take turns, step by step.

    packed        as it ships: completions of a group share their prompt in one row
    rows          micro-batches padded, as where packing is refused
    transformers  the same micro-batches through the model as PEFT makes it, all logits of the completions, autograd

Where the learner multiplies float32 matrices by another library than torch's default (learner.trainer.float32_products,
on AMD's processors), its ways do so, and a fourth way is transformers with that library.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import LEARNER_PACKAGES, as_table, conditions, in_turns, parser_of, save, under
from benchmarks.engine.engine_speed import chats
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.model import packing_check
from learner.trainer.float32_products import choose_library, library, use_library
from learner.trainer.trainer import Trainer
from rollout.fakes import make_group
from rollout.types import Completion

GROUPS, GENERATIONS, RANK, MICRO_BATCH = 4, 8, 32, 8
TEXT = (
    "The ocean covers most of the planet, and nobody has seen all of its floor. Bread rises because yeast eats sugar "
    "and breathes out gas. Honey never spoils, since it holds too little water for anything to grow in it. A river "
    "begins as a small stream in the hills and ends as a wide, slow mouth at the sea. Chess has more games than there "
    "are atoms in the sky, yet children learn its rules in an afternoon. "
)
Rows = list[tuple[list[int], list[int]]]  # prompt, completion


def make_rows(model: str) -> Rows:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rng, text = np.random.default_rng(0), tokenizer(TEXT).input_ids
    rows = []
    for prompt in chats(model, GROUPS):
        for length in rng.integers(24, 121, GENERATIONS):
            start = int(rng.integers(0, len(text)))
            rows.append((prompt, (text * 3)[start : start + int(length)]))
    return rows


def trainer_of(model: str, dtype: Any, rows: Rows, *, packed: bool) -> Callable[[], object]:
    learner = LearnerConfig.model_validate({"lora": {"rank": RANK, "alpha": 2 * RANK}, "learning_rate": 1e-6})
    with mock.patch.object(packing_check, "enable", packing_check.enable if packed else lambda *args: False):
        trainer = Trainer(
            ModelConfig(path=model, dtype=dtype), learner, temperature=1.0,
            max_completion_length=max(len(ids) for _, ids in rows), total_steps=1000, seed=0, device="cpu",
        )  # fmt: skip
    assert trainer._policy.packed == packed, f"{dtype}: packing was refused"
    groups = []
    for start in range(0, len(rows), GENERATIONS):
        own = rows[start : start + GENERATIONS]
        completions = [
            Completion(
                np.array(ids, np.int32), np.full(len(ids), -1.0, np.float32), "stop", np.zeros(len(ids), np.int32)
            )
            for _, ids in own
        ]
        rewards = [float(number % 2) for number in range(len(own))]
        groups.append(make_group(completions=completions, rewards=rewards, prompt_ids=[prompt for prompt, _ in own]))
    return lambda: trainer._step(groups)


def transformers_of(model: str, dtype: str, rows: Rows) -> Callable[[], object]:
    auto: Any = AutoModelForCausalLM  # its methods carry no annotations
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    lm: Any = get_peft_model(auto.from_pretrained(model, dtype=getattr(torch, dtype)), lora)
    by_length = sorted(rows, key=lambda row: -len(row[0]) - len(row[1]))

    def step() -> None:
        for start in range(0, len(rows), MICRO_BATCH):
            some = by_length[start : start + MICRO_BATCH]
            width = max(len(prompt) + len(ids) for prompt, ids in some)
            keep = max(len(ids) for _, ids in some) + 1
            ids, scored = torch.zeros(len(some), width, dtype=torch.int64), torch.zeros(len(some), width)
            for place, (prompt, completion) in enumerate(some):  # padded on the left, as generate's rows are
                whole = torch.tensor([*prompt, *completion])
                ids[place, width - len(whole) :], scored[place, width - len(completion) :] = whole, 1.0
            mask = torch.tensor([[0] * (width - len(p) - len(c)) + [1] * (len(p) + len(c)) for p, c in some])
            logits = lm(input_ids=ids, attention_mask=mask, logits_to_keep=keep, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1 - keep :, None])[..., 0]
            torch.autograd.backward((logprobs * scored[:, 1 - keep :]).sum())
        for weight in lm.parameters():
            weight.grad = None

    return step


def by_library(name: str, step: Callable[[], object]) -> Callable[[], object]:
    """The step with this library of float32 products."""

    def with_library() -> None:
        use_library(name)
        step()

    return with_library


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"), help="holds a folder for each type")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    choose_library()
    chosen, default = library(), "default"
    told, found, cells = conditions(LEARNER_PACKAGES), {}, []
    for dtype in options.dtypes:
        model = str(options.folder / dtype)
        rows = make_rows(model)
        plain = transformers_of(model, dtype, rows)
        ways = {
            "packed": by_library(chosen, trainer_of(model, dtype, rows, packed=True)),
            "rows": by_library(chosen, trainer_of(model, dtype, rows, packed=False)),
            "transformers": by_library(default, plain),
        }
        if chosen != default:
            ways[f"transformers, {chosen}"] = by_library(chosen, plain)
        found[dtype] = in_turns(ways, options.repeats, dtype)
        for name, each in found[dtype].items():
            turns = [own / packed for own, packed in zip(each, found[dtype]["packed"], strict=True)]
            spread = f"{median(turns):.2f} ({min(turns):.2f} to {max(turns):.2f})"
            cells.append([dtype, name, f"{median(each):.1f}", spread])
    tokens = sum(len(completion) for _, completion in rows)
    table = as_table(["type", "way", "CPU-s", "over packed"], cells)
    text = (
        f"# One step of the learner on SmolLM2-135M-Instruct: {GROUPS} x {GENERATIONS} completions, {tokens} tokens, "
        f"LoRA r = {RANK}\n\n{table}\n\nMedians of {options.repeats} turns (in brackets the lowest and the highest "
        f"ratio), transformers: no update. Float32 products of the learner by {chosen}.\n\n"
        f"Conditions: {under(told, 'CPU time of one thread')}\n"
    )
    save("real_step", {"conditions": told, "completion_tokens": tokens, "seconds": found}, text)


if __name__ == "__main__":
    main()
