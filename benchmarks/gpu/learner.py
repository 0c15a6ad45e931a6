"""The learner on a CUDA card (checklist A, B and C), on random weights of the real shapes: nothing is downloaded.

    PYTHONPATH=. python -m benchmarks.gpu.learner                      all rows, about 40 minutes on an H100
    PYTHONPATH=. python -m benchmarks.gpu.learner --minutes 9          what fits into 9; the same command goes on
    PYTHONPATH=. python -m benchmarks.gpu.learner --only a-Llama b-    rows whose names begin so
    PYTHONPATH=. python -m benchmarks.gpu.learner --device cpu --tiny  the rehearsal, into build/rehearsal

    a  the peak for five sizes and six methods, beside the memory model's prediction
    b  steps by checkpointing policy, packed and padded
    c  one optimizer step of TRL's GRPOTrainer and of gleaner on the same rows and shape. TRL runs its own training loop
       with bfloat16 weights and its defaults for checkpointing; its generation is off, since where it would generate
       and score it is handed the rows, so neither side's time has generation in it

Needs torch, transformers, peft, accelerate, pyarrow, pydantic, numpy, safetensors; neither ray, vllm nor datasets. Rows
that need bitsandbytes (8-bit states, 4-bit bases) or trl say so where it is missing. Each row is a process of its own
and a JSON under benchmarks/results/gpu/<card>-<date>/; rows that are there are not run again.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from benchmarks.common import as_table
from benchmarks.gpu.model import group, make_trainer, steps, utilisation
from benchmarks.gpu.rows import Found, Missing, Row, conditions_of, measured, options_of
from benchmarks.learner.learner_step import trl_trainer
from benchmarks.learner.memory_tables import FIVE, GRPO_TABLE, LENGTHS
from benchmarks.learner.memory_tables import METHODS as TABLE_METHODS
from cluster.memory import learner as learner_memory
from cluster.memory import shape as units
from cluster.memory.learner import Learning, Micro
from cluster.memory.plan import Plan, Wish, Workload
from cluster.memory.search import plan
from cluster.memory.shape import GB, LINEAR, SHAPES, Shape
from learner.config.settings import LearnerConfig
from learner.driver.roles import ALLOCATOR

TINY = Shape("tiny", "llama", 64, 160, 2, 4, 2, 16, 512, tied=True)
GROUPS = 4  # of a memory row's step, a micro-batch each, as in the published table
COUNT = 8  # steps: the peak is that of one, and each row costs seconds of a lent card
METHODS: dict[str, Learning] = {
    "full": TABLE_METHODS["full, AdamW"],
    "full-rounded": TABLE_METHODS["full, AdamW rounded"],
    "full-8bit": TABLE_METHODS["full, 8-bit Adam"],
    "full-8bit-ckpt": TABLE_METHODS["full, 8-bit Adam, all twice"],
    "lora": TABLE_METHODS["LoRA"],
    "lora-auto": TABLE_METHODS["LoRA, all twice"],  # what the planner chooses for the card takes the place of `full`
    "qlora": TABLE_METHODS["QLoRA, all twice"],
}
ROWS_OF_PUBLISHED = dict(zip(("full-rounded", "full-8bit", "full-8bit-ckpt", "lora"), GRPO_TABLE.values(), strict=True))
RAGGED = (786, 700, 512, 400, 256, 128, 64, 16)  # completions of a group


def memory_rows(tiny: Shape | None) -> list[Row]:
    """The small models first: they say most per minute."""
    shapes = {name: SHAPES[name] for name in FIVE} if tiny is None else {tiny.name: tiny}
    lengths = LENGTHS if tiny is None else Workload(generations=4, prompt=16, completion=24)
    many = "Llama-3.2-1B" if tiny is None else tiny.name
    found = [
        Row(f"a-{name}-{method}", partial(measure_memory, shape, method, lengths, COUNT if tiny is None else 2))
        for name, shape in shapes.items()
        for method in METHODS
    ]
    more = [
        Row(
            f"a-{many}-lora-g{count}",
            partial(measure_memory, shapes[many], "lora", replace(lengths, generations=count), 5),
        )
        for count in (4, 8, 16, 64)
    ]
    return [*more, *found]


def measure_memory(shape: Shape, method: str, lengths: Workload, count: int, device: str) -> Found:
    """The token budget is one group of four, however many completions there are."""
    budget = replace(lengths, generations=4).group
    learning = _settled(shape, method, lengths, budget, device)
    settings: dict[str, Any] = {
        "mode": learning.mode,
        "checkpointing": learning.checkpointing,
        "token_budget": budget,
        "optimizer": {"kind": learning.optimizer},
    }
    if learning.mode == "full":
        settings["learning_rate"] = 1e-6
    learner = LearnerConfig.model_validate(settings)
    micro = Micro.of(lengths.prompt, lengths.completion, lengths.generations, budget)
    parts = learner_memory.learner_bytes(shape, learning, micro)
    trainer = make_trainer(shape, learner, device, base=learning.base, completion=lengths.completion)
    groups = [
        group(i, lengths.prompt, [lengths.completion] * lengths.generations, shape.vocab)
        for i in range(GROUPS if lengths.generations == 4 else 1)
    ]
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = steps(trainer, groups, count, device)
    tokens = len(groups) * lengths.group
    return {
        "shape": shape.name,
        "method": method,
        "generations": lengths.generations,
        "checkpointing": learning.checkpointing,
        "predicted": units.total(parts) - parts["context"] - parts["fragmentation"],
        "parts": parts,
        **found,
        **utilisation(shape, tokens, found["step_seconds"], full=learning.mode == "full", device=device),
    }


def _settled(shape: Shape, method: str, lengths: Workload, budget: int, device: str) -> Learning:
    learning = METHODS[method]
    if method != "lora-auto":
        return learning
    total = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 2**34
    chosen = plan(shape, total, lengths, Wish(base="none", token_budget=budget, layouts=("separate",)))
    return replace(learning, checkpointing=chosen.checkpointing) if isinstance(chosen, Plan) else learning


def memory_table(found: dict[str, Found]) -> tuple[list[str], list[list[str]]]:
    """GB without the CUDA context: allocated / reserved / predicted, and the published row."""
    header = ["row", "allocated", "reserved", "predicted", "allocated / predicted", "published", "s / step", "MFU"]
    lines = []
    for name, one in found.items():
        if one["status"] != "ok":
            lines.append([name, one["status"], *[""] * 6])
            continue
        same = one["generations"] == 4 and one["shape"] in FIVE
        published = ROWS_OF_PUBLISHED.get(one["method"]) if same else None
        lines.append(
            [
                name, _gb(one["allocated"]) + (" (budget halved)" if one["oom_retries"] else ""), _gb(one["reserved"]),
                _gb(one["predicted"]), f"{one['allocated'] / one['predicted']:.2f}",
                "" if published is None else str(published[FIVE.index(one["shape"])] or "> 80"),
                f"{one['step_seconds']:.3f}", "" if one["mfu"] is None else f"{one['mfu']:.0%}",
            ]
        )  # fmt: skip
    return header, lines


def _gb(count: float | None) -> str:
    return "" if count is None else f"{count / GB:.2f}"


def step_rows(tiny: Shape | None) -> list[Row]:
    shape = SHAPES["Llama-3.2-1B"] if tiny is None else tiny
    work, count = (Workload(8, 256, 786), 10) if tiny is None else (Workload(8, 16, 24), 1)
    policies: list[Any] = ["none", "mlp", "full", shape.layers // 2]
    ways = [*((policy, True) for policy in policies), ("full", False)]
    return [
        Row(f"b-step-{'packed' if packed else 'padded'}-{policy}", partial(step, shape, work, policy, packed, count))
        for policy, packed in ways
    ]


def step(shape: Shape, work: Workload, policy: Any, packed: bool, count: int, device: str) -> Found:
    """One optimizer step on four ragged groups; FLOPs count the tokens that are real, each prompt once per group."""
    learner = LearnerConfig.model_validate({"checkpointing": policy, "token_budget": max(work.group, 8192)})
    trainer = make_trainer(shape, learner, device, completion=work.completion, packed=packed)
    lengths = [max(2, work.completion * length // RAGGED[0]) for length in RAGGED]
    found = steps(trainer, [group(i, work.prompt, lengths, shape.vocab) for i in range(4)], count, device)
    tokens = 4 * (work.prompt + sum(lengths) - len(lengths))
    rate = utilisation(shape, tokens, found["step_seconds"], full=False, device=device)
    return {"policy": policy, "tokens": tokens, "tokens_per_s": tokens / found["step_seconds"], **found, **rate}


def step_table(found: dict[str, Found]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for name, one in found.items():
        if one["status"] != "ok":
            lines.append([name, one["status"], *[""] * 3])
            continue
        mfu = "" if one["mfu"] is None else f"{one['mfu']:.0%}"
        cells = [f"{one['step_seconds'] * 1e3:.0f}", f"{one['allocated'] / 1e9:.2f}", f"{one['tokens_per_s']:.0f}"]
        lines.append([name, *cells, mfu])
    return ["row", "ms", "peak GB", "tokens / s", "MFU"], lines


def trl_rows(tiny: Shape | None) -> list[Row]:
    shape = SHAPES["Llama-3.2-1B"] if tiny is None else tiny
    work = Workload(generations=8, prompt=256, completion=786) if tiny is None else Workload(4, 16, 24)
    count = 10 if tiny is None else 2
    return [Row("c-gleaner", partial(ours, shape, work, count)), Row("c-trl", partial(theirs, shape, work, count))]


def ours(shape: Shape, work: Workload, count: int, device: str) -> Found:
    """Micro-batches of four completions and all layers twice, as TRL is set below."""
    budget = work.prompt + 4 * (work.completion - 1)
    learner = LearnerConfig.model_validate({"checkpointing": "full", "token_budget": budget})
    trainer = make_trainer(shape, learner, device, completion=work.completion)
    return steps(trainer, [group(0, work.prompt, [work.completion] * work.generations, shape.vocab)], count, device)


def theirs(shape: Shape, work: Workload, count: int, device: str) -> Found:
    if find_spec("trl") is None or find_spec("datasets") is None:
        raise Missing("trl and datasets are not installed")
    from peft import LoraConfig, get_peft_model

    settings = shape.to_config()
    with torch.device(device):
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEAR), task_type="CAUSAL_LM")
    watch, rows = _Watch(device), _given(shape, work, device)
    with tempfile.TemporaryDirectory() as folder:
        trl_trainer(
            get_peft_model(model, adapter), rows, 4, count + 2, watch, output_dir=folder, bf16=device == "cuda",
            use_cpu=device == "cpu",
        ).train()  # fmt: skip
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else None
    allocated = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {"allocated": allocated, "reserved": reserved, "step_seconds": float(np.median(watch.seconds[2:]))}


def _given(shape: Shape, work: Workload, device: str) -> dict[str, Any]:
    """What GRPOTrainer._generate_and_score_completions returns."""
    torch.manual_seed(0)
    prompts = torch.randint(0, shape.vocab, (1, work.prompt), device=device).repeat(work.generations, 1)
    completions = torch.randint(0, shape.vocab, (work.generations, work.completion), device=device)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-1, 1, work.generations, device=device),
        "num_items_in_batch": torch.tensor(completions.numel(), device=device),
    }


class _Watch(TrainerCallback):
    def __init__(self, device: str) -> None:
        self.seconds: list[float] = []
        self._device, self._started = device, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)


def trl_table(found: dict[str, Found]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for name, one in found.items():
        peaks = [one.get(key) for key in ("allocated", "reserved")]
        cells = [f"{one['step_seconds']:.3f}"] if one["status"] == "ok" else [one["status"]]
        lines.append([name, *cells, *("" if peak is None else f"{peak / 1e9:.2f}" for peak in peaks)])
    return ["row", "s / step", "allocated GB", "reserved GB"], lines


def report(found: dict[str, Found]) -> str:
    """Tables of the rows that are there."""
    parts = {"a": ("Memory, GB without the CUDA context", memory_table), "b": ("Speed", step_table),
             "c": ("One step beside TRL", trl_table)}  # fmt: skip
    text = ""
    for letter, (title, table) in parts.items():
        some = {name: one for name, one in found.items() if name.startswith(f"{letter}-")}
        text += f"## {title}\n\n{as_table(*table(some))}\n\n" if some else ""
    return text + conditions_of(found)


def main() -> None:
    options = options_of(__doc__, 60)
    tiny = TINY if options.tiny else None
    os.environ.update(ALLOCATOR)  # as the learner of a run has it on a card; of the rows' processes
    measured("benchmarks.gpu.learner", options, [*memory_rows(tiny), *step_rows(tiny), *trl_rows(tiny)], report)


if __name__ == "__main__":
    main()
