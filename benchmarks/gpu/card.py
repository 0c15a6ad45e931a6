"""Where a card's seconds go, in order of value: what a lease of a few minutes should measure first.

    make card                            what fits into nine minutes; the same command goes on
    make card DEVICE=cpu                 the rehearsal: every row on a small model, as far as a CPU can do it
    make card ARGS="--only d- --minutes 5"
    pip install --no-deps --target build/rivals -r benchmarks/requirements.txt && make card RIVALS=build/rivals

    a  the machine: processor, microseconds to start an operation, rates of products and of memory
    b  the head on 4096 tokens: by Triton's kernel, by torch's operations, and with all logits at once
    c  the gradient of shared prompts: summed by rows, and by index_select, with what either loses
    d  the learner's step of the 1B, for two sizes of micro-batches; what the card computes of it, and how many kernels
    e  the learner's step of the 8B in 4 bits, as the planner would have it on 24 GiB
    f  vLLM's step with an adapter for 64, 128 and 256 sequences: milliseconds, and of them Python's CPU time by part
       (Python binds where the two are near each other)
    g  the whole system: the 8B in 4 bits on 24 GiB, the 1B synchronous and one step ahead
    h  TRL, whose vLLM shares the card: the 1B with the same rows, LoRA and card as g

Rows of f, g and h need vLLM, rows of g Ray, h TRL (the last line above); without these they say so. Where there is no
network, benchmarks/gpu/wheels.py brings them. A row is a process of its own and a JSON under
benchmarks/results/gpu/<card>-<date>/; rows that are there are not run again, one that was cut off begins anew. All of
the folder but its runs is packed into <folder>.tar.gz.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from torch import Tensor
from torch._C._autograd import DeviceType
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.common import ROOT, as_table
from benchmarks.engine.engine_parts import GENERATIONS
from benchmarks.engine.engine_parts import measured as measured_step
from benchmarks.gpu import system
from benchmarks.gpu.learner import TINY
from benchmarks.gpu.model import group, make_trainer, steps
from benchmarks.gpu.rows import Found, Missing, Row, conditions_of, measured, options_of
from cluster.machine import processor
from cluster.memory.shape import LINEAR, SHAPES, Shape
from learner.batch.layout import Layout, Segment
from learner.config.settings import LearnerConfig
from learner.driver.roles import ALLOCATOR
from learner.model import logprob

MINUTES = 9.0
HEADS = {"1b": (128256, 2048), "8b": (128256, 4096), "qwen": (151936, 2560)}  # vocabulary and width
TOKENS = 4096
TURNS = 5


def rows(options: argparse.Namespace) -> list[Row]:
    tiny = options.tiny
    heads = {"tiny": (512, 64)} if tiny else HEADS
    small, large = (TINY, TINY) if tiny else (SHAPES["Llama-3.2-1B"], SHAPES["Llama-3.1-8B"])
    budgets = (64, 128) if tiny else (8192, 16384)
    nf4 = ("none", 128, "full") if tiny else ("nf4", 6536, "full")
    return [
        Row("a-machine", machine),
        *(Row(f"b-head-{name}-{way}", partial(head, size, way)) for name, size in heads.items() for way in HEAD_WAYS),
        *(Row(f"c-prompt-{way}", partial(prompt, way, tiny)) for way in PROMPT_WAYS),
        *(Row(f"d-1b-{budget}", partial(step, small, "none", budget, "none", tiny)) for budget in budgets),
        Row("e-8b-nf4", partial(step, large, *nf4, tiny)),
        *(Row(f"f-engine-{count}", partial(engine, options, count)) for count in ((8,) if tiny else (64, 128, 256))),
        *whole(options),
        Row("h-trl", partial(trl, options)),
    ]


def needs(*packages: str) -> None:
    """Raises Missing for the first that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise Missing(f"{package} is not installed")


def waited(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: str, turns: int = TURNS) -> float:
    """The fastest of some turns after one to warm up."""
    taken = []
    for _ in range(turns + 1):
        waited(device)
        started = time.perf_counter()
        work()
        waited(device)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def peak_of(work: Callable[[], object], device: str) -> int | None:
    """Bytes beside those that are there before."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def machine(device: str) -> Found:
    """us_to_start: without waiting for the card."""
    small = torch.ones(1, device=device)
    host = []
    for _ in range(TURNS + 1):
        waited(device)
        started = time.perf_counter()
        for _ in range(1000):
            small.add_(1)
        host.append(1e3 * (time.perf_counter() - started))
    size = 8192 if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    memory = torch.empty(2**30 if device == "cuda" else 2**24, dtype=torch.uint8, device=device)
    return {
        "processor": processor("model name"), "cores": os.cpu_count(), "us_to_start": min(host[1:]),
        "tflops": 2 * size**3 / seconds_of(lambda: a @ b, device) / 1e12,
        "GB_per_s": 2 * memory.numel() / seconds_of(lambda: memory.clone(), device) / 1e9,
    }  # fmt: skip


HEAD_WAYS = "kernel", "operations", "naive"


def head(size: tuple[int, int], way: str, device: str) -> Found:
    """Milliseconds of logprobs and their gradient; peak beside the inputs."""
    vocab, width = size
    tokens = TOKENS if device == "cuda" else 64
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    weight = torch.randn(vocab, width, device=device, dtype=dtype) * 0.02
    states = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device=device)
    if way == "kernel":
        if device != "cuda":
            raise Missing("Triton's kernel needs a card")
        if not logprob._kernel_agrees(states.device, dtype, logprob.VOCAB_TILE):
            raise RuntimeError("Triton's kernel failed its trial on this card, see the warning")

    def work() -> Tensor:
        if way == "naive":
            logits = (states @ weight.t()).float()
            found = logits.log_softmax(-1).gather(1, targets[:, None])
        else:
            found = logprob.policy_logprobs(states, weight, targets, 1.0)[0]
        return torch.autograd.grad(found.sum(), states)[0]

    told = mock.patch.object(logprob, "_kernel_agrees", return_value=False) if way == "operations" else nullcontext()
    with told:
        return {"ms": 1e3 * seconds_of(work, device), "peak": peak_of(work, device)}


PROMPT_WAYS = "rows", "index_select"


def prompt(way: str, tiny: bool, device: str) -> Found:
    """Keys of 8 completions behind one prompt. lost: relative error of the prompt's gradient; repeats: whether a second
    pass gives the same bits."""
    before, length, heads, width = (8, 4, 2, 8) if tiny else (1024, 256, 8, 128)
    ends = range(before, before + 8 * length, length)
    layout = Layout([Segment(0, before), *(Segment(end, end + length, 0, before) for end in ends)])
    keys = layout.ragged(torch.device(device)).keys
    source = torch.randn(before + 8 * length, heads, width, device=device).bfloat16().requires_grad_()
    slopes = torch.randn(len(keys.taken), heads, width, device=device).bfloat16()

    def work() -> Tensor:
        found = keys.of(source) if way == "rows" else source.index_select(0, keys.taken)
        return torch.autograd.grad(found, source, slopes)[0]

    exact = torch.zeros(source.shape, dtype=torch.float64, device=device).index_add_(0, keys.taken, slopes.double())
    first, second = work(), work()
    lost = float((first.double() - exact)[:before].norm() / exact[:before].norm())
    return {"ms": 1e3 * seconds_of(work, device), "lost": lost, "repeats": torch.equal(first, second)}


def step(shape: Shape, base: str, budget: int, checkpointing: str, tiny: bool, device: str) -> Found:
    """A step on 8 groups of 8 completions of 786 tokens; then one under the profiler: seconds in which the card
    computes, and kernels without copies."""
    lengths = (16, 24) if tiny else (256, 786)
    settings = {"checkpointing": checkpointing, "token_budget": budget, "lora": {"rank": 16, "alpha": 32}}
    learner = LearnerConfig.model_validate(settings)
    trainer = make_trainer(shape, learner, device, base=base, completion=lengths[1])
    groups = [group(i, lengths[0], [lengths[1]] * 8, shape.vocab) for i in range(2 if tiny else 8)]
    found = steps(trainer, groups, 1 if tiny else TURNS, device)
    if device == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            trainer._step(groups)
            waited(device)
        on_card = (event for event in profile.events() if event.device_type == DeviceType.CUDA)
        kernels = [event for event in on_card if not event.name.startswith(("Memcpy", "Memset"))]
        found |= {"card_seconds": sum(one.device_time for one in kernels) / 1e6, "kernels": len(kernels)}
        named: dict[str, float] = {}
        for one in kernels:
            named[one.name] = named.get(one.name, 0.0) + one.device_time / 1e3
        found["longest_ms"] = dict(sorted(named.items(), key=lambda item: -item[1])[:12])
    return found


def engine(options: argparse.Namespace, count: int, device: str) -> Found:
    """gleaner's engine on `count` completions at once, with an adapter: milliseconds of a step of vLLM."""
    needs("vllm")
    from rollout.vllm.environment import required_env

    os.environ |= required_env(cuda=device == "cuda")
    from rollout.engine import EngineSettings
    from rollout.vllm.engine import VllmEngine

    tiny = options.tiny
    shape = system.TINY if tiny else SHAPES["Llama-3.2-1B"]
    folder, length = system.model(options, shape), 16 if tiny else 256
    ours = VllmEngine(
        EngineSettings(
            model=str(folder), dtype="float32" if tiny else "bfloat16", max_model_len=2 * length, seed=0,
            kv_cache_bytes=2**26 if tiny else 2**34, max_num_seqs=count, max_lora_rank=16, adapter_window=2,
        )
    )  # fmt: skip

    async def run() -> Found:
        await ours.load_adapter(adapter_of(folder))
        found = await measured_step(ours, [[5 + i] * (length // 2) for i in range(count // GENERATIONS)], length // 2)
        cpu = {f"cpu_{part}_ms": ms for part, ms in found["ms"].items()}
        return {"ms": found["wall_ms"], "steps": found["steps"]} | cpu

    return asyncio.run(run())


def adapter_of(model: Path) -> Any:
    """A random adapter of rank 16 on all linear layers of the model in this folder."""
    from rollout.types import Adapter

    with torch.device("meta"):
        lm: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        told = LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEAR), task_type="CAUSAL_LM")
        shapes = {name: one.shape for name, one in get_peft_model_state_dict(get_peft_model(lm, told)).items()}
    random = torch.Generator().manual_seed(0)
    tensors = {name: (torch.randn(shape, generator=random) * 0.01).bfloat16() for name, shape in shapes.items()}
    config = json.loads(json.dumps(told.to_dict(), default=lambda one: sorted(one) if isinstance(one, set) else one))
    return Adapter.build(0, save(tensors), config)


def whole(options: argparse.Namespace) -> list[Row]:
    """The 1B with micro-batches by the planner; the 8B in 4 bits with everything by the planner."""
    run = partial(of_system, options)
    if options.tiny:
        return [Row("g-tiny", partial(run, system.TINY, 3, ["memory.device=3GiB", "model.dtype=float32"]))]
    small, large = SHAPES["Llama-3.2-1B"], SHAPES["Llama-3.1-8B"]
    capped = ["memory.device=24GiB", "model.base=nf4"]
    return [
        Row("g-8b-nf4-24gib", partial(run, large, 6, [*system.SLICES, *capped])),
        Row("g-1b", partial(run, small, 8, [*system.SLICES, "memory.device=76GiB"])),
        Row("g-1b-ahead", partial(run, small, 10, [*system.SLICES, "memory.device=76GiB", "max_staleness=1"])),
    ]


SAMPLES = 64  # completions of a step


def of_system(options: argparse.Namespace, shape: Shape, steps: int, settings: list[str], device: str) -> Found:
    needs("vllm", "ray")
    found = system.system(options, shape, steps, settings, device)
    return found | {"samples_per_s": SAMPLES / found["time/step"]}


def trl(options: argparse.Namespace, device: str) -> Found:
    """Mean of the steps after the second. As gleaner is set: bfloat16 weights, one update a batch, no KL, micro-batches
    of eight completions; otherwise as TRL comes, its correction for what vLLM's logprobs differ included."""
    needs("trl", "datasets", *(["vllm"] if device == "cuda" else []))
    shape = system.TINY if options.tiny else SHAPES["Llama-3.2-1B"]
    watch, folder = Ends(device), system.model(options, shape)
    with tempfile.TemporaryDirectory() as out:
        trl_trainer(folder, out, watch=watch, tiny=options.tiny, device=device).train()
    seconds = (watch.ends[-1] - watch.ends[1]) / (len(watch.ends) - 2)
    peak = torch.cuda.max_memory_reserved() if device == "cuda" else None
    return {"time/step": seconds, "samples_per_s": SAMPLES / seconds, "reserved": peak}


class Ends(TrainerCallback):
    """When each step ended."""

    def __init__(self, device: str) -> None:
        self.ends: list[float] = []
        self._device = device

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        waited(self._device)
        self.ends.append(time.perf_counter())


def trl_trainer(folder: Path, out: str, *, watch: TrainerCallback, tiny: bool, device: str) -> Any:
    """GRPOTrainer with vLLM in its own process, on a card; on a CPU with transformers' generate."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    cuda, length = device == "cuda", 24 if tiny else 786
    shared = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.45} if cuda else {}
    rows = [json.loads(line) for line in (ROOT / "examples" / "gsm8k" / "train-sample.jsonl").read_text().splitlines()]
    settings = GRPOConfig(
        output_dir=out, max_steps=4 if tiny else 8, per_device_train_batch_size=8, gradient_accumulation_steps=8,
        num_generations=8, max_completion_length=length, temperature=1.0, beta=0.0, learning_rate=1e-6,
        model_init_kwargs={"dtype": "bfloat16" if cuda else "float32"}, bf16=cuda, use_cpu=not cuda,
        gradient_checkpointing=False, logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        **shared,
    )  # fmt: skip
    return GRPOTrainer(
        model=str(folder), reward_funcs=[even_share], args=settings, callbacks=[watch],
        train_dataset=Dataset.from_list([{"prompt": row["question"]} for row in rows[:SAMPLES]]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEAR), task_type="CAUSAL_LM"),
    )  # fmt: skip


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward of benchmarks.gpu.system."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def report(found: dict[str, Found]) -> str:
    """A line for each row: its numbers, or why there are none."""
    lines = []
    for name, one in found.items():
        numbers = {key: value for key, value in one.items() if isinstance(value, int | float) and key != "seconds"}
        told = [f"{key} {value:.4g}" for key, value in numbers.items()] or [str(one.get("error", ""))]
        lines.append([name, one["status"], ", ".join(told)])
    return f"## A card's seconds\n\n{as_table(['row', 'status', 'found'], lines)}\n\n{conditions_of(found)}"


def packed(folder: Path) -> Path:
    """The results without the runs, which hold rollouts and adapters."""
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as file:
        for one in sorted(folder.iterdir()):
            if one.is_file():
                file.add(one, f"{folder.name}/{one.name}")
    return archive


# Rows that hold a learner and nothing else. vLLM, and a run's driver, have their own.
OF_LEARNER = ("b-", "c-", "d-", "e-")


def main() -> None:
    options = options_of(__doc__, MINUTES)
    if (options.row or "").startswith(OF_LEARNER):
        os.environ.update(ALLOCATOR)  # as the learner of a run has it on a card
    planned = rows(options)
    measured("benchmarks.gpu.card", options, planned, report)
    if not options.row:
        files = [file for row in planned if (file := options.folder / f"{row.name}.json").exists()]
        (options.folder / "card.md").write_text(report({file.stem: json.loads(file.read_text()) for file in files}))
        print(packed(options.folder))


if __name__ == "__main__":
    main()
