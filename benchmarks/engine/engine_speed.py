"""gleaner's engine against bare vLLM, and against transformers' generate: tokens per second, the sides taking turns.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.engine_speed [--sides gleaner vllm vllm+op hf "hf merged"]
    make smollm2 && PYTHONPATH=. .venv/bin/python -m benchmarks.engine.engine_speed --sides "vllm base" \
        --model build/smollm2/bfloat16 --dtype bfloat16 --groups 4 --max-tokens 96

The model is a random Llama of about 26M parameters whose every hundredth token ends a completion, so that lengths are
ragged by nature (about geometric, mean 100) on every side; the adapter is random, on all linear layers. Each side lives
in a process of its own, idle while another is at work; one run before the clock warms up.

    gleaner    rollout.vllm.engine.VllmEngine, every group submitted at once
    vllm       vllm.LLM.generate, as it comes
    vllm+op    the same with gleaner's LoRA kernel for CPUs, so that the wrapper alone is the difference to gleaner
    vllm base  vllm.LLM.generate as it comes, without an adapter and without LoRA
    hf         transformers generate with PEFT's unmerged adapter, rows of a batch padded on the left
    hf merged  the same with the adapter merged into the weights

    mixed   every prompt is another, of 200 to 400 tokens
    shared  the prompts have 400 tokens, of which the first 384 are the same

With --model, a folder of a real model, its adapter is one that has not learned (B = 0), so that all sides sample the
same completions where they round alike, and the workload is another:

    text    every prompt asks in the model's chat template to write about another topic
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import as_table, conditions, parser_of, save, under
from rollout.engine import EngineSettings
from rollout.types import Adapter, Sampling
from rollout.vllm.arguments import engine_arguments, lora_arguments
from rollout.vllm.convert import Resident, completion_params, lora_request
from rollout.vllm.environment import required_env

VOCAB, END_EVERY = 8192, 100
TOPICS = ("the ocean", "bread", "the moon", "bicycles", "honey", "rivers", "chess", "volcanoes", "tea", "libraries",
          "gardens", "trains", "cheese", "penguins", "clouds", "guitars")  # fmt: skip
Found = dict[str, dict[str, list[dict[str, float]]]]  # workload -> side -> runs
Work = dict[str, Any]  # prompts: list of token ids, n, max_tokens, batch (rows of one HF batch), seed
Generate = Callable[[Work], list[int]]  # -> tokens of each completion
SEED_STEP = 10_000


def settings(folder: Path, options: dict[str, Any]) -> EngineSettings:
    return EngineSettings(
        model=str(folder / "base"), dtype=options["dtype"], max_model_len=options["max_model_len"],
        kv_cache_bytes=options["kv_cache_bytes"], max_num_seqs=options["max_num_seqs"],
        max_lora_rank=options["rank"], adapter_window=2, seed=0,
    )  # fmt: skip


def samplings(work: Work) -> list[Sampling]:
    """One for each prompt; every row has a seed of its own."""
    return [
        Sampling(n=work["n"], max_tokens=work["max_tokens"], seed=work["seed"] + SEED_STEP * index)
        for index in range(len(work["prompts"]))
    ]


def gleaner(folder: Path, options: dict[str, Any]) -> Generate:
    from rollout.vllm.engine import VllmEngine

    engine = VllmEngine(settings(folder, options))
    payload = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    asyncio.run(engine.load_adapter(Adapter.build(0, payload, config)))

    async def all_at_once(work: Work) -> list[int]:
        pairs = zip(work["prompts"], samplings(work), strict=True)
        groups = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in pairs))
        return [len(completion.token_ids) for group in groups for completion in group]

    return lambda work: asyncio.run(all_at_once(work))


def vllm(folder: Path, options: dict[str, Any], lora: bool = True) -> Generate:
    from vllm import LLM, TokensPrompt
    from vllm.platforms import current_platform

    arguments = engine_arguments(settings(folder, options), bool(current_platform.is_cuda()))
    rank = options["rank"]
    arguments.pop("ir_op_priority", None)  # a kernel of gleaner's, which it installs
    if not lora:
        ours = ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules", "lora_dtype")
        arguments = {name: value for name, value in arguments.items() if name not in ours}
    else:  # which layers: an engine of gleaner's asks as it is built
        arguments |= lora_arguments(arguments["model"], arguments["lora_target_modules"])
    llm = LLM(**arguments)
    adapter = lora_request(Resident(0, "", folder / "adapter", frozenset(), rank, lora_id=1)) if lora else None

    def generate(work: Work) -> list[int]:
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in work["prompts"]],
            [completion_params(sampling) for sampling in samplings(work)],
            lora_request=adapter,
            use_tqdm=False,
        )
        return [len(part.token_ids) for output in outputs for part in output.outputs]

    return generate


def vllm_with_op(folder: Path, options: dict[str, Any]) -> Generate:
    from rollout.vllm.cpu import install_fast_cpu_lora

    assert install_fast_cpu_lora()
    return vllm(folder, options)


def hf(folder: Path, options: dict[str, Any], merged: bool = False) -> Generate:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=getattr(torch, options["dtype"]))
    model: Any = PeftModel.from_pretrained(base.to(device), folder / "adapter").eval()
    if merged:
        model = model.merge_and_unload()
    ends = torch.tensor(model.generation_config.eos_token_id, device=device)

    def lengths(completions: Any) -> list[int]:
        """Tokens up to the first end token, which counts."""
        ended = torch.isin(completions, ends)
        first = torch.where(ended.any(1), ended.int().argmax(1) + 1, completions.shape[1])
        return [int(length) for length in first]

    @torch.inference_mode()
    def generate(work: Work) -> list[int]:
        torch.manual_seed(work["seed"])
        rows = [prompt for prompt in work["prompts"] for _ in range(work["n"])]
        found: list[int] = []
        for start in range(0, len(rows), work["batch"]):
            batch = rows[start : start + work["batch"]]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in batch], device=device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=device)
            out = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, temperature=1.0, pad_token_id=0,
                max_new_tokens=work["max_tokens"],
            )  # fmt: skip
            found += lengths(out[:, width:])
        return found

    return generate


SIDES: dict[str, Callable[[Path, dict[str, Any]], Generate]] = {
    "gleaner": gleaner,
    "vllm": vllm,
    "vllm+op": vllm_with_op,
    "vllm base": lambda folder, options: vllm(folder, options, lora=False),
    "hf": hf,
    "hf merged": lambda folder, options: hf(folder, options, merged=True),
}


def answer(side: str, folder: Path, options: dict[str, Any]) -> None:
    """In a side's own process: builds its engine, then reads workloads as JSON lines and generates for each."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print; only answers go up the pipe
    generate = SIDES[side](folder, options)
    print(json.dumps({"ready": side}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = generate(work)
        told = {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": sum(tokens),
            "sequences": len(tokens),
        }
        print(json.dumps(told), file=answers, flush=True)


def make_model(folder: Path, layers: int, hidden: int, rank: int) -> int:
    """Under folder/base and folder/adapter; returns the number of weights of the base."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

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
    import torch
    from transformers import AutoModelForCausalLM

    (folder / "base").symlink_to(Path(model).resolve())
    auto: Any = AutoModelForCausalLM  # its methods carry no annotations
    return add_adapter(auto.from_pretrained(model, dtype=getattr(torch, dtype)), folder, rank, learned=False)


def add_adapter(model: Any, folder: Path, rank: int, *, learned: bool) -> int:
    """Under folder/adapter, random or with B = 0; returns the number of weights of the model."""
    from peft import LoraConfig, get_peft_model

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
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked = [[{"role": "user", "content": f"Write a short paragraph about {topic}."}] for topic in TOPICS[:count]]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in asked]


class Side:
    """A process that generates when asked."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any], threads: int) -> None:
        import torch

        cuda = torch.cuda.is_available()
        env = os.environ | required_env(cuda) | {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
        command = [
            sys.executable,
            "-m",
            "benchmarks.engine.engine_speed",
            "--side",
            name,
            str(folder),
            json.dumps(settings),
        ]
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
    parser = parser_of(__doc__)
    parser.add_argument(
        "--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="gleaner is always among them"
    )
    for name, default in {"groups": 16, "generations": 8, "max-tokens": 256, "repeats": 3, "threads": 1, "batch": 128,
                          "max-num-seqs": 128, "layers": 7, "hidden": 512, "rank": 16}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", help="folder of a model, in the place of the random one")
    parser.add_argument("--name", default="engine_speed", help="of the files of results")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def main() -> None:
    options = parse()
    told = conditions()
    names = ["gleaner", *(side for side in options.sides if side != "gleaner")]
    given = {"dtype": options.dtype, "max_model_len": 400 + options.max_tokens, "rank": options.rank,
             "kv_cache_bytes": 1 << 30, "max_num_seqs": options.max_num_seqs}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            weights = make_model(Path(folder), options.layers, options.hidden, options.rank)
        else:
            weights = link_model(Path(folder), options.model, options.dtype, options.rank)
        sides: list[Side] = []
        try:
            for name in names:
                sides.append(Side(name, Path(folder), given, options.threads))
            found = measure(sides, workloads(options), options.repeats)
        finally:
            for side in sides:
                side.close()
    save(options.name, {"conditions": told, "runs": found}, report(found, told, weights, options))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:  # as Side starts it
        answer(sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        main()
