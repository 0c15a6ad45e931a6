"""What each setting of the engine costs on a CPU: its start, and CPU-seconds per 1000 completion tokens.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.engine_settings                # everything; --only NAME ... for
    some PYTHONPATH=. .venv/bin/python -m benchmarks.engine.engine_settings --models demo --rounds 5

Every line is what runs use (`as shipped`) but for the one thing it names. Each measurement is a process of its own,
since most settings stand before torch is imported; settings take turns in every round, and the table holds the smallest
of the rounds, which other work on the machine disturbs least. Two workloads, 8 groups of 8 completions that never end
by themselves:

    demo    the demo's model (0.4M weights), prompts of 30 tokens, completions of 45
    25M     a random Llama (V 8000, H 384, 12 layers), prompts of 200 to 400 tokens, completions of 16 to 128
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import as_table, as_text, conditions, cpu_seconds, save
from cluster.ray_actor import uncollected
from rollout.engine import EngineSettings
from rollout.types import Sampling
from rollout.vllm.adapter_cache import Resident
from rollout.vllm.environment import required_env

GROUPS, GENERATIONS, RANK = 8, 8, 16
DEMO = Path(__file__).parents[2] / "examples" / "tiny-arithmetic"
PROMPTS = {"demo": (30, 30), "25M": (200, 400)}
COMPLETIONS = {"demo": (45, 45), "25M": (16, 128)}
KV_BYTES = {"demo": 64 << 20, "25M": 1 << 30}


@dataclass(frozen=True)
class Setting:
    """How a line differs from `as shipped`. arguments: of vllm.EngineArgs; env: null takes a variable away."""

    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    adapter: bool = True
    upstream_lora: bool = False
    slots: int = 2
    seeded: bool = True
    logprobs: bool = True


SETTINGS = {
    "as shipped": Setting(),
    "blocks of 128 tokens (vLLM's default)": Setting({"block_size": 128}),
    "blocks of 64 tokens": Setting({"block_size": 64}),
    "no adapter (as if merged)": Setting(adapter=False),
    "no adapter, compiled": Setting({"enforce_eager": False}, {"TORCH_COMPILE_DISABLE": None}, adapter=False),
    "vLLM's own LoRA op": Setting(upstream_lora=True),
    "4 adapter slots": Setting(slots=4),
    "no prefix cache": Setting({"enable_prefix_caching": False}),
    "prefill in steps of 1024 tokens": Setting({"max_num_batched_tokens": 1024}),
    "samples without seeds": Setting(seeded=False),
    "no logprobs": Setting(logprobs=False),
    "2 threads": Setting(env={"OMP_NUM_THREADS": "2"}),
    "2 threads, passive": Setting(env={"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}),
}


def make_model(folder: Path, name: str) -> None:
    """Model and adapter in folder/NAME and folder/NAME-adapter."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from examples.random_model import make_adapter

    base = folder / name
    if name == "demo":
        AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).save_pretrained(base)
    else:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=8000, hidden_size=384, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=6,
            num_key_value_heads=6, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=1,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(base)
    payload, peft_config = make_adapter(base, seed=0, rank=RANK, scale=0.02)
    adapter = folder / f"{name}-adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(payload)
    (adapter / "adapter_config.json").write_text(json.dumps(peft_config))


def measure(folder: Path, name: str, setting: Setting) -> dict[str, float]:
    """In a process of its own: CPU-seconds until the engine is built, and per 1000 tokens."""
    settings = EngineSettings(
        model=str(folder / name), dtype="float32", max_model_len=640, kv_cache_bytes=KV_BYTES[name], max_num_seqs=128,
        max_lora_rank=RANK if setting.adapter else 0, adapter_window=setting.slots, seed=0,
    )  # fmt: skip
    with uncollected():  # as in a role
        from rollout.vllm.arguments import build_engine, engine_arguments
        from rollout.vllm.convert import lora_request
        from rollout.vllm.cpu_lora import install_fast_cpu_lora

        if not setting.upstream_lora:
            install_fast_cpu_lora()
        engine = build_engine(engine_arguments(settings, cuda=False) | setting.arguments)
    started = time.process_time()
    lora = lora_request(Resident(0, "", folder / f"{name}-adapter", frozenset(), 16, 1)) if setting.adapter else None
    if lora is not None:
        engine.add_lora(lora)
    tokens = generate(engine, name, setting, lora, batch=0)  # warms up
    costs = []
    for batch in range(1, 4):
        costs.append(cpu_seconds(partial(generate, engine, name, setting, lora, batch)) / tokens * 1000)
    return {"start": started, "per_1000": min(costs)}


def generate(engine: Any, name: str, setting: Setting, lora: Any, batch: int) -> int:
    """One batch of other prompts than the last, of the same lengths; the number of tokens."""
    from rollout.vllm.convert import completion_params

    lengths, words = random.Random(0), random.Random(batch)
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    for group in range(GROUPS):
        prompt = [words.randrange(2, vocabulary) for _ in range(lengths.randint(*PROMPTS[name]))]
        for sample in range(GENERATIONS):
            seed = (batch * GROUPS + group) * GENERATIONS + sample
            longest = lengths.randint(*COMPLETIONS[name])
            params = completion_params(Sampling(n=1, max_tokens=longest, seed=seed if setting.seeded else None))
            params.ignore_eos = True
            params.logprobs = 0 if setting.logprobs else None
            engine.add_request(str(seed), {"prompt_token_ids": prompt}, params, lora_request=lora)
    tokens = 0
    while engine.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
    return tokens


def in_process(folder: Path, name: str, setting: Setting) -> dict[str, float]:
    wanted: dict[str, str | None] = {**os.environ, **required_env(cuda=False), **setting.env}
    env = {key: value for key, value in wanted.items() if value is not None}
    command = [sys.executable, "-m", "benchmarks.engine.engine_settings", "--child", str(folder), name]
    done = subprocess.run(
        [*command, json.dumps(asdict(setting))], env=env, text=True, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rounds(folder: Path, models: list[str], settings: list[str], count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        for name in models:
            for setting in settings:
                found = in_process(folder, name, SETTINGS[setting])
                print(f"round {number} {name} {setting}: {found}", file=sys.stderr, flush=True)
                yield {"model": name, "setting": setting, **found}


def table(found: list[dict[str, Any]]) -> str:
    best: dict[tuple[str, str], list[float]] = {}
    for row in found:
        best.setdefault((row["model"], row["setting"]), []).append(row["per_1000"])
    lines = []
    for (model, setting), costs in best.items():
        shipped = best.get((model, "as shipped"), costs)
        share = min(costs) / min(shipped)
        starts = min(row["start"] for row in found if (row["model"], row["setting"]) == (model, setting))
        lines.append([model, setting, f"{min(costs):.3f}", f"{max(costs):.3f}", f"{share:.2f}", f"{starts:.1f}"])
    head = ["model", "setting", "CPU-s per 1000 tokens", "worst round", "of as shipped", "start, CPU-s"]
    return as_table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        folder, name, setting = told.child
        print(json.dumps(measure(Path(folder), name, Setting(**json.loads(setting)))), flush=True)
        os._exit(0)  # an engine takes a second to end
    conditions_before = conditions()
    with tempfile.TemporaryDirectory() as folder:
        for name in told.models:
            make_model(Path(folder), name)
        found = list(rounds(Path(folder), told.models, told.only, told.rounds))
    text = f"{as_text(conditions_before)}\n\n{table(found)}"
    save("engine_settings", {"conditions": conditions_before, "rounds": found}, text)


if __name__ == "__main__":
    main()
