"""gleaner's engine against bare vLLM, and against transformers' generate: tokens per second, the sides taking turns.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.engine_speed [--sides gleaner vllm vllm+op hf "hf merged"]
    make smollm2 && PYTHONPATH=. .venv/bin/python -m benchmarks.engine.engine_speed --sides "vllm base" \
        --model build/smollm2/bfloat16 --dtype bfloat16 --groups 4 --max-tokens 96

The model is a random Llama of about 26M parameters whose every hundredth token ends a completion, so that lengths are
ragged by nature (about geometric, mean 100) on every side; the adapter is random, on all linear layers. Each side lives
in a process of its own (benchmarks/engine/engine_side.py), idle while another is at work; one run before the clock
warms up.

    mixed   every prompt is another, of 200 to 400 tokens
    shared  the prompts have 400 tokens, of which the first 384 are the same

With --model, a folder of a real model, its adapter is one that has not learned (B = 0), so that all sides sample the
same completions where they round alike, and the workload is another:

    text    every prompt asks in the model's chat template to write about another topic
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from rollout.vllm.environment import required_env

SIDES = ("gleaner", "vllm", "vllm+op", "vllm base", "hf", "hf merged")
VOCAB, END_EVERY = 8192, 100
TOPICS = ("the ocean", "bread", "the moon", "bicycles", "honey", "rivers", "chess", "volcanoes", "tea", "libraries",
          "gardens", "trains", "cheese", "penguins", "clouds", "guitars")  # fmt: skip
Found = dict[str, dict[str, list[dict[str, float]]]]  # workload -> side -> runs


def make_model(folder: Path, layers: int, hidden: int, rank: int) -> int:
    """Under folder/base and folder/adapter; returns the number of weights of the base."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ends = list(range(0, VOCAB, END_EVERY))
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    model.save_pretrained(folder / "base")
    return add_adapter(model, folder, rank, learned=True)


def link_model(folder: Path, model: str, dtype: str, rank: int) -> int:
    """The same of a model that is there."""
    (folder / "base").symlink_to(Path(model).resolve())
    auto: Any = AutoModelForCausalLM  # its methods carry no annotations
    return add_adapter(auto.from_pretrained(model, dtype=getattr(torch, dtype)), folder, rank, learned=False)


def add_adapter(model: Any, folder: Path, rank: int, *, learned: bool) -> int:
    """Under folder/adapter, random or with B = 0; returns the number of weights of the model."""
    sizes: list[int] = [weight.numel() for weight in model.parameters()]
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=not learned
    )
    get_peft_model(model, lora).save_pretrained(str(folder / "adapter"))
    return sum(sizes)


def workloads(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, VOCAB) for _ in range(count)]

    common = {"n": options.generations, "max_tokens": options.max_tokens, "batch": options.batch}
    if options.model is not None:
        return {"text": common | {"prompts": chats(options.model, options.groups)}}
    start = tokens(384)
    return {
        "mixed": common | {"prompts": [tokens(rng.randint(200, 400)) for _ in range(options.groups)]},
        "shared": common | {"prompts": [start + tokens(16) for _ in range(options.groups)]},
    }


def chats(model: str, count: int) -> list[list[int]]:
    """Token ids of a chat's prompt about each topic."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked = [[{"role": "user", "content": f"Write a short paragraph about {topic}."}] for topic in TOPICS[:count]]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in asked]


class Side:
    """A process that generates when asked."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any], threads: int) -> None:
        cuda = torch.cuda.is_available()
        env = os.environ | required_env(cuda) | {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "benchmarks.engine.engine_side", name, str(folder), json.dumps(settings)]
        self.name = name
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: the process ended with exit code {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, work: dict[str, Any], seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work | {"seed": seed}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(sides: list[Side], work: dict[str, dict[str, Any]], repeats: int) -> Found:
    """Side after side, repeat after repeat: what else the machine does hits all alike."""
    found: Found = {name: {side.name: [] for side in sides} for name in work}
    for name, what in work.items():
        for repeat in range(repeats + 1):  # the first warms up
            for side in sides:
                told = side.run(what, seed=10**7 * (repeat + 1))
                told["tokens_per_s"] = told["tokens"] / told["seconds"]
                print(name, side.name, "warm-up" if repeat == 0 else repeat, told, flush=True)
                if repeat > 0:
                    found[name][side.name].append(told)
    return found


def ratios(runs: dict[str, list[dict[str, float]]], other: str) -> list[float]:
    """gleaner's tokens per second over the other's, turn by turn."""
    pairs = zip(runs["gleaner"], runs[other], strict=True)
    return [ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in pairs]


def report(found: Found, told: dict[str, Any], weights: int, options: argparse.Namespace) -> str:
    rows = []
    for name, runs in found.items():
        for side, each in runs.items():
            against = ratios(runs, side)
            spread = f"{median(against):.2f} ({min(against):.2f} to {max(against):.2f})"
            length = sum(run["tokens"] for run in each) / sum(run["sequences"] for run in each)
            speed, cpu = (median(run[key] for run in each) for key in ("tokens_per_s", "cpu_seconds"))
            rows.append([name, side, f"{speed:.0f}", f"{cpu:.2f}", f"{length:.0f}", spread])
    header = ["prompts", "side", "tokens/s", "CPU-s", "mean length", "gleaner over it"]
    what = "Llama of random weights" if options.model is None else Path(options.model).parent.name
    return (
        f"# Generation: {options.groups} prompts x {options.generations} completions of up to {options.max_tokens} "
        f"tokens, {what} of {weights / 1e6:.0f}M, LoRA r = {options.rank}, {options.dtype}\n\n"
        f"{as_table(header, rows)}\n\n"
        f"Medians of {options.repeats} turns (in brackets the lowest and the highest), {options.threads} thread(s) "
        f"each, one side at work at a time. vLLM: {options.max_num_seqs} sequences at once, logprobs of the "
        f"sampled tokens. transformers: {options.batch} rows a batch, KV cache, no logprobs. vllm+op: with gleaner's "
        "LoRA kernel, so what is left of the difference is the wrapper. vllm base: without LoRA.\n\n"
        f"Conditions: {under(told, 'Wall time')}\n"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="gleaner is always among them")
    for name, default in {"groups": 16, "generations": 8, "max-tokens": 256, "repeats": 3, "threads": 1, "batch": 128,
                          "max-num-seqs": 128, "layers": 7, "hidden": 512, "rank": 16}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", help="folder of a model, in the place of the random one")
    parser.add_argument("--name", default="engine_speed", help="of the files of results")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def main() -> None:
    options = parse()
    told = conditions(ENGINE_PACKAGES)
    names = ["gleaner", *(side for side in options.sides if side != "gleaner")]
    settings = {"dtype": options.dtype, "max_model_len": 400 + options.max_tokens, "rank": options.rank,
                "kv_cache_bytes": 1 << 30, "max_num_seqs": options.max_num_seqs}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            weights = make_model(Path(folder), options.layers, options.hidden, options.rank)
        else:
            weights = link_model(Path(folder), options.model, options.dtype, options.rank)
        sides: list[Side] = []
        try:
            for name in names:
                sides.append(Side(name, Path(folder), settings, options.threads))
            found = measure(sides, workloads(options), options.repeats)
        finally:
            for side in sides:
                side.close()
    save(options.name, {"conditions": told, "runs": found}, report(found, told, weights, options))


if __name__ == "__main__":
    main()
