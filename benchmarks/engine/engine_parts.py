"""Where a step of the generator's engine spends its time on a CPU: Python's part of it, and the model's.

    make smollm2 && PYTHONPATH=. .venv/bin/python -m benchmarks.engine.engine_parts

64 completions at once under an adapter: a random Llama of 0.4M weights, one of 25M (as the ragged workload has), and
SmolLM2-135M-Instruct. CPU time of the engine's thread within vLLM's own functions:

    schedule    which requests compute what
    output      what came out goes to its request (update_from_output), and to its completion (process_outputs): what an
                output path that hands tokens out only as a request ends could save at most
    prepare     the batch is laid out for the model
    model       the layers, the adapter among them
    head        hidden states to logits
    sample      logits to tokens and logprobs
    other       all else of a step, LLMEngine's own code among it

`make card` has the same for a card, where a step is bound by Python if its CPU time is near its wall time.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, parser_of, save, under
from benchmarks.engine.engine_speed import chats, link_model, make_model
from rollout.engine import EngineSettings
from rollout.types import Adapter, Sampling
from rollout.vllm.environment import required_env

GROUPS, GENERATIONS, RANK = 8, 8, 16
PARTS = "schedule", "output", "prepare", "model", "head", "sample", "other"
MODELS = {"0.4M": (2, 128), "25M": (12, 384)}  # layers and width


class StepParts:
    """CPU milliseconds of an engine's thread by part, within it, and the number of vLLM's steps.

    engine: a VllmEngine whose vLLM runs in this process.
    """

    def __init__(self, engine: Any) -> None:
        llm = engine._thread._turns.engine
        core = llm.engine_core.engine_core
        self._parts = {
            "schedule": [(core.scheduler, "schedule")],
            "output": [(core.scheduler, "update_from_output"), (llm.output_processor, "process_outputs")],
            "execute": [(core.model_executor, "execute_model")],
            "sample": [(core.model_executor, "sample_tokens")],
            "step": [(llm, "step")],
        }
        runner = core.model_executor.driver_worker.worker.model_runner
        if hasattr(runner, "_model_forward"):  # vLLM's first runner, as on a CPU
            self._parts |= {"model": [(runner, "_model_forward")], "head": [(runner.model, "compute_logits")]}
        self.ms: dict[str, float] = defaultdict(float)
        self.steps = 0

    def __enter__(self) -> StepParts:
        for part, functions in self._parts.items():
            for holder, name in functions:
                setattr(holder, name, self._timed(part, getattr(holder, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for functions in self._parts.values():
            for holder, name in functions:
                delattr(holder, name)  # the class has its own

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.ms[part] += 1e3 * (time.thread_time() - started)
                self.steps += part == "step"

        return timed

    def a_step(self) -> dict[str, float]:
        """Milliseconds of one step, by part; "step" is all of it."""
        ms = {part: found / self.steps for part, found in self.ms.items()}
        if "model" in ms:  # else all of it is told as `execute`: vLLM's second runner, as on a card
            ms["prepare"] = ms.pop("execute") - ms["model"] - ms["head"]
        ms["other"] = ms["step"] - sum(found for part, found in ms.items() if part != "step")
        return ms


async def measured(engine: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """The second of two times that the engine samples GENERATIONS completions of each prompt: wall_ms and ms are of one
    step, ms of the CPU by part."""

    async def sampled(seed: int) -> int:
        samplings = [Sampling(n=GENERATIONS, max_tokens=max_tokens, seed=seed + 100 * i) for i in range(len(prompts))]
        groups = await asyncio.gather(*map(engine.generate, prompts, samplings))
        return sum(len(completion.token_ids) for group in groups for completion in group)

    await sampled(1)
    started = time.perf_counter()
    with StepParts(engine) as parts:
        tokens = await sampled(10_000)
    wall = 1e3 * (time.perf_counter() - started) / parts.steps
    return {"steps": parts.steps, "tokens": tokens, "wall_ms": wall, "ms": parts.a_step()}


def case(folder: Path, name: str, smollm2: Path) -> dict[str, Any]:
    from rollout.vllm.engine import VllmEngine

    if name in MODELS:
        make_model(folder, *MODELS[name], RANK)
        prompts, most = [[(7 * i + j) % 8000 for j in range(12 if name == "0.4M" else 300)] for i in range(GROUPS)], 256
    else:
        link_model(folder, str(smollm2), "float32", RANK)
        prompts, most = chats(str(smollm2), GROUPS), 80
    engine = VllmEngine(
        EngineSettings(
            model=str(folder / "base"), dtype="float32", max_model_len=1024, kv_cache_bytes=2**31, seed=0,
            max_num_seqs=GROUPS * GENERATIONS, max_lora_rank=RANK, adapter_window=2,
        )
    )  # fmt: skip
    adapter = folder / "adapter"
    told = json.loads((adapter / "adapter_config.json").read_text())

    async def run() -> dict[str, Any]:
        await engine.load_adapter(Adapter.build(0, (adapter / "adapter_model.safetensors").read_bytes(), told))
        try:
            return await measured(engine, prompts, most)
        finally:
            await engine.close()

    return asyncio.run(run())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--smollm2", type=Path, default=Path("build/smollm2/float32"))
    options = parser.parse_args()
    os.environ |= required_env(cuda=False)
    told, found = conditions(ENGINE_PACKAGES), {}
    for name in (*MODELS, "SmolLM2-135M"):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = case(Path(folder), name, options.smollm2.resolve())
        print(name, found[name], flush=True)
    rows = [
        [name, str(one["steps"]), f"{one['tokens'] / one['steps']:.0f}", f"{one['ms']['step']:.2f}"]
        + [f"{one['ms'][part]:.2f} ({one['ms'][part] / one['ms']['step']:.0%})" for part in PARTS]
        for name, one in found.items()
    ]
    text = (
        "# A step of the generator's engine on a CPU, by part\n\n"
        f"{as_table(['model', 'steps', 'completions in a step', 'CPU ms a step', *PARTS], rows)}\n\n"
        f"{GROUPS} groups of {GENERATIONS}, LoRA r = {RANK}, float32, one thread; the parts are in the module.\n\n"
        f"Conditions: {under(told, 'CPU time of the engine thread')}\n"
    )
    save("engine_parts", {"conditions": told, "found": found}, text)


if __name__ == "__main__":
    main()
