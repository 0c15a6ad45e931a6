"""One side of benchmarks.engine.engine_speed in a process of its own: builds its engine, then generates whenever it is
asked.

    gleaner    rollout.vllm.engine.VllmEngine, every group submitted at once
    vllm       vllm.LLM.generate, as it comes
    vllm+op    the same with gleaner's LoRA kernel for CPUs, so that the wrapper alone is the difference to gleaner
    vllm base  vllm.LLM.generate as it comes, without an adapter and without LoRA
    hf         transformers generate with PEFT's unmerged adapter, rows of a batch padded on the left
    hf merged  the same with the adapter merged into the weights

Reads workloads as JSON lines, answers {"seconds", "cpu_seconds", "tokens", "sequences"} as JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.engine import EngineSettings
from rollout.types import Adapter, Sampling
from rollout.vllm.arguments import engine_arguments, lora_arguments
from rollout.vllm.convert import Resident, completion_params, lora_request

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


def main() -> None:
    side, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
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


if __name__ == "__main__":
    main()
