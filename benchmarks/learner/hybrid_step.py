"""The learner's step on models whose layers carry a state along, or whose attention has sinks, packed against padded.

    OMP_NUM_THREADS=1 PYTHONPATH=. .venv/bin/python -m benchmarks.learner.hybrid_step

A random Qwen3.5 with the widths below, three layers of the gated delta rule to one of attention, and a random gpt-oss,
whose every other layer has a sliding window; LoRA r = 32 on all-linear, float32, one group of 8 completions. One
thread, CPU-seconds of the process for a whole step (logprobs, loss, backward pass, AdamW); the two take turns, step by
step.

    packed   as it ships: the prompt is computed once, completions go on from its state (learner.model.recurrence), or
             see its keys (learner.model.attention)
    padded   each completion with its own prompt, as where packing is refused
"""

from __future__ import annotations

import tempfile
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3_5TextConfig

from benchmarks.common import LEARNER_PACKAGES, as_table, conditions, in_turns, parser_of, save, spread, under
from benchmarks.learner.real_step import RANK, trainer_of
from examples.random_model import make_tokenizer

SHARED: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 259,
}  # fmt: skip
SHAPES: dict[str, Any] = {
    "Qwen3.5": Qwen3_5TextConfig(
        **SHARED, intermediate_size=1536, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    "gpt-oss": GptOssConfig(
        **SHARED, intermediate_size=512, num_local_experts=8, num_experts_per_tok=2, sliding_window=128
    ),
}  # fmt: skip
# Tokens of the prompt, and of each completion.
WORKLOADS = {
    "P = 512, L = 64": (512, [64] * 8),
    "P = 64, L = 128": (64, [128] * 8),
    "P = 256, L = 16 to 256": (256, [16, 30, 50, 75, 105, 145, 195, 256]),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    told, cells = conditions(LEARNER_PACKAGES), list[list[str]]()
    found: dict[str, Any] = {}
    for shape, config in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
            for workload, (prompt, lengths) in WORKLOADS.items():
                rng, name = np.random.default_rng(0), f"{shape}, {workload}"
                ids, *completions = (rng.integers(0, config.vocab_size, n).tolist() for n in (prompt, *lengths))
                rows = [(ids, completion) for completion in completions]
                steps = {
                    way: trainer_of(folder, "float32", rows, packed=way == "packed") for way in ("packed", "padded")
                }
                found[name] = in_turns(steps, options.repeats, name)
                ratios = [own / other for own, other in zip(found[name]["padded"], found[name]["packed"], strict=True)]
                cells.append([name, *(f"{median(found[name][way]):.2f}" for way in steps), spread(ratios)])
    text = (
        "# One step of the learner on a Qwen3.5 and a gpt-oss shape, packed and padded: one group of 8, "
        f"LoRA r = {RANK}\n\n"
        f"{as_table(['tokens', 'packed CPU-s', 'padded CPU-s', 'padded / packed'], cells)}\n\n"
        "P tokens of the prompt, L of each completion. Random models in float32, of "
        f"{SHARED['num_hidden_layers']} layers, H = {SHARED['hidden_size']}, V = {SHARED['vocab_size']}. Qwen3.5: "
        "three layers with the gated delta rule, by transformers' function of torch, and one of attention. gpt-oss: "
        "attention with sinks, every other layer with a window of 128, and 8 experts, of which a token goes to 2. "
        f"Medians of {options.repeats} steps in which the two took turns; ratios by turn, with the lowest and the "
        "highest.\n\n"
        f"Conditions: {under(told, 'CPU time of one thread')}\n"
    )
    save("hybrid_step", {"conditions": told, "seconds": found}, text)


if __name__ == "__main__":
    main()
